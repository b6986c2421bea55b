"""The order in which leaves of the context index are evicted: least recently used first."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from ctxreuse.context.flat_arrays import LinkedNumbers
from ctxreuse.index.nodes import NodeTree

_STEPS = 64
_MOVED_AT_ONCE = 8
_DROPPED_AT_ONCE = 10_000
_NODE_BITS = 32
_NODE = (1 << _NODE_BITS) - 1
_NONE: list[int] = []
"""No entries, of any queue: one list less for the collector to look at."""

_LISTED = 1
_WAITING = 2


class LeafQueue:
    """All leaves by their last use.

    A used leaf goes to the end of a list. A new leaf that was used in between waits in a heap.
    """

    __slots__ = ("_entries", "_former", "_listed", "_tree")

    def __init__(self, tree: NodeTree) -> None:
        self._tree = tree
        self._listed = LinkedNumbers()
        self._entries: list[int] = _NONE
        self._former: list[int] = _NONE  # have still to move

    @property
    def waiting(self) -> int:
        """How many entries the heap has, those that are out of date among them."""
        return len(self._entries) + len(self._former)

    def use(self, leaf: int) -> None:
        """Note that a leaf was used, no earlier than any other."""
        listed = self._listed
        if listed.newest == leaf:
            return
        if self._tree.queued[leaf] == _LISTED:
            listed.remove(leaf)
        self._tree.queued[leaf] = _LISTED
        listed.append(leaf)

    def add(self, leaf: int) -> None:
        """Queue a node that has become a leaf, whenever it was used."""
        last_uses, queued, listed = self._tree.last_uses, self._tree.queued, self._listed
        newest, last_use = listed.newest, last_uses[leaf]
        queued[leaf] = _LISTED
        if not newest or last_uses[newest] <= last_use:
            listed.add(leaf, newest)
        elif last_use <= last_uses[listed.oldest]:
            listed.add(leaf, 0)
        else:
            queued[leaf] = _WAITING
            if self._entries is _NONE:
                self._entries = []
            heapq.heappush(self._entries, last_use << _NODE_BITS | leaf)
            self._shrink()

    def remove(self, node: int) -> None:
        """Take out a node that is no leaf any more, or leaves the tree."""
        if self._tree.queued[node] == _LISTED:
            self._listed.remove(node)
        self._tree.queued[node] = 0

    def oldest(self) -> int:
        """Return the leaf whose last use is longest ago; 0 if it is not found in a few steps."""
        last_uses, listed = self._tree.last_uses, self._listed.oldest
        if not (self._entries or self._former):  # as nearly always
            return listed
        for _ in range(_STEPS):
            heap = self._first()
            if not heap:
                return listed
            if self._is_waiting(heap[0]):
                waits = heap[0] & _NODE
                return waits if not listed or last_uses[waits] < last_uses[listed] else listed
            heapq.heappop(heap)
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

    def _is_waiting(self, entry: int) -> bool:
        node = entry & _NODE
        is_waiting = self._tree.queued[node] == _WAITING
        return is_waiting and self._tree.last_uses[node] == entry >> _NODE_BITS

    def _shrink(self) -> None:
        """Go on dropping what is out of date, if that is much."""
        if not self._former:
            if len(self._entries) <= 64 + 4 * self._tree.node_count:
                return
            self._entries, self._former = [], self._entries
        for _ in range(min(_MOVED_AT_ONCE, len(self._former))):
            entry = self._former.pop()  # a heap that loses its last entry is a heap
            if self._is_waiting(entry):
                heapq.heappush(self._entries, entry)
        self._former = self._former or _NONE

    def _first(self) -> list[int]:
        """Return the heap with the older entry on top; empty if both are."""
        if not self._former or (self._entries and self._entries[0] < self._former[0]):
            return self._entries
        return self._former
