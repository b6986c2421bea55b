"""The contents of a finished prompt cut into parts, with marks where its contexts fork."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ctxreuse.context.content_parts import ContentPart, cut, without_blank_parts
from ctxreuse.planning.prompt_records import Edit
from ctxreuse.rules.cache_marks import MarkField, mark_value
from ctxreuse.rules.cache_rules import CacheRules
from ctxreuse.rules.prompt_forms import cut_content, marked_prompt


class TextPosition(NamedTuple):
    """Where a text stands: in which message, and in which part of its content."""

    message: int
    part: int | None


def marked_contents(
    contents: Sequence[Any],
    parts: Sequence[Sequence[ContentPart]],
    positions: Sequence[TextPosition | None],
    profile: CacheRules,
    field: MarkField,
    tools: Sequence[Any] = (),
    *,
    marks_end: bool = False,
) -> tuple[list[Any], list[Any]]:
    """Return contents in parts, with marks, and tools; `parts` as of `with_breakpoints`."""
    cuts: dict[int, dict[int | None, Sequence[ContentPart]]] = {}
    for position, own in zip(positions, parts, strict=True):
        if position is not None:
            cuts.setdefault(position.message, {})[position.part] = own
    if marks_end:
        for of_message in list(cuts.values())[-1:]:
            at, last = list(of_message.items())[-1]
            of_message[at] = (*last[:-1], last[-1]._replace(is_marked=False))
    messages: list[Mapping[str, Any]] = [
        {"content": cut_content(content, cuts.get(number, {}))}
        for number, content in enumerate(contents)
    ]
    if marks_end:
        messages.append({"content": (), "cache_control": mark_value("cache_control")})
    marked, own_tools = marked_prompt(messages, profile, field, tools)
    return [one["content"] for one in marked[: len(contents)]], own_tools


def with_breakpoints(
    roles: Sequence[str],
    sent: Sequence[str],
    edits: Sequence[Edit | None],
    in_conversation: bool,
) -> tuple[tuple[ContentPart, ...], ...]:
    """Return what is sent for each part of a prompt in content parts, with breakpoints.

    A later turn is likely to begin with the messages of a conversation.
    """
    whole: list[list[ContentPart]] = []
    shows = False  # whether a context stands before
    new = first_new(roles)  # from here on, all is sent for the first time
    for number, (text, edit) in enumerate(zip(sent, edits, strict=True)):
        parts = cut(text, () if edit is None else edit.cuts)
        marks = () if edit is None else edit.marks
        if number < new:
            marks = () if shows else marks[-1:]  # others may have kept it alive
        is_spare = shows or number < new
        for mark in marks:
            if mark < 0:
                _mark_end(whole, roles, number, is_spare=is_spare)
            elif mark < len(parts):
                parts[mark] = parts[mark].as_spare() if is_spare else parts[mark].as_end()
        whole.append(without_blank_parts(parts))
        shows = shows or edit is not None
    answers = [number for number, role in enumerate(roles) if role == "assistant"]
    if in_conversation or answers:
        for end in (len(roles), *answers[-1:]):
            _mark_end(whole, roles, end, is_turn=True)
    return tuple(
        tuple(parts) if parts else (ContentPart(text),)
        for parts, text in zip(whole, sent, strict=True)
    )


def first_new(roles: Sequence[str]) -> int:
    """Return where the messages behind the last answer begin; a prefill is no answer."""
    end = len(roles)
    while end and roles[end - 1] == "assistant":
        end -= 1
    return max((n + 1 for n in range(end) if roles[n] == "assistant"), default=0)


def _mark_end(
    parts: list[list[ContentPart]],
    roles: Sequence[str],
    end: int,
    *,
    is_turn: bool = False,
    is_spare: bool = False,
) -> None:
    """Mark the last text before a position; of a turn, unless the model has said it."""
    for number in range(end - 1, -1, -1):
        if is_turn and roles[number] == "assistant":
            return
        if parts[number]:
            last = parts[number][-1]
            parts[number][-1] = last.as_spare() if is_spare else last.as_end()
            return
