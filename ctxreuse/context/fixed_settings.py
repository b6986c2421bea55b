"""Settings of what is made already: one that would change nothing is refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, Self

from ctxreuse.errors import InvalidRequestError


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


def split_settings(
    kind: type, update: Iterable[str], own: Iterable[str], inner: object = None
) -> tuple[set[str], set[str]]:
    """Return which names of an update are a wrapper's settings, and which its inner object's."""
    names, ours = set(update), set(own)
    of_inner = (names - ours) & set(getattr(type(inner), "model_fields", ()))
    for name in sorted(names - ours - of_inner):
        raise InvalidRequestError(
            f"{name!r} is no setting of {kind.__name__}"
            f"{'' if inner is None else f' or of the {type(inner).__name__} inside'}; leave it out"
        )
    return names & ours, of_inner


def copy_around(
    wrapper: Any, held: str, copied: Callable[..., Any], update: Mapping[str, Any], deep: bool
) -> Any:
    """Return a copy of a pydantic model; fields of what it holds change in a copy of that."""
    inside = update.get(held, getattr(wrapper, held))
    ours, of_inside = split_settings(type(wrapper), update, type(wrapper).model_fields, inside)
    changed = {name: update[name] for name in ours}
    if of_inside:
        own = {name: update[name] for name in of_inside}
        changed[held] = inside.model_copy(update=own, deep=deep)
    return copied(update=changed, deep=deep)


class RebuiltCopies:
    """Of a pydantic model: what `_build` makes of its fields is made anew in a copy with others."""

    def model_post_init(self, context: Any, /) -> None:
        """Build it."""
        super().model_post_init(context)  # type: ignore[misc]  # the model's
        self._build()  # type: ignore[attr-defined]

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy, in which other values of the fields take effect."""
        own = type(self).model_fields  # type: ignore[attr-defined]
        split_settings(type(self), update or (), own)
        copy: Self = super().model_copy(update=update, deep=deep)  # type: ignore[misc]
        if update:
            copy._build()  # type: ignore[attr-defined]
        return copy


@cache
def _undeclared(kind: type) -> frozenset[str]:
    """Return what the constructors of our classes take, a user's subclasses apart, undeclared."""
    ours = [one for one in kind.__mro__ if FixedSettings in one.__bases__]
    arguments = {name for one in ours for name in inspect.signature(one).parameters}
    declared = {name for one in kind.__mro__ for name in inspect.get_annotations(one)}
    return frozenset(one for one in arguments - declared if not hasattr(kind, one))
