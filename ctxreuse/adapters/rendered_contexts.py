"""Contexts as they were rendered into text, and how to find them again inside a prompt.

A model wrapper gets finished prompts. To plan the context in one it has to know, for certain, that
a piece of text *is* a context and where its blocks begin. Nothing in the text can say so, since a
document may hold any text; so what was rendered is remembered, by its digest, and only a piece of
text that is equal to a rendering as a whole is one.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from threading import Lock

from ctxreuse.context.blocks import BlockId, ContextBlock, ContextRequest, text_digest
from ctxreuse.context.rendering import SentBlock, render_block, render_turn
from ctxreuse.context.templates import DEFAULT_TEMPLATES, Templates

_HEAD = 64
_ENDING = 64
_SHORTEST_OPENING = 8


@dataclass(frozen=True, slots=True)
class BlockSpan:
    """Where a block's text stands in a rendering.

    Attributes:
        id: The block's id.
        start: Its first character.
        end: The character behind its last one.
        tokens: Its token count, if it is known.
    """

    id: BlockId
    start: int
    end: int
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Rendering:
    """A rendered context, without its text.

    Attributes:
        length: In characters.
        digest: Of the whole text.
        opening: The characters before the first block's text: a label.
        ending: Digest of its last characters: the whole is compared only where these stand.
        spans: The blocks, in order; none where they were planned before.
        goes_on: What would follow if there were one more block: then it is only the beginning of
            a longer context.
    """

    length: int
    digest: bytes
    opening: str
    ending: bytes
    spans: tuple[BlockSpan, ...]
    goes_on: str = ""


@dataclass(frozen=True, slots=True)
class FoundContext:
    """A remembered context inside a text.

    Attributes:
        start: Where it begins in the text.
        end: Where it ends.
        digest: Of the context as it stands there.
        blocks: Its blocks, in the order in which they stand there; none where it shows them as
            planned before, so that it is to be let alone.
    """

    start: int
    end: int
    digest: bytes
    blocks: tuple[ContextBlock, ...]


class Renderings:
    """Remembers rendered contexts, the latest ones, and finds them in prompts.

    Keeps digests, spans and the first 64 characters of each, not the texts. Threads may share it.

    Args:
        max_renderings: How many are remembered; the least recently seen goes first.
        max_spans: How many blocks they may have together.
    """

    def __init__(self, max_renderings: int = 10_000, max_spans: int = 200_000) -> None:
        self._max_renderings = max_renderings
        self._max_spans = max_spans
        self._spans = 0
        self._by_digest: OrderedDict[bytes, tuple[str, Rendering]] = OrderedDict()
        self._by_head: dict[str, dict[bytes, Rendering]] = {}
        self._head_lengths: Counter[int] = Counter()
        self._openings: Counter[str] = Counter()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._by_digest)

    def render(
        self, blocks: Iterable[ContextBlock], templates: Templates = DEFAULT_TEMPLATES
    ) -> str:
        """Return the blocks as a context in the order given, labels counted from 1; remember it.

        Args:
            blocks: The blocks; the same id and text twice is shown once.
            templates: The words around them.
        """
        unique = ContextRequest(blocks).unique_blocks.values()
        parts = [
            SentBlock(templates.block_label(ordinal), block)
            for ordinal, block in enumerate(unique, start=1)
        ]
        text = render_turn(parts, None, "", templates)
        if parts:
            next_label = templates.before_text(templates.block_label(len(parts) + 1))
            goes_on = templates.separator + next_label if next_label else ""
            self._remember(text, tuple(_spans(parts, templates)), goes_on)
        return text

    def remember_planned(self, text: str) -> None:
        """Remember a text that shows blocks as they were planned, annotations included.

        It is found as a context without blocks: nobody plans it again, not even where another
        context that was rendered before has the same beginning, and what stands in it is no
        context.
        """
        if text:
            self._remember(text, ())

    def find(self, text: str) -> list[FoundContext]:
        """Return the remembered contexts that stand in a text, from left to right.

        Of two that overlap the one that begins first counts, and of those the longest: a document
        that repeats a whole context is a document, not a context.
        """
        if not self._by_digest:
            return []
        found: list[FoundContext] = []
        with self._lock:
            behind = 0
            for start in self._candidates(text):
                if start < behind:
                    continue
                rendering = self._standing_at(text, start)
                if rendering is not None:
                    self._by_digest.move_to_end(rendering.digest)
                    behind = start + rendering.length
                    found.append(_found(text, start, rendering))
        return found

    def _candidates(self, text: str) -> list[int]:
        pattern = "|".join(re.escape(opening) for opening in self._openings)
        # looking ahead finds openings that overlap
        return [match.start() for match in re.finditer(f"(?=(?:{pattern}))", text)]

    def _standing_at(self, text: str, start: int) -> Rendering | None:
        candidates: list[Rendering] = []
        for length in self._head_lengths:
            candidates += self._by_head.get(text[start : start + length], {}).values()
        candidates.sort(key=lambda one: one.length, reverse=True)
        for length, as_long in groupby(candidates, key=lambda one: one.length):
            end = start + length
            if end > len(text):
                continue
            ending = _ending(text[max(start, end - _ENDING) : end])
            ending_so = {one.digest: one for one in as_long if one.ending == ending}
            standing = ending_so.get(text_digest(text[start:end])) if ending_so else None
            if standing and not (standing.goes_on and text.startswith(standing.goes_on, end)):
                return standing
        return None

    def _remember(self, text: str, spans: tuple[BlockSpan, ...], goes_on: str = "") -> None:
        opening = text[: max(spans[0].start if spans else 0, _SHORTEST_OPENING)]
        rendering = Rendering(len(text), text_digest(text), opening, _ending(text), spans, goes_on)
        head = text[:_HEAD]
        with self._lock:
            self._forget(rendering.digest)
            self._by_digest[rendering.digest] = (head, rendering)
            self._by_head.setdefault(head, {})[rendering.digest] = rendering
            self._head_lengths[len(head)] += 1
            self._openings[opening] += 1
            self._spans += len(spans)
            while len(self._by_digest) > self._max_renderings or (
                self._spans > self._max_spans and len(self._by_digest) > 1
            ):
                self._forget(next(iter(self._by_digest)))

    def _forget(self, digest: bytes) -> None:
        head, rendering = self._by_digest.pop(digest, (None, None))
        if head is None or rendering is None:
            return
        same_head = self._by_head[head]
        del same_head[digest]
        if not same_head:
            del self._by_head[head]
        _take_one(self._head_lengths, len(head))
        _take_one(self._openings, rendering.opening)
        self._spans -= len(rendering.spans)


RENDERED = Renderings()
"""What this process rendered. Shared, so that plain functions and model wrappers need no handle."""


def _spans(parts: Sequence[SentBlock], templates: Templates) -> Iterable[BlockSpan]:
    start = 0
    for label, block, *_ in parts:
        first = start + len(templates.before_text(label))
        yield BlockSpan(block.id, first, first + len(block.text), block.tokens)
        start += len(render_block(label, block.text, templates)) + len(templates.separator)


def _ending(text: str) -> bytes:
    return text_digest(text[-_ENDING:])


def _found(text: str, start: int, rendering: Rendering) -> FoundContext:
    return FoundContext(
        start,
        start + rendering.length,
        rendering.digest,
        tuple(
            ContextBlock(
                id=span.id, text=text[start + span.start : start + span.end], tokens=span.tokens
            )
            for span in rendering.spans
        ),
    )


def _take_one(counter: Counter[str] | Counter[int], key: str | int) -> None:
    counter[key] -= 1  # type: ignore[index]
    if not counter[key]:  # type: ignore[index]
        del counter[key]
