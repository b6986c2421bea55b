"""Finding the rendered contexts of one tenant in a text, in time linear in the text."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ctxreuse.adapters.context_cuts import ContextCut
from ctxreuse.context.blocks import (
    BlockId,
    BlockKey,
    ContextBlock,
    encoded,
    ids_size,
    known_block,
    text_digest,
    text_hash,
)
from ctxreuse.context.rendering import Templates, begins_block

_HEAD = 64
_ENDING = 64
_SHORTEST_OPENING = 8
_FEW_FIRSTS = 16
_FEW_LENGTHS = 64
_TAIL = 3
_COMPARED_AT_ONCE = 32
"""How many tails are compared in the time of one ending, for they are compared in an array."""
_COMPARISONS = 20_000
_DIGESTED_PER_CHARACTER = 8
_FIRST_WITHOUT_SPACES = "\u0e00"
"""From Thai on, most scripts put no spaces between words, so that any letter may begin one."""


BlockSpan: TypeAlias = tuple[BlockId, int, int, int | None, bytes, BlockKey]
"""A block's id, where its text starts and ends in a rendering, its tokens, digest and key."""


def block_span(block: ContextBlock, start: int) -> BlockSpan:
    """Return the span of a block whose text starts at a position."""
    return block.id, start, start + len(block.text), block.tokens, block.digest, block.key


@dataclass(frozen=True, slots=True)
class FoundContext:
    """A remembered context inside a text."""

    text: str
    digest: bytes
    spans: tuple[BlockSpan, ...] = ()
    is_disputed: bool = False
    is_joined: bool = False
    cut: ContextCut | None = None

    @property
    def blocks(self) -> tuple[ContextBlock, ...]:
        """Its blocks, in the order given."""
        return tuple(
            known_block(self.text[start:end], block_id, tokens, digest, key)
            for block_id, start, end, tokens, digest, key in self.spans
        )


Piece: TypeAlias = str | FoundContext
"""A piece of a parsed text: a context, or the plain text between two of them."""


class ParsedText(NamedTuple):
    """A text as pieces that add up to it."""

    pieces: tuple[Piece, ...]
    met: tuple[bytes, ...] = ()
    is_searched: bool = True


class Variant(NamedTuple):
    """Blocks that a rendering was made from; its number is its own in the registry."""

    number: int
    spans: tuple[BlockSpan, ...]


class Rendering(NamedTuple):
    """A rendered context, without its text."""

    digest: bytes
    length: int
    head: str
    opening: str
    ending: int
    tail: int
    templates: Templates | None
    variants: tuple[Variant, ...] = ()
    is_planned: bool = False
    cut: ContextCut | None = None

    @classmethod
    def of(cls, text: str, label_length: int = 0, templates: Templates | None = None) -> Rendering:
        """Return what is remembered of a text that is not empty; it begins with a label."""
        return cls(
            digest=text_digest(text),
            length=len(text),
            head=text[: min(_HEAD, 1 << (len(text).bit_length() - 1))],
            opening=text[: max(label_length, _SHORTEST_OPENING)],
            ending=hash(text[-_ENDING:]),
            tail=sum(ord(one) << 21 * at for at, one in enumerate(text[-_TAIL:])),
            templates=templates,
        )

    @property
    def size(self) -> int:
        """How many spans its variants have together; one with a long id counts as several."""
        return sum(ids_size([block_id for block_id, *_ in one.spans]) for one in self.variants)

    def is_whole(self, text: str, start: int, index: RenderingIndex) -> bool:
        """Return whether neither one more block nor the rest of a word follows it in a text."""
        end = start + self.length
        if self.templates is not None and text.startswith(self.templates.separator, end):
            behind = end + len(self.templates.separator)
            label = self.templates.label_pattern.match(text, behind)
            is_block = label and begins_block(label, self.templates)
            if is_block and not index.heads_at(text, behind):
                return False
        return end == len(text) or not (_is_of_a_word(text[end - 1]) and _is_of_a_word(text[end]))

    def found(self, text: str, is_disputed: bool = False) -> FoundContext:
        """Return it as found, with the blocks of the latest variant."""
        spans = self.variants[-1].spans if self.variants and not self.is_planned else ()
        return FoundContext(text, self.digest, spans, is_disputed, cut=self.cut)


