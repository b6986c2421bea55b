"""The blocks of layers that keep states at some places only: sliding windows, recurrent layers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice

from ctxreuse.cache.kv_events.block_tree import BlockHash, PathEnd


class StateGroup:
    """The latest blocks of one group of such layers, which look back a window of tokens, maybe 1.

    An engine names a prefix alike in all groups, whatever their block sizes: the blocks of a path
    through the tree of a group with full attention are looked up here by their names.
    """

    def __init__(self, size: int, window: int, most: int) -> None:
        self.size = size
        self.reach = max(1, -(-(window - 1) // size))
        """How many blocks in a row a prompt needs that goes on behind them."""
        self._most = most
        self._copies: dict[BlockHash, int] = {}

    def __len__(self) -> int:
        return len(self._copies)

    def stored(self, hashes: Sequence[BlockHash]) -> list[BlockHash]:
        """Add copies of blocks; return those that have to go."""
        for key in hashes:
            self._copies[key] = self._copies.get(key, 0) + 1
        gone = list(islice(self._copies, max(0, len(self._copies) - self._most)))
        for key in gone:
            del self._copies[key]
        return gone

    def removed(self, key: BlockHash) -> bool:
        """Take a copy of a block out; return whether that was the last one."""
        copies = self._copies.get(key, 0) - 1
        if copies > 0:
            self._copies[key] = copies
        return copies == 0 and self._copies.pop(key) > 0

    def clear(self) -> None:
        """Drop all blocks."""
        self._copies.clear()

    def readable(self, path: Sequence[PathEnd], ends: Collection[int]) -> set[int]:
        """Return the ends, in tokens, behind which these layers can go on; of those given."""
        found: set[int] = set()
        row = 0
        for key, end in path:
            if end % self.size:
                continue
            row = row + 1 if key in self._copies else 0
            if row >= self.reach or (row and row * self.size == end):
                found.add(end)
        return found.intersection(ends)
