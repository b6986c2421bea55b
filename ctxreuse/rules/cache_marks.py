"""Marks ("cache breakpoints"), which say in providers' words that what ends there is to be kept."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final, Literal, TypeAlias

from ctxreuse.rules.cache_rules import CacheRules

MarkField: TypeAlias = Literal["prompt_cache_breakpoint", "cache_control", "cachePoint"]
"""The field of a content part that marks it; Bedrock's is a block of its own behind the part."""

Path: TypeAlias = tuple[str | int, ...]
"""Keys and positions that lead to a marked value."""

_FIELDS: Final[Mapping[str, tuple[str, str]]] = {
    "prompt_cache_breakpoint": ("mode", "explicit"),
    "cache_control": ("type", "ephemeral"),
    "cachePoint": ("type", "default"),
}
_WITHIN = ("content", "function", "extras")
"""Where marks stand inside of a message, a content part or a tool; arguments hold none."""

_DEEPEST = 4
_DEFAULT_LIFE = "5m"
_LONGEST_FIRST = ("1h", "5m")
_log = logging.getLogger("ctxreuse")


def mark_field(profile: CacheRules) -> MarkField:
    """Return what marks a content part: providers that look back from marks share one word."""
    return "cache_control" if profile.look_back else "prompt_cache_breakpoint"


def mark_value(field: MarkField, life: str = _DEFAULT_LIFE) -> dict[str, str]:
    """Return what the field holds; OpenAI's time to live stands in `prompt_cache_options`."""
    kind = dict([_FIELDS[field]])
    has_life = field != "prompt_cache_breakpoint" and life == _LONGEST_FIRST[0]
    return {**kind, "ttl": life} if has_life else kind


def cache_fields(profile: CacheRules, field: MarkField, key: str) -> dict[str, Any]:
    """Return the fields of a request that tell OpenAI how to keep it, and by which key."""
    fields: dict[str, Any] = {}
    if profile.has_marks and field == "prompt_cache_breakpoint":
        # nothing is written but what is marked
        life = profile.time_to_live.name
        fields["prompt_cache_options"] = {"mode": "explicit", "ttl": life}
    if profile.key != "none":
        fields["prompt_cache_key"] = key
    return fields


def marks_in(value: object, path: Path = ()) -> Iterator[Path]:
    """Yield where marks stand in messages, content parts or tools of any provider, in order."""
    if isinstance(value, Mapping):
        if any(_is_mark(value.get(name), name) for name in _FIELDS):
            yield path
        for name in _WITHIN:
            within = value.get(name)
            if isinstance(within, (list, tuple, Mapping)) and len(path) < 2 * _DEEPEST:
                yield from marks_in(within, (*path, name))
    elif isinstance(value, (list, tuple)):
        for position, one in enumerate(value):
            if isinstance(one, Mapping):
                yield from marks_in(one, (*path, position))


def life_at(value: Any, path: Path) -> str:
    """Return the time to live of the mark at a path."""
    for step in path:
        value = value[step]
    control = value.get("cache_control") or value.get("cachePoint")
    life = control.get("ttl") if isinstance(control, Mapping) else None
    return life if isinstance(life, str) else _DEFAULT_LIFE


def without_mark(value: Any, path: Path) -> Any:
    """Return a copy without the mark at a path; the rest is shared."""
    if path:
        step, *rest = path
        within = without_mark(value[step], tuple(rest))
        if isinstance(value, Mapping):
            return {**value, step: within}
        # a block that was nothing but a mark is gone
        own = [within] if within or not value[step] else []
        return [*value[:step], *own, *value[step + 1 :]]  # type: ignore[operator]
    return {name: one for name, one in value.items() if not _is_mark(one, name)}


def is_cache_point(part: object) -> bool:
    """Return whether a content part is Bedrock's mark behind the one before it."""
    return isinstance(part, Mapping) and _is_mark(part.get("cachePoint"), "cachePoint")


def room_for_marks(profile: CacheRules, taken: int, wanted: int) -> int:
    """Return how many of our marks a request still takes; say once if these are not all."""
    room = max(0, profile.marks - taken)
    if taken and profile.has_marks and (room < wanted or taken > profile.marks):
        _log_too_many(profile.marks)
    return min(room, wanted)


def fitting_life(profile: CacheRules, before: Sequence[str], behind: Sequence[str]) -> str:
    """Return a time to live for our marks, so that longer ones stand before shorter ones."""
    life = profile.time_to_live.name
    if life == _LONGEST_FIRST[0] and _LONGEST_FIRST[1] in before:
        return _LONGEST_FIRST[1]
    if life == _LONGEST_FIRST[1] and _LONGEST_FIRST[0] in behind:
        return _LONGEST_FIRST[0]
    return life


def _is_mark(value: object, name: str) -> bool:
    kind = _FIELDS.get(name)
    return kind is not None and isinstance(value, Mapping) and value.get(kind[0]) == kind[1]


@cache
def _log_too_many(most: int) -> None:
    _log.warning(
        "a request has marks of its own (cache_control, cachePoint, prompt_cache_breakpoint), and "
        "a provider takes %d; those that planning adds are left out first, then the first ones. "
        "Leave out the marks of your own, or the middleware that sets them, to have prompts marked "
        "where they fork. Further cases are not logged.",
        most,
    )
