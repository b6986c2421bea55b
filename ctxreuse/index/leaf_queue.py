"""The order in which leaves of the context index are evicted: least recently used first."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from ctxreuse.index.nodes import NodeTree

_STEPS = 64
_MOVED_AT_ONCE = 8
_DROPPED_AT_ONCE = 10_000
_NODE_BITS = 32
_NODE = (1 << _NODE_BITS) - 1
_NONE: list[int] = []
"""No entries, of any queue: one list less for the collector to look at."""


class LeafQueue:
    """A heap of every node that has become a leaf, one entry each: its last use, and its number.

    An entry has a time not after the last use of its node. Entries are brought up to date, a few at
    a time, as they come to the top; that of a node which is gone becomes the entry of the next node
    that has its number. Where most are of nodes that are gone, the others move to a new heap, a few
    at a time as well: a heap that loses its last entry is a heap.

    Args:
        tree: The nodes.
    """

    def __init__(self, tree: NodeTree) -> None:
        self._tree = tree
        self._entries: list[int] = []
        self._former: list[int] = _NONE  # have still to move

    def __len__(self) -> int:
        return len(self._entries) + len(self._former)

    def add(self, leaf: int) -> None:
        """Queue a leaf that is not queued."""
        tree = self._tree
        tree.is_queued[leaf] = 1
        heapq.heappush(self._entries, tree.last_uses[leaf] << _NODE_BITS | leaf)
        self.shrink()

    def shrink(self) -> None:
        """Go on with dropping what is out of date, if there is much; called whenever nodes go."""
        if not self._former:
            if len(self._entries) <= 64 + 4 * self._tree.node_count:
                return
            self._entries, self._former = [], self._entries
        for _ in range(min(_MOVED_AT_ONCE, len(self._former))):
            entry = self._former.pop()
            if self._tree.is_leaf(entry & _NODE):
                heapq.heappush(self._entries, entry)
            else:
                self._tree.is_queued[entry & _NODE] = 0
        self._former = self._former or _NONE

    def oldest(self) -> int:
        """Return the leaf whose last use is longest ago; 0 if it is not found in a few steps."""
        tree = self._tree
        for _ in range(_STEPS):
            heap = self._first() if self._former else self._entries
            if not heap:
                return 0
            node = heap[0] & _NODE
            if not tree.is_leaf(node):
                heapq.heappop(heap)
                tree.is_queued[node] = 0
                continue
            last_use = tree.last_uses[node]
            if last_use == heap[0] >> _NODE_BITS:
                return node
            heapq.heapreplace(heap, last_use << _NODE_BITS | node)
        return 0

    def oldest_use(self) -> int | None:
        """Return when that leaf was used, or an earlier time; None if there is none."""
        leaf = self.oldest()
        if leaf:
            return self._tree.last_uses[leaf]
        heap = self._first()
        return heap[0] >> _NODE_BITS if heap else None

    def drop(self) -> Iterator[None]:
        """Free the memory of all entries as `NodeTree.drop` does."""
        for entries in (self._entries, self._former):
            while entries:
                del entries[-_DROPPED_AT_ONCE:]
                yield

    def _first(self) -> list[int]:
        """Return the heap with the older entry on top; empty if both are."""
        if not self._former or (self._entries and self._entries[0] < self._former[0]):
            return self._entries
        return self._former
