"""Wrappers around mem0's memories and clients, sync and async, whose searches are planned."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial, update_wrapper
from types import MethodType
from typing import Any, ClassVar, Protocol

from ctxreuse import ReusePlanner
from ctxreuse.context.blocks import Message, OpenAIMessage
from ctxreuse.context.checks import refuse_wrapped
from ctxreuse.context.copies import FixedSettings
from ctxreuse.context.scope import current_scope
from ctxreuse.errors import InvalidRequestError
from ctxreuse.pipeline.memories import Placement
from ctxreuse.pipeline.memory_planner import (
    MemoryContext,
    MemoryPlanner,
    MemorySearch,
    PlansMemories,
    asked,
)


class SearchableMemory(Protocol):
    """Searches as mem0's memories and clients do; for an `AsyncReuseMemory`, awaited."""

    def search(self, query: str, *args: Any, **kwargs: Any) -> Any:
        """Return `{"results": [memory, ...]}` or a list of memories, best first."""
        ...


class _LikeWrapped:
    """A method with the wrapped one's name, signature and docstring, for tools made of it."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def __get__(self, instance: Any, owner: type) -> Callable[..., Any]:
        if instance is None:
            return self._method
        wrapped = getattr(instance.memory, self._method.__name__)
        return update_wrapper(partial(MethodType(self._method, instance)), wrapped, updated=())


class MemoryWrapper(PlansMemories, FixedSettings):
    """A memory with its searches planned; what is not defined here is the wrapped memory's."""

    _is_async: ClassVar[bool]

    def __init__(
        self,
        memory: SearchableMemory,
        *,
        planner: ReusePlanner | None = None,
        tenant: str | None = None,
        labels: bool = False,
        annotate: bool = False,
        growth_limit: float | None = 2.0,
        placement: Placement = "before_question",
    ) -> None:
        settings = labels, annotate, growth_limit, placement
        memory_planner = MemoryPlanner(planner, tenant, type(self).__name__, *settings, memory)
        object.__setattr__(self, "_memory", _checked_memory(memory, self._is_async))
        object.__setattr__(self, "_memory_planner", memory_planner)

    @property
    def memory(self) -> Any:
        """The wrapped memory; its own searches are neither planned nor counted as sent."""
        return self._memory

    def forget(
        self,
        memory_ids: Iterable[str | int],
        history: Iterable[Message],
        *,
        conversation_id: str | int | None = None,
        filters: Any = None,
        **owner: Any,
    ) -> list[dict[str, Any]]:
        """Return the messages of a conversation as copies, "(removed)" in place of memories' texts.

        A memory that the store deletes stays in the messages that have shown it. What the model
        said of it stays here, too. Found are memories that this wrapper has shown, or that the
        conversation is known to have been sent.

        Args:
            memory_ids: Ids of the memories.
            history: The messages, as `messages` returned them, and the answers.
            conversation_id: The conversation; None takes that of `ctxreuse.request_context`.
            filters: The filters that its searches had: they tell whose it is.
            **owner: `user_id` and the like, where searches have them outside the filters.
        """
        given = {**owner, "filters": filters}
        tenant = self._memory_planner.tenant_of(MemorySearch(self._memory.search, "", (), given))
        scope = current_scope().inside(tenant, conversation_id)
        return self._memory_planner.without(memory_ids, history, scope)

    def __setattr__(self, name: str, value: Any) -> None:
        memory = self.__dict__.get("_memory")  # none yet in a subclass's constructor
        if not hasattr(type(self), name) and hasattr(memory, name):
            setattr(memory, name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__ or not hasattr(self.__dict__.get("_memory"), name):
            object.__delattr__(self, name)
        else:
            delattr(self._memory, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._memory)})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self._memory).__name__})"