class _SameHead:
    """Renderings with the same head."""

    __slots__ = ("by_length", "ends", "lengths")

    def __init__(self) -> None:
        self.lengths: tuple[int, ...] = ()
        self.by_length: dict[int, dict[int, dict[bytes, Rendering]]] = {}
        self.ends: NDArray[np.int64] | None = None

    def add(self, rendering: Rendering) -> None:
        """Add a rendering that it does not have."""
        is_new = rendering.length not in self.by_length
        endings = self.by_length.setdefault(rendering.length, {})
        endings.setdefault(rendering.ending, {})[rendering.digest] = rendering
        if self.ends is not None:
            at = int(np.searchsorted(self.ends[0], rendering.length))
            self.ends = np.insert(self.ends, at, (rendering.length, rendering.tail), axis=1)
            return
        if is_new:
            lengths = list(self.lengths)
            insort(lengths, rendering.length)
            self.lengths = tuple(lengths)
        if len(self.lengths) > _FEW_LENGTHS and len(rendering.head) >= _TAIL:
            ends = [
                (length, one.tail)
                for length in self.lengths
                for by_digest in self.by_length[length].values()
                for one in by_digest.values()
            ]
            self.ends = np.array(ends).T
            self.lengths = ()

    def remove(self, rendering: Rendering) -> None:
        """Remove a rendering that it has."""
        endings = self.by_length[rendering.length]
        by_digest = endings[rendering.ending]
        del by_digest[rendering.digest]
        if self.ends is not None:
            first, last = np.searchsorted(self.ends[0], (rendering.length, rendering.length + 1))
            same = self.ends[1, first:last] == rendering.tail
            self.ends = np.delete(self.ends, first + int(np.argmax(same)), axis=1)
        if not by_digest:
            del endings[rendering.ending]
        if not endings:
            del self.by_length[rendering.length]
            self.lengths = tuple(one for one in self.lengths if one != rendering.length)


class RenderingIndex:
    """The renderings of one tenant, by how they begin and end."""

    def __init__(self) -> None:
        self.unmet: dict[int, int] = {}
        self._by_head: dict[str, _SameHead] = {}
        self._head_sizes: Counter[Any] = Counter()
        self._openings: Counter[Any] = Counter()
        self._firsts: Counter[Any] = Counter()  # the first characters of these
        self._opening_sizes: Counter[Any] = Counter()
        self._sizes: tuple[int, ...] = ()  # of heads, ascending, as a copy to read

    def __len__(self) -> int:
        return self._head_sizes.total()

    def is_unmet(self, rendering: Rendering) -> bool:
        """Return whether a rendering was rendered more often than prompts have shown it."""
        return any(one.number in self.unmet for one in rendering.variants)

    def add(self, rendering: Rendering) -> None:
        """Find a rendering from now on."""
        self._by_head.setdefault(rendering.head, _SameHead()).add(rendering)
        self._count(rendering, 1)

    def remove(self, rendering: Rendering) -> None:
        """Do not find a rendering any more."""
        same = self._by_head[rendering.head]
        same.remove(rendering)
        if not same.by_length:
            del self._by_head[rendering.head]
        self._count(rendering, -1)

    def _count(self, rendering: Rendering, step: int) -> None:
        """Count a rendering's head and opening; keep what `search` reads of them up to date."""
        for counter, one in (
            (self._head_sizes, len(rendering.head)),
            (self._opening_sizes, len(rendering.opening)),
            (self._openings, rendering.opening),
            (self._firsts, rendering.opening[:1]),
        ):
            counter[one] += step
            if not counter[one]:
                del counter[one]
        self._sizes = tuple(sorted(self._head_sizes))

    def search(self, text: str) -> ParsedText:
        """Return a text as pieces that add up to it: remembered contexts, and plain text."""
        found = _FoundContexts(text, self)
        for start in self._starts(text):
            if not found.look_at(start):
                return ParsedText((text,), is_searched=False)
        return found.parsed()

    def may_stand_in(self, text: str) -> bool:
        """Return whether any rendering may begin in a text; it takes less time than a search."""
        return any(self.heads_at(text, start) for start in self._starts(text))

    def _starts(self, text: str) -> Iterable[int]:
        """Return the positions of a text at which an opening stands, ascending."""
        sizes, firsts = list(self._opening_sizes), list(self._firsts)
        starts: Iterable[int] = range(len(text))
        if len(firsts) <= _FEW_FIRSTS:
            starts = sorted(at for one in firsts for at in _positions(text, one))
        return (
            start
            for start in starts
            if any(text[start : start + size] in self._openings for size in sizes)
        )

    def heads_at(self, text: str, start: int) -> list[_SameHead]:
        """Return the renderings whose head stands at a position of a text, the shortest first."""
        found = (
            self._by_head.get(text[start : start + size])
            for size in self._sizes
            if start + size <= len(text)
        )
        return [same for same in found if same is not None]


