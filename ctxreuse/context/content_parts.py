"""A turn cut into content parts, each the same whatever follows, so that marks stand at forks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ctxreuse.context.blocks import ContextBlock
from ctxreuse.context.rendering import SentBlock, Templates, TurnPart, turn_pieces


class ContentPart(NamedTuple):
    """A part of a message's text."""

    text: str
    is_marked: bool = False  # the prefix that ends with it is to be kept
    block: ContextBlock | None = None
    label: str = ""
    beside: Mapping[str, Any] | None = None  # what the user has put on it besides its text
    is_spare: bool = False  # its mark gives way to others

    def as_end(self) -> ContentPart:
        """Return it with the mark of a turn's end, which goes before spare ones."""
        return self._replace(is_marked=True, is_spare=False)

    def as_spare(self) -> ContentPart:
        """Return it with a mark that gives way to others."""
        return self._replace(is_marked=True, is_spare=True)


def joined(parts: Iterable[ContentPart]) -> str:
    """Return the text that parts add up to."""
    return "".join([part.text for part in parts])


def cut(text: str, lengths: Iterable[int]) -> list[ContentPart]:
    """Return a text in parts of the lengths given, as far as it reaches, and the rest."""
    parts: list[ContentPart] = []
    for length in lengths:
        if length < len(text):
            parts.append(ContentPart(text[:length]))
            text = text[length:]
    return [*parts, ContentPart(text)]


def separated(pieces: Sequence[str], separator: str) -> list[ContentPart]:
    """Return a part for each piece of a text, with the separator between those that hold any."""
    first = next((n for n, one in enumerate(pieces) if one), 0)
    return [
        ContentPart(separator + one if one and n > first else one) for n, one in enumerate(pieces)
    ]


def turn_parts(
    turn: Iterable[TurnPart],
    order_annotation: str | None,
    query: str,
    templates: Templates,
    marks: Collection[int],
    *,
    is_labelled: bool = True,
) -> list[ContentPart]:
    """Return what `render_turn` returns cut into parts: each block is a part of its own."""
    shown = [one for one in turn if isinstance(one, SentBlock) or one.annotation]
    pieces = turn_pieces(shown, order_annotation, query, templates, is_labelled=is_labelled)
    parts = separated(pieces, templates.separator)
    number = 0
    for position, one in enumerate(shown):
        if isinstance(one, SentBlock):
            number += 1
            label = one.label if is_labelled else ""
            parts[position] = parts[position]._replace(
                is_marked=number in marks, block=one.block, label=label
            )
    return parts


def without_blank_parts(parts: Iterable[ContentPart]) -> list[ContentPart]:
    """Return parts that add up to the same text, none of which is blank: providers refuse those."""
    kept: list[ContentPart] = []
    blank = ""
    for part in parts:
        text = blank + part.text
        if text.strip():
            kept.append(part._replace(text=text))
            blank = ""
        else:
            blank = text
            if part.is_marked and kept:
                is_spare = part.is_spare and (kept[-1].is_spare or not kept[-1].is_marked)
                kept[-1] = kept[-1]._replace(is_marked=True, is_spare=is_spare)
    if blank and kept:
        kept[-1] = kept[-1]._replace(text=kept[-1].text + blank)
    return kept
