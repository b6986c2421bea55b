"""The prefix tree of one group of an engine's cache blocks, built from its events."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NewType, TypeAlias

from ctxreuse.context.lru_map import LRUMap

BlockHash: TypeAlias = bytes | int
"""The engine's own name for a block's content with everything before it; never recomputed here."""

ExtraKeys: TypeAlias = tuple[object, ...] | None
"""What tells blocks of equal tokens apart: adapter, images, and in the first block the salt."""

Name: TypeAlias = Hashable  # what a prompt is followed under: a request id

Link = NewType("Link", bytes)
"""A block's own tokens and extra keys: which child of its parent it is."""

_ROOT = None
_UNKNOWN_PARENTS = 1_000
_STEPS_UP = 4_096
_UNREACHED = -1  # where a block starts that no followed prompt goes through
_MOST_PLACES = 64


class _Implied:
    """The name of a block whose hash is not known, only that it must stand in the cache."""


_Key: TypeAlias = BlockHash | _Implied


class PathEnd(NamedTuple):
    """A block that a prompt goes through, and where it ends in the prompt."""

    key: _Key
    end: int


@dataclass(slots=True)
class _Block:
    parent: _Key | None
    link: Link
    copies: int = 1
    start: int = _UNREACHED
    noted: int = -1  # in which of the tree's epochs what stands above it was noted
    names: set[Name] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """A prompt's tokens, ready to be looked up."""

    token_ids: array[int]
    first: ExtraKeys
    others: ExtraKeys

    def __len__(self) -> int:
        return len(self.token_ids)

    def link(self, start: int, size: int) -> Link:
        """Return the link of the block of `size` tokens that begins at `start`."""
        extra = self.others if start else self.first
        return block_link(self.token_ids[start : start + size], extra)


def block_link(token_ids: array[int], extra: ExtraKeys) -> Link:
    """Return the link of a block."""
    digest = hashlib.blake2b(token_ids.tobytes(), digest_size=16)
    if extra:
        digest.update(repr(extra).encode("utf-8", "surrogatepass"))
    return Link(digest.digest())


