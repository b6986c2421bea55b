"""Retrieval blocks cut from the Python language reference that CPython ships.

CPython carries the reference text behind ``help("for")`` as plain strings in
``pydoc_data.topics``, so a demo can retrieve from real documentation without a download.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_MIN_CHARACTERS = 80
_PARAGRAPH = re.compile(r"^.*\S.*(?:\n.*\S.*)*", re.MULTILINE)
_LINE = re.compile(r"^.*\S.*", re.MULTILINE)

_Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class ReferenceBlock:
    """One retrievable piece of a reference topic.

    Attributes:
        id: Topic name, ``#`` and the block's ordinal in that topic, such as ``for#0``.
        topic: Name of the topic in ``pydoc_data.topics``.
        text: The block's text, as the topic has it.
    """

    id: str
    topic: str
    text: str


def python_reference_blocks(max_characters: int = 1200) -> list[ReferenceBlock]:
    """Split the Python language reference into blocks of whole paragraphs.

    Neighbouring paragraphs of a topic share a block while they fit. A paragraph that is too
    long by itself is split at line ends. A block of fewer than 80 characters joins the block
    before it, or the block after it where it opens its topic, so a block may be slightly longer
    than ``max_characters``; a single line that is too long is kept whole as well. Topics are
    taken in sorted order; a text that several of them repeat is taken once.

    Args:
        max_characters: Size that a block is filled up to, at least 160.

    Returns:
        The blocks, topic by topic, the same for each call under one Python version.

    Raises:
        ValueError: If ``max_characters`` is below 160.
    """
    # Below this, a run of tiny blocks could join one neighbour and grow it without bound.
    if max_characters < 2 * _MIN_CHARACTERS:
        raise ValueError(f"max_characters must be at least {2 * _MIN_CHARACTERS}")
    # Imported here because the module is half a megabyte that only this demo needs.
    from pydoc_data.topics import topics

    blocks: dict[str, ReferenceBlock] = {}
    for topic in sorted(topics):
        for block in _topic_blocks(topic, topics[topic], max_characters):
            blocks.setdefault(block.text, block)
    return list(blocks.values())


def _topic_blocks(topic: str, text: str, max_characters: int) -> Iterator[ReferenceBlock]:
    """Yield the blocks of one topic in reading order."""
    spans = _join_small(_pack(_pieces(text, max_characters), max_characters))
    for ordinal, (start, end) in enumerate(spans):
        yield ReferenceBlock(f"{topic}#{ordinal}", topic, text[start:end])


def _pieces(text: str, max_characters: int) -> Iterator[_Span]:
    """Yield the span of each paragraph, or spans of whole lines where one is too long."""
    for paragraph in _PARAGRAPH.finditer(text):
        start, end = paragraph.span()
        if end - start <= max_characters:
            yield start, end
        else:
            lines = (line.span() for line in _LINE.finditer(text, start, end))
            yield from _pack(lines, max_characters)


def _pack(spans: Iterable[_Span], max_characters: int) -> list[_Span]:
    """Join neighbouring spans, first to last, while the joined span is not too long."""
    packed: list[_Span] = []
    for start, end in spans:
        if packed and end - packed[-1][0] <= max_characters:
            packed[-1] = (packed[-1][0], end)
        else:
            packed.append((start, end))
    return packed


def _join_small(spans: list[_Span]) -> list[_Span]:
    """Join each small span with the span before it, and a small first one with the next."""
    joined: list[_Span] = []
    for start, end in spans:
        if joined and min(end - start, _length(joined[-1])) < _MIN_CHARACTERS:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined


def _length(span: _Span) -> int:
    """Return the number of characters that a span covers."""
    return span[1] - span[0]
