"""mem0's `Memory` and `MemoryClient`, with planned searches."""

from __future__ import annotations

from collections.abc import Iterable
from types import EllipsisType
from typing import Any

from ctxreuse import ReusePlanner
from ctxreuse.context.blocks import Message
from ctxreuse.errors import InvalidRequestError
from mem0_ctxreuse.planning import MemorySearch, asked
from mem0_ctxreuse.protocols import SearchableMemory
from mem0_ctxreuse.rendering import MemoryContext
from mem0_ctxreuse.signatures import like_wrapped
from mem0_ctxreuse.wrapper import MemoryWrapper, is_async


class ReuseMemory(MemoryWrapper):
    r"""A `Memory` or `MemoryClient` of mem0 whose searches come in planned order.

    Every other attribute and method is the wrapped memory's: `add`, `get_all` (in its own order and
    pages), `update`, `delete`, `history`, `reset`, `with`. An attribute that the memory has is set
    there, too.

    A fault in planning never fails a call: the memories go through as found, the first fault is
    logged, all are counted in `faults`. Errors of the memory itself are raised as they are.

    Args:
        memory: A mem0 `Memory` or `MemoryClient`, or anything that searches as they do.
        planner: Plans the contexts; an own one if it is left out. Share one between wrappers that
            talk to the same engine.
        tenant: Whose requests they are. None takes that of `ctxreuse.request_context` (which goes
            before a tenant given here, too), else the user whose memories the filters select
            (`mem0_ctxreuse.tenant_of`).

    Raises:
        InvalidRequestError: If an argument is of the wrong kind.

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
        planner: ReusePlanner | EllipsisType = ...,
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
            result that is a list stays one, without it. Where planning failed there is no such key.
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
            InvalidRequestError: If an argument is of the wrong kind.
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
            query,
            *args,
            system=system,
            history=history,
            conversation_id=conversation_id,
            **kwargs,
        ).messages()

    def __enter__(self) -> ReuseMemory:
        self._special("__enter__")()
        return self

    def __exit__(self, *raised: Any) -> Any:
        return self._special("__exit__")(*raised)
