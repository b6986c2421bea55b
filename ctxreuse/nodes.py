"""A node of the context index: a run of blocks."""

from __future__ import annotations

from collections.abc import Hashable

from ctxreuse.blocks import BlockKey


class Node:
    """A run of blocks behind the run of the parent.

    A plain class with slots: a hundred thousand contexts make some two hundred thousand of these.
    """

    __slots__ = (
        "children",
        "edge",
        "last_use",
        "parent",
        "request_ids",
        "run",
        "uses",
        "weights",
    )

    def __init__(
        self,
        parent: Node | None,
        edge: Hashable,
        run: tuple[BlockKey, ...],
        weights: tuple[int, ...],
    ) -> None:
        self.parent = parent
        self.edge = edge
        self.run = run
        self.weights = weights
        self.children: dict[Hashable, Node] = {}
        self.request_ids: dict[str | int, None] = {}
        self.uses = 0
        self.last_use = 0


def opens_turn(node: Node) -> bool:
    """Return whether a later turn of a conversation begins here."""
    return node.parent is not None and node.edge != node.run[0]


def path_to(node: Node, matched: int) -> tuple[BlockKey, ...]:
    """Return the blocks from the root to the `matched`-th block of the node's run."""
    runs = [node.run[:matched]]
    above = node.parent
    while above is not None:
        runs.append(above.run)
        above = above.parent
    return tuple(key for run in reversed(runs) for key in run)
