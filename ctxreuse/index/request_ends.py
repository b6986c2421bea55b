"""Which requests end at which nodes of the context index."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import TypeAlias

from ctxreuse.context.blocks import id_size
from ctxreuse.index.nodes import NodeTree, drop_items, drop_objects, with_room

RequestId: TypeAlias = str | int | bytes
"""What names a request; bytes are a request of another planner."""


class RequestEnds:
    """Ids of requests, by the nodes at which they end.

    Where a path is cut, the requests that ended behind the cut end at the cut. There may be a
    million of them, and a path may be cut once for each of its blocks. So no id is moved: those of
    one node form a tree, and the one tree's top gets behind the other's, which takes one step (a
    forest of disjoint sets, united by rank). No such tree is higher than the logarithm of how many
    ids were ever in it. An id that is forgotten keeps its place while others stand behind it.

    As in `NodeTree`, an id is a number, 0 is none, and there are arrays for what it has.

    Args:
        tree: The nodes.

    Attributes:
        size: The sizes (`id_size`) of all ids.
    """

    __slots__ = (
        "_behind",
        "_free",
        "_ids",
        "_newer",
        "_next_beside",
        "_nodes",
        "_number_of",
        "_older",
        "_previous_beside",
        "_ranks",
        "_tops",
        "_tree",
        "size",
    )

    def __init__(self, tree: NodeTree) -> None:
        self._tree = tree
        self.size = 0
        self._number_of: dict[RequestId, int] = {}
        self._ids = with_room()  # of a forgotten one, None
        self._nodes = array("i", [0])  # of a top, the node where all behind it end
        self._tops = array("i", [0])  # what each stands behind; 0 of a top
        self._behind = array("i", [0])  # the first of those behind each
        self._next_beside = array("i", [0])
        self._previous_beside = array("i", [0])  # 0 of the first
        self._ranks = bytearray(1)
        self._older = array("i", [0])  # in the order of arrival; of 0, the newest
        self._newer = array("i", [0])  # of 0, the oldest
        self._free = array("i")

    @property
    def number(self) -> int:
        """How many ids there are."""
        return len(self._number_of)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._number_of

    def ids(self) -> list[RequestId]:
        """Return all ids, the oldest first."""
        return list(self._number_of)

    def oldest(self) -> RequestId | None:
        """Return the id that was added first; None if there is none."""
        oldest: RequestId | None = self._ids[self._newer[0]]
        return oldest

    def end(self, request_id: RequestId) -> int:
        """Return the node where a request ends; 0 if it is not known."""
        return self._end(self._number_of.get(request_id, 0))

    def add(self, request_id: RequestId, node: int) -> None:
        """Add a request that is not known.

        Args:
            request_id: Its id.
            node: Where it ends.
        """
        top = self._tree.ends[node]
        number = self._new(request_id, node)
        self._number_of[request_id] = number
        self.size += id_size(request_id)
        self._newer[self._older[0]] = self._older[0] = number
        if top:
            self._put_behind(number, top)
        else:
            self._tree.ends[node] = number

    def forget(self, request_id: RequestId) -> int:
        """Forget a request; return the node where it ended, 0 if it is not known."""
        number = self._number_of.pop(request_id, 0)
        if not number:
            return 0
        node = self._end(number)
        self._ids[number] = None
        self.size -= id_size(request_id)
        older, newer = self._older[number], self._newer[number]
        self._newer[older], self._older[newer] = newer, older
        self._free_bare(number, node)
        return node

    def forget_one_at(self, node: int) -> None:
        """Forget any of the requests that end at a node, where there is one."""
        number = self._tree.ends[node]
        while self._behind[number]:
            number = self._behind[number]
        request_id = self._ids[number]
        assert request_id is not None, "an id behind which nothing stands is not forgotten"
        self.forget(request_id)

    def move(self, node: int, end: int) -> None:
        """Let the requests that end at a node end at another one."""
        moved, there = self._tree.ends[node], self._tree.ends[end]
        if not moved:
            return
        self._tree.ends[node] = 0
        if not there:
            self._stand_at(moved, end)
        elif self._ranks[there] < self._ranks[moved]:
            self._stand_at(moved, end)
            self._put_behind(there, moved)
        else:
            self._put_behind(moved, there)

    def drop(self) -> Iterator[None]:
        """Forget all requests at once, and free their memory as `NodeTree.drop` does."""
        yield from drop_objects(self._ids)
        yield from drop_items(self._number_of)

    def _end(self, number: int) -> int:
        while self._tops[number]:
            number = self._tops[number]
        return self._nodes[number]

    def _stand_at(self, number: int, node: int) -> None:
        self._tree.ends[node] = number
        self._nodes[number] = node

    def _put_behind(self, number: int, top: int) -> None:
        first = self._behind[top]
        self._tops[number] = top
        self._next_beside[number], self._previous_beside[number] = first, 0
        if first:
            self._previous_beside[first] = number
        self._behind[top] = number
        if self._ranks[top] == self._ranks[number]:
            self._ranks[top] += 1

    def _free_bare(self, number: int, node: int) -> None:
        """Free a number that no id has and nothing stands behind, then those before it, too.

        Args:
            number: The number.
            node: Where its requests ended.
        """
        while self._ids[number] is None and not self._behind[number]:
            top = self._tops[number]
            if top:
                following, previous = self._next_beside[number], self._previous_beside[number]
                if previous:
                    self._next_beside[previous] = following
                else:
                    self._behind[top] = following
                if following:
                    self._previous_beside[following] = previous
            else:
                self._tree.ends[node] = 0
            self._tops[number] = self._ranks[number] = 0
            self._free.append(number)
            if not top:
                break
            number = top

    def _new(self, request_id: RequestId, node: int) -> int:
        """Return a number for a request, the newest."""
        newest = self._older[0]
        if self._free:
            number = self._free.pop()
            self._ids[number] = request_id
            self._nodes[number] = node
            self._older[number], self._newer[number] = newest, 0
            return number
        number = len(self._nodes)
        if number == len(self._ids):
            self._ids = with_room(self._ids)
        self._ids[number] = request_id
        self._nodes.append(node)
        self._tops.append(0)
        self._behind.append(0)
        self._next_beside.append(0)
        self._previous_beside.append(0)
        self._ranks.append(0)
        self._older.append(newest)
        self._newer.append(0)
        return number
