"""Contexts as they were rendered into text, and how to find them again inside a prompt.

A model wrapper gets finished prompts. To plan the context in one it has to know, for certain, that
a piece of text *is* a context and where its blocks begin. Nothing in the text can say so, since a
document may hold any text; so a registry remembers what was rendered, by its digest, and only a
piece of text that is equal to a rendering as a whole is a context.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from threading import Lock
from typing import TypeAlias

from ctxreuse.context.blocks import BlockId, ContextBlock, ContextRequest, text_digest
from ctxreuse.context.checks import checked_kind
from ctxreuse.context.lru_map import LRUMap
from ctxreuse.context.rendering import (
    DEFAULT_TEMPLATES,
    SentBlock,
    Templates,
    render_turn,
)

_HEAD = 64
_ENDING = 64
_SHORTEST_OPENING = 8


@dataclass(frozen=True, slots=True)
class FoundContext:
    """A remembered context inside a text.

    Attributes:
        text: The context as it stands there.
        digest: Of this text.
        blocks: Its blocks, in the order in which they stand there; none where the text shows them
            as planned before, so that it is to be left alone.
    """

    text: str
    digest: bytes
    blocks: tuple[ContextBlock, ...]


Piece: TypeAlias = str | FoundContext
"""A piece of a parsed text: a context, or the plain text between two of them."""


@dataclass(frozen=True, slots=True)
class _BlockSpan:
    """Where a block's text stands in a rendering, and what else is known of the block."""

    id: BlockId
    start: int
    end: int
    tokens: int | None


@dataclass(frozen=True, slots=True)
class _Rendering:
    """A rendered context, without its text.

    Attributes:
        digest: Of the whole text.
        length: In characters.
        head: Its first characters.
        opening: The characters before the first block's text: a label.
        ending: Digest of its last characters: the whole is compared only where these stand.
        spans: The blocks, in order; none where they were planned before.
        continuation: What would follow if there were one more block: where that stands, the text
            is only the beginning of a longer context.
    """

    digest: bytes
    length: int
    head: str
    opening: str
    ending: bytes
    spans: tuple[_BlockSpan, ...]
    continuation: str


