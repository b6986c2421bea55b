"""Which leaf of the context index was used least recently."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from itertools import count

from ctxreuse.nodes import Node


class LeafQueue:
    """The leaves of a tree by their last use.

    A heap that is told of each node that becomes a leaf, and of nothing else: entries of nodes that
    were used again, grew children or left the tree are passed over when they come up, and swept out
    once they are many.

    Args:
        nodes: Returns all nodes of the tree, for sweeping.
    """

    def __init__(self, nodes: Callable[[], Iterable[Node]]) -> None:
        self._nodes = nodes
        self._heap: list[tuple[int, int, Node]] = []
        self._ticket = count()

    def __len__(self) -> int:
        """Return the number of entries, stale ones included."""
        return len(self._heap)

    def push(self, leaf: Node, tree_size: int) -> None:
        """Note a leaf.

        Args:
            leaf: A node without children, not a root.
            tree_size: How many nodes the tree has: the queue stays within four times as many.
        """
        heapq.heappush(self._heap, self._entry(leaf))
        if len(self._heap) > 64 + 4 * tree_size:
            self._heap = [self._entry(node) for node in self._nodes() if _is_leaf(node)]
            heapq.heapify(self._heap)

    def oldest(self) -> Node | None:
        """Return the leaf whose last use is longest ago; None if there is none."""
        heap = self._heap
        while heap:
            last_use, _, node = heap[0]
            if node.last_use == last_use and _is_leaf(node):
                return node
            heapq.heappop(heap)
        return None

    def _entry(self, leaf: Node) -> tuple[int, int, Node]:
        return leaf.last_use, next(self._ticket), leaf


def _is_leaf(node: Node) -> bool:
    return node.parent is not None and not node.children
