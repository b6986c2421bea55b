"""The demo's data: blocks of the Python language reference, questions about it, and a retriever.

CPython carries the reference text behind ``help("for")`` as plain strings in
``pydoc_data.topics``, so a demo can retrieve from real documentation without a download. The
questions of `questions.txt` and their order are written for the demo; they are not a log of real
traffic. Several users ask about each theme in their own words, and follow-up questions of a
conversation arrive between the questions of other users.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources

from ctxreuse.errors import MissingExtraError
from ctxreuse.workflow.models.embedders import WordLlamaEmbedder

_MIN_CHARACTERS = 80
_PARAGRAPH = re.compile(r"^.*\S.*(?:\n.*\S.*)*", re.MULTILINE)
_LINE = re.compile(r"^.*\S.*", re.MULTILINE)

_Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class ReferenceBlock:
    """One retrievable piece of a reference topic."""

    id: str
    topic: str
    text: str


def python_reference_blocks(max_characters: int = 1200) -> list[ReferenceBlock]:
    """Split the Python language reference into blocks of whole paragraphs."""
    # Below this, a run of tiny blocks could join one neighbour and grow it without bound.
    if max_characters < 2 * _MIN_CHARACTERS:
        raise ValueError(f"max_characters must be at least {2 * _MIN_CHARACTERS}")
    # Imported here because the module is half a megabyte that only this demo needs.
    from pydoc_data.topics import topics

    blocks: dict[str, ReferenceBlock] = {}
    for topic in sorted(topics):
        whole = topics[topic]
        spans = _join_small(_pack(_pieces(whole, max_characters), max_characters))
        for ordinal, (start, end) in enumerate(spans):
            text = whole[start:end]
            blocks.setdefault(text, ReferenceBlock(f"{topic}#{ordinal}", topic, text))
    return list(blocks.values())


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
        if joined and min(end - start, joined[-1][1] - joined[-1][0]) < _MIN_CHARACTERS:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined


@dataclass(frozen=True, slots=True)
class DemoQuestion:
    """One question as it reaches the server."""

    text: str
    conversation: str | None
    turn: int


def _parse(log: str) -> Iterator[DemoQuestion]:
    """Yield the questions of a log whose entries are a label and a text."""
    for entry in re.split(r"\n(?=\S)", log.strip()):
        label, text = entry.split(maxsplit=1)
        conversation, _, turn = label.partition("/")
        words = " ".join(text.split())
        yield DemoQuestion(words, conversation if turn else None, int(turn or 0))


_LOG = resources.files("ctxreuse.measure.demo").joinpath("questions.txt")

QUESTIONS: tuple[DemoQuestion, ...] = tuple(_parse(_LOG.read_text(encoding="utf-8")))
"""Every question in arrival order."""


def retrieve(texts: Sequence[str], queries: Sequence[str], k: int) -> list[list[int]]:
    """Return for each query the positions of the k nearest texts, best first."""
    try:
        import faiss

        embedder = WordLlamaEmbedder()
    except ImportError as error:
        raise MissingExtraError("the demo's retrieval", "demo") from error
    index = faiss.IndexFlatIP(embedder.dimension)
    index.add(embedder.embed(texts))
    found: list[list[int]] = index.search(embedder.embed(queries), k)[1].tolist()
    return found
