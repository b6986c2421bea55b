"""What is being taken out of the tree of a context index, in short steps."""

from __future__ import annotations

from ctxreuse.context.blocks import BlockKey
from ctxreuse.index.nodes import NodeTree


class Removal:
    """What is being taken out of a tree, a few nodes at a time.

    What was cut off is no part of the tree from the first moment. Its requests end at `end`, which
    goes, too, with its parents, as far as nothing ends there and `goes_up` is set.
    """

    __slots__ = (
        "births",
        "end",
        "goes_up",
        "is_by_age",
        "is_done",
        "only",
        "path",
        "shortened",
        "tokens",
        "tops",
    )

    def __init__(
        self,
        end: int,
        tops: dict[BlockKey | int, int] | None = None,
        births: int | None = None,
        *,
        goes_up: bool = False,
    ) -> None:
        self.end = end
        self.tops = tops or {}  # the subtrees that were cut off
        self.births = births or 0  # of nodes, when all children of the end were cut off
        self.only = 0 if births is not None else next(iter(self.tops.values()), 0)
        self.shortened = 0 if births is None else end
        self.goes_up = goes_up
        self.path: list[tuple[int, bool]] = []  # down to the next node; is it of the end's turn?
        self.tokens = 0  # that have left so far
        self.is_by_age = False  # the bounds have asked for it, not a caller who waits
        self.is_done = False

    def has_cut_off(self, node: int, tree: NodeTree) -> bool:
        """Return whether a node is the top of what was cut off."""
        if node == self.only:
            return True
        is_below = tree.parents[node] == self.shortened != 0
        return is_below and tree.is_older(node, self.births)
