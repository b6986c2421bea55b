"""Putting a substitute where a model stands inside what the model made of itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.runnables import RunnableSerializable

_HOLDERS = (
    "bound",  # RunnableBinding, RunnableRetry, RunnableEach
    "first",  # RunnableSequence
    "middle",
    "last",
    "steps__",  # RunnableParallel
    "mapper",  # RunnableAssign
    "runnable",  # RunnableWithFallbacks
    "fallbacks",
    "branches",  # RunnableBranch
    "default",  # RunnableBranch, configurable runnables
)
"""Fields of runnables that hold what they call. Others, such as bound arguments, are left alone."""


def with_substitutes(made: Any, substitute: Callable[[BaseChatModel], BaseChatModel]) -> Any:
    """Return a runnable with each chat model in it replaced, or the same object if it has none."""
    if isinstance(made, BaseChatModel):
        return substitute(made)
    if isinstance(made, RunnableSerializable):
        held = {name: getattr(made, name) for name in _HOLDERS if name in type(made).model_fields}
        inside = {name: with_substitutes(value, substitute) for name, value in held.items()}
        changed = {name: value for name, value in inside.items() if value is not held[name]}
        return made.model_copy(update=changed) if changed else made
    if isinstance(made, Mapping):
        entries = {name: with_substitutes(value, substitute) for name, value in made.items()}
        return made if _same(made.values(), entries.values()) else entries
    if isinstance(made, (list, tuple)):
        items = [with_substitutes(item, substitute) for item in made]
        return made if _same(made, items) else type(made)(items)
    return made


def _same(given: Iterable[object], replaced: Iterable[object]) -> bool:
    return all(one is other for one, other in zip(given, replaced, strict=True))
