"""A turn cut into content parts, so that marks can stand where prompts fork.

Hosted caches keep a prefix up to a mark, and marks stand behind content parts. Two prompts share a
prefix only if it is cut alike, so a part depends on nothing that stands behind it: each block is a
part of its own, and the words between two blocks belong to the second one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ctxreuse.context.blocks import ContextBlock


class ContentPart(NamedTuple):
    """A part of a message's text.

    Attributes:
        text: The text; the parts of a message add up to it.
        is_marked: Whether the prefix that ends with it is to be kept.
        block: The block that it shows, for one of a turn.
        label: The block's label; "" without one.
        beside: What the user has put on the part besides its text.
    """

    text: str
    is_marked: bool = False
    block: ContextBlock | None = None
    label: str = ""
    beside: Mapping[str, Any] | None = None


def joined(parts: Iterable[ContentPart]) -> str:
    """Return the text that parts add up to."""
    return "".join([part.text for part in parts])


def separated(pieces: Sequence[str], separator: str) -> list[ContentPart]:
    """Return a part for each piece of a text, each with the separator in front of it.

    Args:
        pieces: The pieces.
        separator: What stands between two of them.
    """
    return [ContentPart(separator + one if n else one) for n, one in enumerate(pieces)]


def without_blank_parts(parts: Iterable[ContentPart]) -> list[ContentPart]:
    """Return parts that add up to the same text, none of which is blank.

    Providers refuse blank ones. A blank part goes to the front of the one behind it; those at the
    end stay at the end of the last one. A mark on a blank part moves to the part before it.
    """
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
                kept[-1] = kept[-1]._replace(is_marked=True)
    if blank and kept:
        kept[-1] = kept[-1]._replace(text=kept[-1].text + blank)
    return kept
