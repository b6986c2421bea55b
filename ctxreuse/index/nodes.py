"""What the tree of the context index is made of: nodes, requests that end there, what goes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from itertools import chain
from typing import TypeAlias

from ctxreuse.context.blocks import BlockKey

RequestId: TypeAlias = str | int | bytes
"""What names a request; bytes are a request of another planner."""


class Node:
    """A run of blocks behind the run of the parent.

    A plain class with slots: a hundred thousand contexts make some two hundred thousand of these.
    """

    __slots__ = (
        "children",
        "edge",
        "is_queued",
        "last_use",
        "parent",
        "requests",
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
        self.requests: RequestGroup | None = None  # those that end here
        self.uses = 0
        self.last_use = 0
        self.is_queued = False  # whether the queue of leaves has an entry of it


def is_leaf(node: Node) -> bool:
    """Return whether a node may be evicted: it is part of the tree, and nothing stands below."""
    return node.parent is not None and not node.children


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
    runs.reverse()
    return tuple(chain.from_iterable(runs))


class RequestGroup:
    """Ids of requests that end at one node.

    Where a path is cut, the requests that ended behind the cut end at the cut. There may be a
    million of them, and a path may be cut once for each of its blocks. So no id is moved: its group
    joins the one that is there already, which takes one step (a forest of disjoint sets, united by
    rank). No tree of groups is higher than the logarithm of how many groups were ever joined.

    Args:
        node: Where the requests end.

    Attributes:
        node: Where they end; of a group that has joined another one, that one's counts.
        ids: The ids, those of the groups that have joined it left out.
    """

    __slots__ = ("_into", "_joined", "_rank", "ids", "node")

    def __init__(self, node: Node) -> None:
        self.node = node
        self.ids: dict[RequestId, None] = {}
        self._into: RequestGroup | None = None
        self._joined: OrderedDict[RequestGroup, None] | None = None  # none of them is empty
        self._rank = 0

    def end(self) -> Node:
        """Return the node where the requests end."""
        group = self
        while group._into is not None:
            group = group._into
        return group.node

    def discard(self, request_id: RequestId) -> None:
        """Take an id out, and with the last one the group from its node."""
        del self.ids[request_id]
        self._leave_if_empty()

    def pop(self) -> RequestId:
        """Take out any of the ids, of a group that stands at a node, and return it."""
        group = self
        while not group.ids:
            assert group._joined, "a group at a node has ids"
            group = next(iter(group._joined))
        request_id, _ = group.ids.popitem()
        group._leave_if_empty()
        return request_id

    def _leave_if_empty(self) -> None:
        group = self
        while not group.ids and not group._joined:
            into = group._into
            if into is None:
                group.node.requests = None
                return
            assert into._joined is not None
            del into._joined[group]
            group = into

    def _join(self, other: RequestGroup) -> None:
        self._into = other
        if other._joined is None:
            other._joined = OrderedDict()
        other._joined[self] = None
        other._rank += other._rank == self._rank


def move_requests(node: Node, end: Node) -> None:
    """Let the requests that end at a node end at another one."""
    moved, there = node.requests, end.requests
    if moved is None:
        return
    node.requests = None
    if there is None:
        stays = moved
    elif there._rank < moved._rank:
        stays = moved
        there._join(moved)
    else:
        stays = there
        moved._join(there)
    stays.node, end.requests = end, stays


class Removal:
    """What is being taken out of a tree, a few nodes at a time.

    What was cut off is no part of it from the first moment. An end that goes, and its parents, go
    one by one: who sends their blocks again meanwhile keeps what is left of them.

    Args:
        end: Where a path was cut. Requests that ended behind the cut, in the same turn, end here.
        cut_off: The subtrees that stood below, by their edges.
        goes_up: Whether the end goes, too, if nothing ends there or below; then its parents.

    Attributes:
        tokens: Block tokens that have left so far.
        is_by_age: Whether the bounds of the index have asked for it, rather than a caller who waits
            for its end.
        is_done: Whether all of it is out.
    """

    __slots__ = ("cut_off", "end", "goes_up", "is_by_age", "is_done", "path", "tokens")

    def __init__(self, end: Node, cut_off: dict[Hashable, Node], *, goes_up: bool = False) -> None:
        self.end = end
        self.cut_off = cut_off
        self.goes_up = goes_up
        # from one of the subtrees down to what is freed next; whether each is of the end's turn
        self.path: list[tuple[Node, bool]] = []
        self.tokens = 0
        self.is_by_age = False
        self.is_done = False

    @property
    def has_bare_end(self) -> bool:
        """Whether the end goes, too."""
        return self.goes_up and is_leaf(self.end) and self.end.requests is None
