"""Copies and pickles of stateful objects: new ones with the same settings, or refused."""

from __future__ import annotations

from collections.abc import Callable
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
