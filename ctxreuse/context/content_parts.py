"""A turn cut into content parts, each the same whatever follows, so that marks stand at forks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from ctxreuse.context.blocks import ContextBlock
from ctxreuse.context.rendering import SentBlock, Templates, TurnPart, render_block


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


def turn_parts(
    turn: Iterable[TurnPart],
    order_annotation: str | None,
    query: str,
    templates: Templates,
    marks: Collection[int] = (),
    *,
    is_labelled: bool = True,
) -> list[ContentPart]:
    """Return one turn's user message in parts: each block is one; empty texts have no lines."""
    parts: list[ContentPart] = []
    number = 0
    for one in turn:
        if isinstance(one, SentBlock):
            number += 1
            label, text = one.label if is_labelled else "", one.block.text
            shown = render_block(label, text, templates) if is_labelled else text
            parts.append(ContentPart(shown, number in marks, one.block, label))
        elif one.annotation:
            parts.append(ContentPart(one.annotation))
    closing = [order_annotation, query]
    if templates.order_position == "after_question":
        closing.reverse()
    parts += [ContentPart(piece) for piece in closing if piece]
    first = next((n for n, one in enumerate(parts) if one.text), 0)
    return [
        one._replace(text=templates.separator + one.text) if one.text and n > first else one
        for n, one in enumerate(parts)
    ]


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
