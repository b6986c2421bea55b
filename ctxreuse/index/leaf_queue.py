"""The order in which leaves of the context index are evicted: least recently used first."""

from __future__ import annotations

import heapq
from typing import TypeAlias

from ctxreuse.index.nodes import Node, is_leaf

_STEPS = 64
_MOVED_AT_ONCE = 8
_Entry: TypeAlias = tuple[int, int, Node]


class LeafQueue:
    """A heap of every node that has become a leaf, one entry each.

    An entry has a time not after the last use of its node. Entries are brought up to date, a few at
    a time, as they come to the top. Where most are of nodes that are gone, the others move to a new
    heap, a few at a time as well: a heap that loses its last entry is a heap.
    """

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._former: list[_Entry] = []  # have still to move
        self._numbers = 0  # of the entries, to decide between equal last uses

    def __len__(self) -> int:
        return len(self._entries) + len(self._former)

    def add(self, leaf: Node, nodes: int) -> None:
        """Queue a leaf that is not queued.

        Args:
            leaf: The leaf.
            nodes: As in `shrink`.
        """
        leaf.is_queued = True
        self._numbers += 1
        heapq.heappush(self._entries, (leaf.last_use, self._numbers, leaf))
        self.shrink(nodes)

    def shrink(self, nodes: int) -> None:
        """Go on with dropping what is out of date, if there is much; called whenever nodes go.

        Args:
            nodes: How many nodes the tree has.
        """
        if not self._former:
            if len(self._entries) <= 64 + 4 * nodes:
                return
            self._entries, self._former = [], self._entries
        for _ in range(min(_MOVED_AT_ONCE, len(self._former))):
            entry = self._former.pop()
            if is_leaf(entry[2]):
                heapq.heappush(self._entries, entry)
            else:
                entry[2].is_queued = False

    def oldest(self) -> Node | None:
        """Return the leaf whose last use is longest ago; None if it is not found in a few steps."""
        for _ in range(_STEPS):
            heap = self._first() if self._former else self._entries
            if not heap:
                return None
            last_use, _, node = heap[0]
            if node.parent is None or node.children:
                heapq.heappop(heap)
                node.is_queued = False
            elif node.last_use == last_use:
                return node
            else:
                self._numbers += 1
                heapq.heapreplace(heap, (node.last_use, self._numbers, node))
        return None

    def oldest_use(self) -> int | None:
        """Return when that leaf was used, or an earlier time; None if there is none."""
        leaf = self.oldest()
        if leaf is not None:
            return leaf.last_use
        heap = self._first()
        return heap[0][0] if heap else None

    def _first(self) -> list[_Entry]:
        """Return the heap with the older entry on top; empty if both are."""
        if not self._former or (self._entries and self._entries[0] < self._former[0]):
            return self._entries
        return self._former