class _FoundContexts:
    """What a search of a text has found so far, and how much work it may still do."""

    def __init__(self, text: str, index: RenderingIndex) -> None:
        self._text = text
        self._index = index
        self._comparisons = len(text) // 4 + _COMPARISONS
        self._digested = len(text) * _DIGESTED_PER_CHARACTER
        self._pieces: list[Piece] = []
        self._met: list[bytes] = []
        self._start = self._end = 0  # of the context found last
        self._last: Rendering | None = None
        self._is_disputed = False
        self._characters: NDArray[np.uint32] | None = None

    def look_at(self, start: int) -> bool:
        """Look for contexts that begin at a position; return False if the work is too much."""
        is_inside = start < self._end
        found = self._renderings_at(start, is_inside)
        if found is None:
            return False
        if is_inside:
            self._is_disputed |= not all(self._has_the_blocks_of(one, start) for one in found)
            self._met += [one.digest for one in found]
            return True
        whole = [one for one in found if one.is_whole(self._text, start, self._index)]
        if not whole:
            self._met += [one.digest for one in found]
            return True
        self._close(start)
        *shorter, self._last = whole
        rivals = [one.digest for one in shorter if self._index.is_unmet(one)]
        self._met += rivals
        self._is_disputed = bool(rivals)
        self._start, self._end = start, start + self._last.length
        return True

    def _has_the_blocks_of(self, inside: Rendering, start: int) -> bool:
        """Return whether the context found last has a block where one that stands in it begins."""
        if self._last is None or not (self._last.variants and inside.variants):
            return False
        (_, first, *_), *_ = inside.variants[-1].spans
        at = start + first - self._start
        return any(begins == at for _, begins, *_ in self._last.variants[-1].spans)

    def parsed(self) -> ParsedText:
        """Return the text as pieces."""
        self._close(len(self._text))
        return ParsedText(tuple(self._pieces), tuple(self._met))

    def _close(self, upto: int) -> None:
        """Add the context found last, and the text behind it."""
        if self._last is not None:
            shown = self._text[self._start : self._end]
            self._pieces.append(self._last.found(shown, self._is_disputed))
            self._last = None
        if self._end < upto:
            self._pieces.append(self._text[self._end : upto])

    def _renderings_at(self, start: int, only_unmet: bool) -> list[Rendering] | None:
        """Return the renderings that begin at a position, the shortest first; None: too much."""
        text, possible = self._text, list[tuple[int, dict[bytes, Rendering]]]()
        candidates = self._candidates(start)
        if self._comparisons < 0:
            return None
        for length, same in candidates:
            end = start + length
            ending = hash(text[max(start, end - _ENDING) : end])
            by_digest = same.by_length.get(length, {}).get(ending)
            if by_digest and not (only_unmet and not self._any_unmet(by_digest)):
                possible.append((length, by_digest))
        if not possible:
            return []
        self._digested -= possible[-1][0]
        if self._digested < 0:
            return None
        found, hashed, done = [], text_hash(), start
        for length, by_digest in possible:
            hashed.update(encoded(text[done : start + length]))
            done = start + length
            rendering = by_digest.get(hashed.digest())
            if rendering is not None and not (only_unmet and not self._index.is_unmet(rendering)):
                found.append(rendering)
        return found

    def _candidates(self, start: int) -> list[tuple[int, _SameHead]]:
        """Return lengths, ascending, of renderings that may stand here, and where to look."""
        lengths: list[tuple[int, _SameHead]] = []
        for same in self._index.heads_at(self._text, start):
            # read in this order: where there are no lengths any more, there are ends
            longest, lengths_here, ends = len(self._text) - start, same.lengths, same.ends
            if ends is None:
                fitting = lengths_here[: bisect_right(lengths_here, longest)]
            else:
                if self._characters is None:
                    self._characters = _characters(self._text)
                ends = ends[:, : np.searchsorted(ends[0], longest, side="right")]
                self._comparisons -= ends.shape[1] // _COMPARED_AT_ONCE
                is_possible = _tails(self._characters, ends[0] + start) == ends[1]
                fitting = tuple(dict.fromkeys(ends[0, is_possible].tolist()))
            self._comparisons -= len(fitting)
            lengths += [(length, same) for length in fitting[: max(self._comparisons, 0)]]
        return lengths

    def _any_unmet(self, by_digest: dict[bytes, Rendering]) -> bool:
        self._comparisons -= len(by_digest)
        return any(map(self._index.is_unmet, list(by_digest.values())))


def _characters(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


def _tails(characters: NDArray[np.uint32], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the three characters before each of some positions, as one number."""
    first, second, third = (characters[ends - at].astype(np.int64) for at in (3, 2, 1))
    return first | second << 21 | third << 42


def _positions(text: str, part: str) -> Iterator[int]:
    """Yield the positions of a part in a text, also where it overlaps itself."""
    at = text.find(part)
    while at >= 0:
        yield at
        at = text.find(part, at + 1)


def _is_of_a_word(character: str) -> bool:
    """Return whether a letter, digit or underscore stands in a word that spaces set apart."""
    return character < _FIRST_WITHOUT_SPACES and (character.isalnum() or character == "_")
