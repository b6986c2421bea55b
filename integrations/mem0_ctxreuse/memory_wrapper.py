"""A wrapper around a memory: everything but searching passes through."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from functools import partial, update_wrapper
from types import MethodType
from typing import Any, Protocol, TypeVar, cast

from ctxreuse import ReusePlanner
from ctxreuse.errors import InvalidRequestError
from mem0_ctxreuse.memory_planner import MemoryPlanner

_Method = TypeVar("_Method", bound=Callable[..., Any])


class SearchableMemory(Protocol):
    """Searches as mem0's `Memory` and `MemoryClient` do."""

    def search(self, query: str, *args: Any, **kwargs: Any) -> Any:
        """Return `{"results": [memory, ...]}` or a list of memories, best first."""
        ...


class AsyncSearchableMemory(Protocol):
    """Searches as mem0's `AsyncMemory` and `AsyncMemoryClient` do."""

    def search(self, query: str, *args: Any, **kwargs: Any) -> Awaitable[Any]:
        """Return what a `SearchableMemory` does, awaited."""
        ...


class MemoryWrapper:
    """A memory with its searches planned; what is not defined here is the wrapped memory's.

    Args:
        memory: The memory to wrap.
        planner: Plans the contexts; None makes a new one.
        tenant: The tenant of the requests; None takes the user whose memories are searched.

    Raises:
        InvalidRequestError: wrong type.
    """

    _memory: Any
    _memory_planner: MemoryPlanner

    def __init__(
        self,
        memory: Any,
        *,
        planner: ReusePlanner | None = None,
        tenant: str | None = None,
    ) -> None:
        memory_planner = MemoryPlanner(planner, tenant, type(self).__name__)
        object.__setattr__(self, "_memory", _checked_memory(memory))
        object.__setattr__(self, "_memory_planner", memory_planner)

    @property
    def memory(self) -> Any:
        """The wrapped memory; its own searches are neither planned nor counted as sent."""
        return self._memory

    @property
    def planner(self) -> ReusePlanner:
        """Plans the contexts; it has to learn what the engine evicts."""
        return self._memory_planner.planner

    @property
    def faults(self) -> int:
        """How often planning has failed and memories went through as they were found."""
        return self._memory_planner.faults

    def __getattr__(self, name: str) -> Any:
        # copying and unpickling ask for these before there is a memory
        if name in ("_memory", "_memory_planner") or (name[:2] == name[-2:] == "__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._memory, name)

    def __setattr__(self, name: str, value: Any) -> None:
        memory = self.__dict__.get("_memory")  # none yet in a subclass's constructor
        if not hasattr(type(self), name) and hasattr(memory, name):
            setattr(memory, name, value)
        else:
            object.__setattr__(self, name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._memory)})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self._memory).__name__})"

    def _special(self, name: str) -> Any:
        """Return a special method of the wrapped memory, as the interpreter would look it up."""
        method = getattr(type(self._memory), name, None)
        if method is None:
            raise TypeError(
                f"{type(self._memory).__name__!r} object is no context manager: it has no {name}"
            )
        return method.__get__(self._memory)


def is_async(memory: Any) -> bool:
    """Return whether the memory's search is known to be awaited."""
    return inspect.iscoroutinefunction(inspect.unwrap(memory.search))


def is_sync(memory: Any) -> bool:
    """Return whether the memory's search is known not to be awaited."""
    return inspect.isroutine(inspect.unwrap(memory.search)) and not is_async(memory)


def _checked_memory(memory: Any) -> Any:
    # only the type is named: a configuration given by mistake holds keys
    kind = f"the class {memory.__name__}" if isinstance(memory, type) else type(memory).__name__
    if isinstance(memory, MemoryWrapper):
        raise InvalidRequestError(f"memory is a {kind} already; pass what it wraps")
    if isinstance(memory, type) or not callable(getattr(memory, "search", None)):
        raise InvalidRequestError(
            f"memory must have a search method, as mem0's Memory and MemoryClient do; {kind} is "
            "none: pass Memory.from_config(...) or MemoryClient(...)"
        )
    return memory


def like_wrapped(method: _Method) -> _Method:
    """Give a method of a wrapper the name, signature and docstring of the wrapped memory's.

    Frameworks make tools from signatures.

    Args:
        method: A method of a subclass of `MemoryWrapper`.
    """
    return cast(_Method, _LikeWrapped(method))


class _LikeWrapped:
    """A descriptor: on the class the method itself, on an instance one with another signature.

    The signature differs from instance to instance (a `Memory`, a `MemoryClient`), so the class
    cannot have it.
    """

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def __get__(self, instance: Any, owner: type) -> Callable[..., Any]:
        if instance is None:
            return self._method
        wrapped = getattr(instance.memory, self._method.__name__)
        call = partial(MethodType(self._method, instance))
        return update_wrapper(call, wrapped, updated=())