class BlockTree:
    """The blocks of one group, each below its parent, also where that is not here.

    A block is *reached* if all blocks above it are here; only such blocks serve a prompt. A name is
    attached to the last reached block of its prompt; when one above is dropped, it moves up and is
    noted in `lowered`.

    An engine stores a block only on top of cached ones. So when a prompt ends in blocks with an
    unknown parent, what stands before them is *implied*. Its removal cannot be seen, so the removal
    of any unknown hash drops all that is implied.
    """

    def __init__(self, max_blocks: int) -> None:
        self.size = 0  # tokens of each block; 0 before one was stored
        self.lowered: dict[Name, int] = {}
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[_Key, _Block] = OrderedDict()
        self._children: dict[_Key | None, dict[Link, _Key]] = {}
        self._ends: dict[Name, _Key | None] = {}
        self._implied: dict[_Implied, None] = {}
        self._unknown_parents: LRUMap[_Key, bool] = LRUMap(_UNKNOWN_PARENTS)
        self._epoch = 0  # how often these were forgotten
        self._is_late = False

    def __len__(self) -> int:
        return len(self._blocks)

    def keep(self, max_blocks: int) -> None:
        """Remember another number of blocks from now on; the oldest go first."""
        self._max_blocks = max_blocks
        self._enforce_bound()

    def stored(
        self,
        hashes: Sequence[BlockHash],
        parent: BlockHash | None,
        links: Sequence[Link],
        size: int,
        computes_again: bool,
    ) -> bool:
        """Add a run of blocks below a parent, None begins a prompt; return whether they fit in."""
        if self._blocks and size != self.size:
            return False
        self.size = size
        self._is_late |= parent is not _ROOT and parent not in self._blocks
        if self._is_late:
            self._note_unknown_parent(parent)
        above: _Key | None = parent
        for key, link in zip(hashes, links, strict=True):
            block = self._blocks.get(key)
            if block is not None and (block.parent, block.link) == (above, link):
                # to be removed as often; a prompt's first ones are found and told again, unless
                # the engine lacks a state there
                block.copies += computes_again or parent is not _ROOT
            else:
                self._put(key, above, link)
            above = key
        self._enforce_bound()
        return True

    def removed(self, key: BlockHash) -> None:
        """Take a copy of a block out; with an unknown one, all that was only implied."""
        block = self._blocks.get(key)
        if block is not None:
            block.copies -= 1
            if block.copies < 1:
                self._drop(key)
            return
        for implied in list(self._implied):
            self._drop(implied)
        self._unknown_parents = LRUMap(_UNKNOWN_PARENTS)
        self._epoch += 1

    def clear(self) -> None:
        """Drop all blocks."""
        self.lowered.update(dict.fromkeys(self._ends, 0))
        self._ends = dict.fromkeys(self._ends)
        self._blocks.clear()
        self._children.clear()
        self._implied.clear()
        self._unknown_parents = LRUMap(_UNKNOWN_PARENTS)
        self._epoch += 1
        self._is_late = False

    def path_of(self, name: Name) -> list[PathEnd]:
        """Return the blocks that a followed prompt goes through, as far as it is attached."""
        path, key = list[PathEnd](), self._ends.get(name)
        while key is not None:
            block = self._blocks[key]
            path.append(PathEnd(key, block.start + self.size))
            key = block.parent
        return path[::-1]

    def names_near(self, key: BlockHash, tokens: int) -> Iterator[Name]:
        """Yield the names attached to a block or to those of the next tokens below it."""
        level: list[tuple[_Key, int]] = [(key, tokens)] if key in self._blocks else []
        while level:
            here, left = level.pop()
            block = self._blocks[here]
            yield from block.names
            if block.start != _UNREACHED and left > self.size:
                below = self._children.get(here, {}).values()
                level += [(child, left - self.size) for child in below]

    def attach(self, name: Name, prompt: PromptBlocks, *, goes_on: bool = False) -> None:
        """Follow a prompt under a name, maybe again."""
        key = self._ends.get(name) if goes_on and not self._unknown_parents else _ROOT
        if key is not _ROOT:
            self.lowered.pop(name, None)
            path = [PathEnd(key, self._blocks[key].start + self.size)]
            path += self._walk(prompt, *path[0])
        else:
            self.detach(name)
            path = self._walk(prompt, _ROOT, 0)
            if self._unknown_parents and self._imply(prompt, path):
                path = self._walk(prompt, _ROOT, 0)
        for key, end in path:
            self._blocks[key].start = end - self.size
        self._move(name, path[-1].key if path else _ROOT)

    def tell_below(self, name: Name, tokens: int) -> None:
        """Note a followed name in `lowered` only when fewer leading tokens are here."""
        key = self._ends.get(name)
        while key is not None:
            block = self._blocks[key]
            if block.start < tokens:
                self._move(name, key)
                return
            key = block.parent

    def detach(self, name: Name) -> None:
        """Stop following a name."""
        end = self._ends.pop(name, None)
        if end is not None:
            self._blocks[end].names.discard(name)
        self.lowered.pop(name, None)

    def held_by(self, name: Name) -> int:
        """Return how many leading tokens of a followed prompt are here."""
        end = self._ends.get(name)
        return 0 if end is None else self._blocks[end].start + self.size

    def _move(self, name: Name, end: _Key | None) -> None:
        before = self._ends.get(name)
        if before is not None:
            self._blocks[before].names.discard(name)
        self._ends[name] = end
        if end is not None:
            self._blocks[end].names.add(name)

    def _walk(self, prompt: PromptBlocks, key: _Key | None, end: int) -> list[PathEnd]:
        """Return the blocks that a prompt goes through behind a block that ends at `end`."""
        path: list[PathEnd] = []
        while (children := self._children.get(key)) and end + self.size <= len(prompt):
            found = children.get(prompt.link(end, self.size))
            if found is None:
                break
            key, end = found, end + self.size
            path.append(PathEnd(key, end))
        return path

    def _put(self, key: _Key, parent: _Key | None, link: Link) -> None:
        if key in self._blocks:
            self._drop(key)  # it was told to stand elsewhere
        self._unknown_parents.pop(key)
        there = self._children.get(parent, {}).get(link)
        block = self._blocks[key] = _Block(parent, link)
        if isinstance(there, _Implied):
            self._replace_implied(there, key, block)
        elif there is not None:
            self._drop(there)  # another hash for the same content: only one can be found
        self._children.setdefault(parent, {})[link] = key

    def _replace_implied(self, implied: _Implied, key: _Key, block: _Block) -> None:
        """Let a block take the place of an implied one, with all that hangs there."""
        mine = self._children.setdefault(key, {})
        below = self._children.get(implied, {})
        for link in [link for link in below if link in mine]:
            self._drop(below[link])
        old = self._blocks.pop(implied)
        del self._implied[implied]
        block.start, block.names = old.start, old.names
        self._ends.update(dict.fromkeys(old.names, key))
        for link, child in self._children.pop(implied, {}).items():
            self._blocks[child].parent = key
            mine[link] = child
        if not mine:
            del self._children[key]

    def _drop(self, key: _Key) -> None:
        """Take a block out; the names at or below it move up."""
        names = self._names_below(key)
        block = self._blocks.pop(key)
        siblings = self._children[block.parent]
        del siblings[block.link]
        if not siblings:
            del self._children[block.parent]
        if isinstance(key, _Implied):
            del self._implied[key]
        if names:
            self._ends.update(dict.fromkeys(names, block.parent))
            self.lowered.update(dict.fromkeys(names, block.start))
            if block.parent is not None:
                self._blocks[block.parent].names.update(names)

    def _names_below(self, key: _Key) -> list[Name]:
        """Return the names attached to a block or below it; they leave these blocks."""
        names = list[Name]()
        stack = [] if self._blocks[key].start == _UNREACHED else [key]
        while stack:
            here = stack.pop()
            block = self._blocks[here]
            names += block.names
            block.names = set()
            if here != key:  # nor is it walked again when a block above it is dropped, too
                block.start = _UNREACHED
            stack += [
                child
                for child in self._children.get(here, {}).values()
                if child != key and self._blocks[child].start != _UNREACHED
            ]
        return names

    def _enforce_bound(self) -> None:
        while len(self._blocks) > self._max_blocks:
            self._drop(next(iter(self._blocks)))

    def _note_unknown_parent(self, key: _Key | None) -> None:
        """Note the unknown block at the top of a block that was just built upon: it is there."""
        steps = 0
        while key is not None and key in self._blocks:
            block = self._blocks[key]
            if block.noted == self._epoch or steps == _STEPS_UP:
                return
            block.noted, steps, key = self._epoch, steps + 1, block.parent
        if key is not None:
            self._unknown_parents.put(key, True)

    def _imply(self, prompt: PromptBlocks, path: Sequence[PathEnd]) -> bool:
        """Find the one unknown block on which a prompt's end is built; imply what is before it."""
        held, size = _end_of(path), self.size
        possible = self._unknown_before(prompt, max(held, 1))
        if len(possible) > _MOST_PLACES:
            return False
        places = [
            (unknown, start)
            for unknown, start in possible
            if len(prompt) - _end_of(self._walk(prompt, unknown, start)) < size
        ]
        if len(places) != 1:  # a few equal tokens in the middle stand in other prompts, too
            return False
        [(unknown, start)], key = places, path[-1].key if path else _ROOT
        if start == held:
            if not isinstance(key, _Implied):
                return False  # another block than the one known to stand there
            block = self._blocks[key]
            self._put(unknown, block.parent, block.link)
        else:
            for begin in range(held, start - size, size):
                above, key = key, _Implied()
                self._implied[key] = None
                self._put(key, above, prompt.link(begin, size))
            self._put(unknown, key, prompt.link(start - size, size))
        if isinstance(unknown, _Implied):
            self._implied[unknown] = None
        self._enforce_bound()
        return True

    def _unknown_before(self, prompt: PromptBlocks, first: int) -> list[tuple[_Key, int]]:
        """Return where the prompt goes on as a block does whose parent is unknown."""
        size = self.size
        starts = range(-(-first // size) * size, len(prompt) - size + 1, size)
        at = {prompt.link(start, size): start for start in starts}
        return [
            (unknown, at[link])
            for unknown in self._unknown_parents
            for link in self._children.get(unknown, {}).keys() & at.keys()
        ]


def _end_of(path: Sequence[PathEnd]) -> int:
    return path[-1].end if path else 0