class ContextRegistry:
    """Remembers rendered contexts, the latest ones, and finds them in prompts.

    It keeps digests, spans and the first 64 characters of each, not the texts. Threads may share
    it.

    Args:
        max_renderings: How many are remembered; the least recently seen goes first.
        max_spans: How many blocks they may have together.
    """

    def __init__(self, max_renderings: int = 10_000, max_spans: int = 200_000) -> None:
        self._renderings: LRUMap[bytes, _Rendering] = LRUMap(
            max_renderings, max_weight=max_spans, weight_of=lambda one: len(one.spans)
        )
        self._by_head: dict[str, dict[bytes, _Rendering]] = {}
        self._head_lengths: Counter[int] = Counter()
        self._openings: Counter[str] = Counter()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._renderings)

    def render(
        self, blocks: Iterable[ContextBlock], templates: Templates = DEFAULT_TEMPLATES
    ) -> str:
        """Return the blocks as a context in the order given, labels counted from 1; remember it.

        Args:
            blocks: The blocks; the same id and text twice is shown once.
            templates: The words around them.
        """
        parts: list[SentBlock] = []
        spans: list[_BlockSpan] = []
        end = 0
        for ordinal, block in enumerate(ContextRequest(blocks).unique_blocks.values(), start=1):
            label = templates.block_label(ordinal)
            start = end + len(templates.before_text(label))
            spans.append(_BlockSpan(block.id, start, start + len(block.text), block.tokens))
            parts.append(SentBlock(label, block))
            end = spans[-1].end + len(templates.after_text) + len(templates.separator)
        text = render_turn(parts, None, "", templates)
        if parts:
            next_label = templates.before_text(templates.block_label(len(parts) + 1))
            continuation = templates.separator + next_label if next_label else ""
            self._remember(text, tuple(spans), continuation)
        return text

    def remember_planned(self, text: str) -> None:
        """Remember a text that shows blocks as they were planned, annotations included.

        It is found as a context without blocks: nobody plans it again, not even where another
        context that was rendered before has the same beginning, and what stands in it is no
        context.
        """
        if text:
            self._remember(text, (), "")

    def parse(self, text: str) -> list[Piece]:
        """Return a text as pieces that add up to it: remembered contexts, and plain text.

        Of two contexts that overlap the one that begins first counts, and of those that begin
        together the longest: a document that repeats a whole context is a document, not a context.
        """
        pieces: list[Piece] = []
        end = 0
        with self._lock:
            openings = "|".join(re.escape(opening) for opening in self._openings)
            # looking ahead finds openings that overlap
            for match in re.finditer(f"(?=(?:{openings}))", text) if openings else ():
                start = match.start()
                found = self._context_at(text, start) if start >= end else None
                if found is not None:
                    if end < start:
                        pieces.append(text[end:start])
                    pieces.append(found)
                    end = start + len(found.text)
        if end < len(text):
            pieces.append(text[end:])
        return pieces

    def _context_at(self, text: str, start: int) -> FoundContext | None:
        """Return the longest remembered context that begins at a position of a text."""
        candidates: list[_Rendering] = []
        for length in self._head_lengths:
            candidates += self._by_head.get(text[start : start + length], {}).values()
        candidates.sort(key=lambda one: one.length, reverse=True)
        for length, as_long in groupby(candidates, key=lambda one: one.length):
            end = start + length
            if end > len(text):
                continue
            ending = text_digest(text[max(start, end - _ENDING) : end])
            by_digest = {one.digest: one for one in as_long if one.ending == ending}
            if not by_digest:
                continue
            shown = text[start:end]
            found = by_digest.get(text_digest(shown))
            if found and not (found.continuation and text.startswith(found.continuation, end)):
                self._renderings.get(found.digest)  # counts as seen
                blocks = [
                    ContextBlock(id=span.id, text=shown[span.start : span.end], tokens=span.tokens)
                    for span in found.spans
                ]
                return FoundContext(shown, found.digest, tuple(blocks))
        return None

    def _remember(self, text: str, spans: tuple[_BlockSpan, ...], continuation: str) -> None:
        rendering = _Rendering(
            digest=text_digest(text),
            length=len(text),
            head=text[:_HEAD],
            opening=text[: max(spans[0].start if spans else 0, _SHORTEST_OPENING)],
            ending=text_digest(text[-_ENDING:]),
            spans=spans,
            continuation=continuation,
        )
        with self._lock:
            for _, old in self._renderings.put(rendering.digest, rendering):
                del self._by_head[old.head][old.digest]
                if not self._by_head[old.head]:
                    del self._by_head[old.head]
                self._head_lengths[len(old.head)] -= 1
                if not self._head_lengths[len(old.head)]:
                    del self._head_lengths[len(old.head)]
                self._openings[old.opening] -= 1
                if not self._openings[old.opening]:
                    del self._openings[old.opening]
            self._by_head.setdefault(rendering.head, {})[rendering.digest] = rendering
            self._head_lengths[len(rendering.head)] += 1
            self._openings[rendering.opening] += 1


_sharing = Lock()


@cache
def _shared_registry() -> ContextRegistry:
    return ContextRegistry()


def context_registry(registry: ContextRegistry | None = None) -> ContextRegistry:
    """Return the registry given or, for None, the one that this process shares.

    The shared one is made when it is first asked for. It lets plain functions render what a model
    wrapper finds, without a handle.

    Raises:
        InvalidRequestError: wrong type.
    """
    if registry is None:
        with _sharing:
            return _shared_registry()
    return checked_kind("registry", registry, ContextRegistry, "a ContextRegistry or None")
