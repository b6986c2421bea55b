"""What is being taken out of the tree of a context index, in short steps."""

from __future__ import annotations

from ctxreuse.context.blocks import BlockKey
from ctxreuse.index.nodes import NodeTree


class Removal:
    """What is being taken out of a tree, a few nodes at a time.

    What was cut off is no part of it from the first moment. An end that goes, and its parents, go
    one by one: who sends their blocks again meanwhile keeps what is left of them.

    Args:
        end: The node where a path was cut. Requests that ended behind the cut, in the same turn,
            end here.
        tops: The subtrees that were cut off, by whatever.
        births: How many nodes there had been, if all children of the end were cut off.
        goes_up: Whether the end goes, too, if nothing ends there or below; then its parents.

    Attributes:
        path: From one of the subtrees down to what is freed next; whether each is of the end's
            turn.
        only: The subtree that was cut off, if it was one child of several; 0 once it is freed.
        shortened: The end, if all its children were cut off.
        tokens: Block tokens that have left so far.
        is_by_age: Whether the bounds of the index have asked for it, rather than a caller who waits
            for its end.
        is_done: Whether all of it is out.
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
        self.tops = tops or {}
        self.births = births or 0
        self.only = 0 if births is not None else next(iter(self.tops.values()), 0)
        self.shortened = 0 if births is None else end
        self.goes_up = goes_up
        self.path: list[tuple[int, bool]] = []
        self.tokens = 0
        self.is_by_age = False
        self.is_done = False

    def has_cut_off(self, node: int, tree: NodeTree) -> bool:
        """Return whether a node is the top of what was cut off."""
        if node == self.only:
            return True
        is_below = tree.parents[node] == self.shortened != 0
        return is_below and tree.is_older(node, self.births)
