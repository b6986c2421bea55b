"""mem0's memories and clients, sync and async, with planned searches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ctxreuse import ReusePlanner
from ctxreuse.context.blocks import Message
from ctxreuse.errors import InvalidRequestError
from mem0_ctxreuse.memory_planner import MemorySearch, asked
from mem0_ctxreuse.memory_results import MemoryContext
from mem0_ctxreuse.memory_wrapper import (
    AsyncSearchableMemory,
    MemoryWrapper,
    SearchableMemory,
    is_async,
    is_sync,
    like_wrapped,
)


class ReuseMemory(MemoryWrapper):
    r"""A `Memory` or `MemoryClient` of mem0 whose searches come in planned order.

    Every other attribute and method is the wrapped memory's: `add`, `get_all` (in its own order and
    pages), `update`, `delete`, `history`, `reset`, `with`. An attribute that the memory has is set
    there, too.

    A planning fault never fails a call: the memories go through as found, the first fault is
    logged, all are counted in `faults`. Errors of the memory itself are raised as they are.

    Args:
        memory: A mem0 `Memory` or `MemoryClient`, or anything that searches as they do.
        planner: Plans the contexts; None makes a new one. Share one between wrappers that talk to
            the same engine.
        tenant: The tenant of the requests, unless `ctxreuse.request_context` says another. None
            takes the user whose memories the filters select (`mem0_ctxreuse.tenant_of`).

    Raises:
        InvalidRequestError: wrong type.

    Example:
        >>> class Notes:
        ...     def search(self, query, *, filters=None):
        ...         return {"results": [{"id": "1", "memory": "Alice lives in Porto."}]}
        >>> memory = ReuseMemory(Notes())
        >>> memory.messages("Where does Alice live?", filters={"user_id": "alice"})
        [{'role': 'user', 'content': '[Doc_1] Alice lives in Porto.\n\nWhere does Alice live?'}]
    """

    def __init__(
        self,
        memory: SearchableMemory,
        *,
        planner: ReusePlanner | None = None,
        tenant: str | None = None,
    ) -> None:
        super().__init__(memory, planner=planner, tenant=tenant)
        if is_async(memory):
            raise InvalidRequestError(
                f"the search of {type(memory).__name__} is awaited; use AsyncReuseMemory"
            )

    @like_wrapped
    def search(self, query: str, *args: Any, **kwargs: Any) -> Any:
        """Search as the wrapped memory does, and return what it found in planned order.

        The plan counts as sent: use `memory.memory.search` for what no prompt will show.

        Args:
            query: What to look for.
            args: As the wrapped memory takes them.
            kwargs: As the wrapped memory takes them: `filters`, `top_k`, `threshold`, `rerank`, ...

        Returns:
            The result, its memories copied, unaltered, all of them (exact duplicates each in its
            own place), in planned order. A dict has one more key, `"ctxreuse"`:
            `{"memories": [{"id", "rank", "label"}, ...], "plan": {...}}`, JSON-compatible; `rank`
            is the memory's position as found, from 0, the `plan` holds the order annotation. A
            result that is a list stays one, without it. After a planning fault there is no such
            key.
        """
        search = MemorySearch(self._memory.search, query, args, kwargs)
        return self._memory_planner.reordered(search.run(), search)

    def context(
        self,
        query: str,
        *args: Any,
        system: str | None = None,
        history: Iterable[Message] | None = None,
        conversation_id: str | int | None = None,
        **kwargs: Any,
    ) -> MemoryContext:
        """Search, and return what was found as text for a prompt.

        Exact duplicates are shown once, in the place of the best one.

        Args:
            query: What to look for; the question, too.
            args: As `search` takes them.
            system: The system text that will stand before the context.
            history: The messages that will be sent before it, without the system message. With a
                `conversation_id`, memories that they show already, unchanged, are not repeated but
                referred to. None: that of `ctxreuse.request_context`.
            conversation_id: The conversation's name within the tenant. None: that of
                `ctxreuse.request_context`.
            kwargs: As `search` takes them: `filters`, `top_k`, ...

        Raises:
            InvalidRequestError: wrong type.
        """
        request = asked(query, system, history, conversation_id)
        search = MemorySearch(self._memory.search, query, args, kwargs)
        return self._memory_planner.context(search.run(), search, request)

    def messages(
        self,
        query: str,
        *args: Any,
        system: str | None = None,
        history: Iterable[Message] | None = None,
        conversation_id: str | int | None = None,
        **kwargs: Any,
    ) -> list[dict[str, Any]]:
        """Search, and return OpenAI chat messages that answer the query with what was found.

        Takes the arguments of `context`.

        Returns:
            The system message if there is a `system` text, the history as given, and one user
            message: memories, annotation, question. Without memories it is the question alone.
        """
        return self.context(
            query, *args, system=system, history=history, conversation_id=conversation_id, **kwargs
        ).messages()

    def __enter__(self) -> ReuseMemory:
        self._special("__enter__")()
        return self

    def __exit__(self, *raised: Any) -> Any:
        return self._special("__exit__")(*raised)


class AsyncReuseMemory(MemoryWrapper):
    """An `AsyncMemory` or `AsyncMemoryClient` of mem0 whose searches come in planned order.

    `ReuseMemory`, awaited; planning takes less than a millisecond and is not awaited.

    Args:
        memory: A mem0 `AsyncMemory` or `AsyncMemoryClient`, or anything that searches as they do.
        planner: As for `ReuseMemory`.
        tenant: As for `ReuseMemory`.

    Raises:
        InvalidRequestError: wrong type.
    """

    def __init__(
        self,
        memory: AsyncSearchableMemory,
        *,
        planner: ReusePlanner | None = None,
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
            query, *args, system=system, history=history, conversation_id=conversation_id, **kwargs
        )
        return context.messages()

    async def __aenter__(self) -> AsyncReuseMemory:
        await self._special("__aenter__")()
        return self

    async def __aexit__(self, *raised: Any) -> Any:
        return await self._special("__aexit__")(*raised)
