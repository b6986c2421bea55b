"""The contents of a finished prompt cut into parts, with marks where its contexts fork."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ctxreuse.context.content_parts import ContentPart
from ctxreuse.pipeline.prompt_turn import PlannedPrompt
from ctxreuse.rules.cache_marks import MarkField, mark_value
from ctxreuse.rules.cache_rules import CacheRules
from ctxreuse.rules.prompt_forms import cut_content, marked_prompt


class TextPosition(NamedTuple):
    """Where a text stands: in which message, and in which part of its content."""

    message: int
    part: int | None


class MarkedContents(NamedTuple):
    """What is sent."""

    contents: list[Any]
    tools: list[Any]


def marked_contents(
    contents: Sequence[Any],
    planned: PlannedPrompt,
    positions: Sequence[TextPosition | None],
    profile: CacheRules,
    field: MarkField,
    tools: Sequence[Any] = (),
    *,
    marks_end: bool = False,
) -> MarkedContents:
    """Return the contents of a planned prompt's messages in parts, with marks."""
    cuts: dict[int, dict[int | None, Sequence[ContentPart]]] = {}
    for position, parts in zip(positions, planned.parts, strict=True):
        if position is not None:
            cuts.setdefault(position.message, {})[position.part] = parts
    if marks_end:
        for of_message in list(cuts.values())[-1:]:
            at, own = list(of_message.items())[-1]
            of_message[at] = (*own[:-1], own[-1]._replace(is_marked=False))
    messages: list[Mapping[str, Any]] = [
        {"content": cut_content(content, cuts.get(number, {}))}
        for number, content in enumerate(contents)
    ]
    if marks_end:
        messages.append({"content": (), "cache_control": mark_value("cache_control")})
    marked = marked_prompt(messages, profile, field, tools)
    return MarkedContents(
        [one["content"] for one in marked.messages[: len(contents)]], marked.tools
    )
