"""What is being taken out of the tree of a context index, in short steps."""

from __future__ import annotations

from ctxreuse.context.blocks import BlockKey
from ctxreuse.index.nodes import NodeTree


class Removal:
    """What is being taken out of a tree, a few nodes at a time."""

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
