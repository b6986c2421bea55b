"""Stateful objects: what sets them up is fixed; a copy is a new one with these settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, NoReturn, TypeVar

from ctxreuse.errors import InvalidRequestError

_Made = TypeVar("_Made")


def made_with(make: Callable[..., _Made], *args: Any, **options: Any) -> tuple[Any, ...]:
    """Return what `__reduce__` returns for an object whose copies learn anew."""
    return _make, (make, args, options)


def _make(make: Callable[..., _Made], args: tuple[Any, ...], options: dict[str, Any]) -> _Made:
    return make(*args, **options)


class OnePerProcess:
    """Holds connections, threads or open files, so it is neither copied nor pickled."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        name = type(self).__name__
        raise InvalidRequestError(
            f"{name} cannot be copied or pickled, because it holds connections, threads or open "
            "files; make one in each process, or share this one between threads"
        )


class FixedSettings:
    """Refuses new attributes that bear the name of a constructor's argument: nobody reads them.

    What a class declares, as an annotation, a property or a method, is set as usual.
    """

    __slots__ = ()

    def __setattr__(self, name: str, value: object) -> None:
        if name in _undeclared(type(self)):  # type: ignore[arg-type]
            raise AttributeError(
                f"{name!r} of {type(self).__name__} is set when it is made; make a new one"
            )
        super().__setattr__(name, value)


@cache
def _undeclared(kind: type) -> frozenset[str]:
    """Return what the constructors of our classes take, a user's subclasses apart, undeclared."""
    ours = [one for one in kind.__mro__ if FixedSettings in one.__bases__]
    arguments = {name for one in ours for name in inspect.signature(one).parameters}
    declared = {name for one in kind.__mro__ for name in inspect.get_annotations(one)}
    return frozenset(one for one in arguments - declared if not hasattr(kind, one))