class ReuseMemory(MemoryWrapper):
    r"""A `Memory` or `MemoryClient` of mem0 whose searches come in planned order.

    Every other attribute and method is the wrapped memory's. A planning fault lets memories through
    as found, and is counted in `faults`. Errors of the memory itself are raised as they are.

    Args:
        memory: A mem0 `Memory` or `MemoryClient`, or anything that searches as they do.
        planner: Plans the contexts; None takes the one of this process.
        tenant: The tenant of the requests, unless `ctxreuse.request_context` says another. None
            takes the user whose memories the filters select (`mem0_ctxreuse.tenant_of`).
        labels: Whether prompts show memories under labels, for answers that cite them.
        annotate: Whether prompts say how the search ranked memories that were moved.
        growth_limit: How long a conversation's prompt may get by the memories that earlier turns
            show, as a multiple of what it has with this turn's alone; then this turn's are shown
            anew. None has no limit.
        placement: Where `messages` puts memories: "before_question", in its message;
            "after_history", in a message of their own, which some chat templates refuse; "system",
            behind the system text, for first turns and those that lay all out anew.

    Example:
        >>> class Notes:
        ...     def search(self, query, *, filters=None):
        ...         return {"results": [{"id": "1", "memory": "Alice lives in Porto."}]}
        >>> memory = ReuseMemory(Notes())
        >>> memory.messages("Where does Alice live?", filters={"user_id": "alice"})
        [{'role': 'user', 'content': 'Alice lives in Porto.\n\nWhere does Alice live?'}]
    """

    _is_async = False

    @_LikeWrapped
    def search(self, query: str, *args: Any, **kwargs: Any) -> Any:
        """Search as the wrapped memory does, and return what it found in planned order.

        The order alone is ours; `messages` does the rest. What it saves is unknown to
        `planner.savings`.

        Args:
            query: What to look for.
            args: As the wrapped memory takes them.
            kwargs: As the wrapped memory takes them: `filters`, `top_k`, `threshold`, `rerank`, ...

        Returns:
            The result, its memories unaltered, all of them, in planned order.
        """
        search = MemorySearch(self._memory.search, query, args, kwargs)
        return self._memory_planner.reordered(self._memory.search(query, *args, **kwargs), search)

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

        What earlier messages show and the store has changed or deleted since is said to be
        replaced, or to hold no longer. Exact duplicates are shown once.

        Args:
            query: What to look for; the question, too.
            args: As `search` takes them.
            system: The system text that will stand before the context.
            history: The messages that will be sent before it, without the system message; with a
                `conversation_id`, memories that they show are referred to. None: that of
                `ctxreuse.request_context`.
            conversation_id: The conversation's name within the tenant. None: that of
                `ctxreuse.request_context`.
            kwargs: As `search` takes them: `filters`, `top_k`, ...
        """
        request = asked(query, system, history, conversation_id)
        get = getattr(self._memory, "get", None)
        search = MemorySearch(self._memory.search, query, args, kwargs)
        found = self._memory.search(query, *args, **kwargs)
        return self._memory_planner.context(found, search, request, get)

    def messages(self, query: str, *args: Any, **kwargs: Any) -> list[OpenAIMessage]:
        """Search, and return OpenAI chat messages that answer the query with what was found.

        Arguments as for `context`; with `placement="system"` the history has its system message.

        Returns:
            The system message if there is a `system` text, the history as given, and one user
                message: memories, annotation, question. For content parts with marks, call
                `context(...).body("anthropic")` instead.
        """
        return self.context(query, *args, **kwargs).messages()

    def __enter__(self) -> ReuseMemory:
        self._memory.__enter__()
        return self

    def __exit__(self, *raised: Any) -> Any:
        return self._memory.__exit__(*raised)


class AsyncReuseMemory(MemoryWrapper):
    """An `AsyncMemory` or `AsyncMemoryClient` of mem0: `ReuseMemory`, awaited."""

    _is_async = True

    @_LikeWrapped
    async def search(self, query: str, *args: Any, **kwargs: Any) -> Any:
        """`ReuseMemory.search`, awaited."""
        search = MemorySearch(self._memory.search, query, args, kwargs)
        found = await self._memory.search(query, *args, **kwargs)
        return self._memory_planner.reordered(found, search)

    async def context(
        self,
        query: str,
        *args: Any,
        system: str | None = None,
        history: Iterable[Message] | None = None,
        conversation_id: str | int | None = None,
        **kwargs: Any,
    ) -> MemoryContext:
        """`ReuseMemory.context`, awaited."""
        request = asked(query, system, history, conversation_id)
        get = getattr(self._memory, "get", None)
        search = MemorySearch(self._memory.search, query, args, kwargs)
        found = await self._memory.search(query, *args, **kwargs)
        return await self._memory_planner.acontext(found, search, request, get)

    async def messages(self, query: str, *args: Any, **kwargs: Any) -> list[OpenAIMessage]:
        """`ReuseMemory.messages`, awaited."""
        return (await self.context(query, *args, **kwargs)).messages()

    async def __aenter__(self) -> AsyncReuseMemory:
        await self._memory.__aenter__()
        return self

    async def __aexit__(self, *raised: Any) -> Any:
        return await self._memory.__aexit__(*raised)


def _checked_memory(memory: Any, is_async: bool) -> Any:
    # only the type is named: a configuration given by mistake holds keys
    kind = f"the class {memory.__name__}" if isinstance(memory, type) else type(memory).__name__
    refuse_wrapped("memory", memory, MemoryWrapper)
    if isinstance(memory, type) or not callable(getattr(memory, "search", None)):
        raise InvalidRequestError(
            f"memory must have a search method, as mem0's Memory and MemoryClient do; {kind} is "
            "none: pass Memory.from_config(...) or MemoryClient(...)"
        )
    search = inspect.unwrap(memory.search)
    is_awaited = inspect.iscoroutinefunction(search)
    if is_awaited and not is_async:
        raise InvalidRequestError(f"the search of {kind} is awaited; use AsyncReuseMemory")
    if is_async and not is_awaited and inspect.isroutine(search):
        raise InvalidRequestError(f"the search of {kind} cannot be awaited; use ReuseMemory")
    return memory
