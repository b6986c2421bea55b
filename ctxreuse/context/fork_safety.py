"""What a forked process must not take over from its parent: locks, threads, connections, names.

A lock that another thread holds at a fork is held for ever in the child, and what it guards may be
half-changed. So the child renews locks, and forgets a state that was being changed.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from itertools import count
from threading import RLock, local
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, ref

if TYPE_CHECKING:
    from functools import cached_property as cached_property
else:
    # without the lock of functools in Python 3.11: it belongs to the class, so in a child that was
    # forked while a thread computed the property of any object, it is never free
    class cached_property:  # noqa: N801 - as functools names it
        """Computes an attribute when it is first asked for; two threads may both compute it."""

        def __init__(self, compute: Callable[[Any], Any]) -> None:
            self._compute = compute
            self._name = compute.__name__
            self.__doc__ = compute.__doc__

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            if instance is None:
                return self
            value = instance.__dict__[self._name] = self._compute(instance)
            return value


_log = logging.getLogger("ctxreuse")

importing_late = RLock()
"""Hold it to import late; a fork waits for that, since the import would never end in the child."""


def on_demand(
    package: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's `__getattr__` and `__dir__`, which know names that are imported late."""

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{modules[name]}"), name)

    return get, lambda: [*vars(sys.modules[package]), *modules]


class _Method:
    """A method that does not keep its owner alive; `WeakMethod` prints errors where both die."""

    __slots__ = ("_function", "_owner")

    def __init__(self, method: Any, died: Callable[[object], object] | None = None) -> None:
        self._owner = ref(method.__self__, died)
        self._function = method.__func__

    def call(self) -> object | None:
        """Call it if its owner lives; return the owner."""
        owner: object | None = self._owner()
        if owner is not None:
            self._function(owner)
        return owner


class ForkSafeLock:
    """A lock, re-entrant, that is free in a child even if a thread of the parent holds it.

    `forget` empties a state that was half-changed; None is for states that are always whole.
    """

    __slots__ = ("__weakref__", "_forget", "_is_half_changed", "_lock")

    def __init__(self, forget: Callable[[], object] | None = None) -> None:
        self._lock = RLock()
        self._forget = None if forget is None else _Method(forget)
        self._is_half_changed = False
        _locks.add(self)

    def acquire(self, *, blocking: bool = True) -> bool:
        """Take the lock, and return whether it was taken; a free one is taken in any case."""
        is_taken = self._lock.acquire(blocking)
        if is_taken and self._is_half_changed:
            self._empty()
        return is_taken

    def release(self) -> None:
        """Give the lock back."""
        self._lock.release()

    def __enter__(self) -> None:
        self._lock.acquire()
        if self._is_half_changed:
            self._empty()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[Any, ...]:
        assert self._forget is None, "the owner of a lock that forgets says how it is copied"
        return ForkSafeLock, ()

    def renew(self) -> None:
        """Free the lock, in a child, unless the thread that has forked holds it."""
        if self._lock.acquire(blocking=False):
            self._lock.release()
        else:
            self._lock = RLock()
            self._is_half_changed = True

    def _empty(self) -> None:
        self._is_half_changed = False
        owner = None if self._forget is None else self._forget.call()
        if owner is not None:
            _log.warning(
                "%s was in use by another thread when this process was forked; it is empty here",
                type(owner).__name__,
            )


def renew_after_fork(renew: Callable[[], object]) -> None:
    """Call a method in each forked child, as long as its object lives; it takes no lock."""
    number = next(_numbers)
    forget = _renewals.pop  # at the end of the process the module's names are gone
    _renewals[number] = _Method(renew, lambda _: forget(number, None))


def leave_to_parent(*belongings: object) -> None:
    """Keep what belongs to the parent, such as its event loop, from being finalized in a child."""
    _of_parent.extend(belongings)


def process_name() -> str:
    """Return "" unless forked; "3." in the third child, "3.1." in the first child of that."""
    return _name


_locks: WeakSet[ForkSafeLock] = WeakSet()
_renewals: dict[int, _Method] = {}
_numbers = count()
_of_parent: list[object] = []
_name = ""
_forks = count(1)
_forking = local()  # two threads may fork at the same time


def _prepare_fork() -> None:
    importing_late.acquire()
    _forking.number = next(_forks)


def _renew_all() -> None:
    global _name, _forks
    number = _forking.__dict__.pop("number", None)
    _name += f"{os.getpid() if number is None else number}."
    _forks = count(1)
    for lock in list(_locks):
        lock.renew()
    for renewal in list(_renewals.values()):
        renewal.call()
    if number is not None:  # a server written in C may not have announced the fork
        importing_late.release()


def _end_fork() -> None:
    del _forking.number
    importing_late.release()


if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(before=_prepare_fork, after_in_parent=_end_fork, after_in_child=_renew_all)
