"""Settings of what is made already: one that would change nothing is refused."""

from __future__ import annotations

import inspect
from functools import cache


class FixedSettings:
    """Refuses new attributes that bear the name of a constructor's argument.

    Python lets anybody write `planner.capacity_tokens = 1_000`, and nobody would read it. What a
    class declares, as an annotation, a property or a method, is set as usual.

    Raises:
        AttributeError: An attribute is set that only the constructor takes.
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
