"""mem0's `AsyncMemory` and `AsyncMemoryClient`, with planned searches."""

from __future__ import annotations

from collections.abc import Iterable
from types import EllipsisType
from typing import Any

from ctxreuse import ReusePlanner
from ctxreuse.context.blocks import Message
from ctxreuse.errors import InvalidRequestError
from mem0_ctxreuse.planning import MemorySearch, asked
from mem0_ctxreuse.protocols import AsyncSearchableMemory
from mem0_ctxreuse.rendering import MemoryContext
from mem0_ctxreuse.signatures import like_wrapped
from mem0_ctxreuse.wrapper import MemoryWrapper, is_sync


class AsyncReuseMemory(MemoryWrapper):
    """An `AsyncMemory` or `AsyncMemoryClient` of mem0 whose searches come in planned order.

    `ReuseMemory`, awaited; planning itself takes less than a millisecond and is not.

    Args:
        memory: A mem0 `AsyncMemory` or `AsyncMemoryClient`, or anything that searches as they do.
        planner: As for `ReuseMemory`.
        tenant: As for `ReuseMemory`.

    Raises:
        InvalidRequestError: If an argument is of the wrong kind.
    """

    def __init__(
        self,
        memory: AsyncSearchableMemory,
        *,
        planner: ReusePlanner | EllipsisType = ...,
        tenant: str | None = None,
    ) -> None:
        super().__init__(memory, planner=planner, tenant=tenant)
        if is_sync(memory):
            raise InvalidRequestError(
                f"the search of {type(memory).__name__} cannot be awaited; use ReuseMemory"
            )

    @like_wrapped
    async def search(self, query: str, *args: Any, **kwargs: Any) -> Any:
        """Do what `ReuseMemory.search` does."""
        search = MemorySearch(self._memory.search, query, args, kwargs)
        return self._memory_planner.reordered(await search.run(), search)

    async def context(
        self,
        query: str,
        *args: Any,
        system: str | None = None,
        history: Iterable[Message] | None = None,
        conversation_id: str | int | None = None,
        **kwargs: Any,
    ) -> MemoryContext:
        """Do what `ReuseMemory.context` does."""
        request = asked(query, system, history, conversation_id)
        search = MemorySearch(self._memory.search, query, args, kwargs)
        return self._memory_planner.context(await search.run(), search, request)

    async def messages(
        self,
        query: str,
        *args: Any,
        system: str | None = None,
        history: Iterable[Message] | None = None,
        conversation_id: str | int | None = None,
        **kwargs: Any,
    ) -> list[dict[str, Any]]:
        """Do what `ReuseMemory.messages` does."""
        context = await self.context(
            query,
            *args,
            system=system,
            history=history,
            conversation_id=conversation_id,
            **kwargs,
        )
        return context.messages()

    async def __aenter__(self) -> AsyncReuseMemory:
        await self._special("__aenter__")()
        return self

    async def __aexit__(self, *raised: Any) -> Any:
        return await self._special("__aexit__")(*raised)
