"""Methods that look as the wrapped object's do: frameworks make tools from signatures."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, update_wrapper
from types import MethodType
from typing import Any, TypeVar, cast

_Method = TypeVar("_Method", bound=Callable[..., Any])


def like_wrapped(method: _Method) -> _Method:
    """Give a method of a wrapper the name, signature and docstring of the wrapped object's.

    Args:
        method: A method of a class whose instances have the wrapped object as `memory`.
    """
    return cast(_Method, _LikeWrapped(method))


class _LikeWrapped:
    """A descriptor: on the class the method itself, on an instance one that looks as the foreign.

    The looks differ from instance to instance (a `Memory`, a `MemoryClient`), so they cannot stand
    on the class.
    """

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def __get__(self, instance: Any, owner: type) -> Callable[..., Any]:
        if instance is None:
            return self._method
        foreign = getattr(instance.memory, self._method.__name__)
        call = partial(MethodType(self._method, instance))
        return update_wrapper(call, foreign, updated=())
