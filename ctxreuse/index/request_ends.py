"""Which requests end at which nodes of the context index."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import TypeAlias

from ctxreuse.context.blocks import id_size
from ctxreuse.context.flat_arrays import drop_items, drop_objects, with_room
from ctxreuse.index.nodes import NodeTree

RequestId: TypeAlias = str | int | bytes
"""What names a request; bytes are a request of another planner."""

# the fields of an id, from the place that its number is
_NODE = 0  # of a top, the node where all behind it end
_TOP = 1  # what it stands behind; 0 of a top
_BEHIND = 2  # the first of those behind it
_NEXT = 3  # what stands beside it, behind the same; of a free number, the next free one
_PREVIOUS = 4  # 0 of the first
_RANK = 5
_OLDER = 6  # in the order of arrival; of 0, the newest
_NEWER = 7  # of 0, the oldest
_FIELDS = 8
_NUMBER_BITS = 3  # that are zero in each number
_NEW = bytes(_FIELDS * 4)


class RequestEnds:
    """Ids of requests, by the nodes at which they end.

    Where a path is cut, the requests that ended behind the cut end at the cut. There may be a
    million of them, and a path may be cut once for each of its blocks. So no id is moved: those of
    one node form a tree, and the one tree's top gets behind the other's, which takes one step (a
    forest of disjoint sets, united by rank). No such tree is higher than the logarithm of how many
    ids were ever in it. An id that is forgotten keeps its place while others stand behind it.

    An id is a number, the place of its fields in one array; 0 is none.

    Args:
        tree: The nodes.

    Attributes:
        size: The sizes (`id_size`) of all ids.
    """

    __slots__ = ("_fields", "_free", "_ids", "_number_of", "_tree", "size")

    def __init__(self, tree: NodeTree) -> None:
        self._tree = tree
        self.size = 0
        self._number_of: dict[RequestId, int] = {}
        self._ids = with_room()  # of a forgotten one, None
        self._fields = array("i", _NEW)
        self._free = 0

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
        oldest: RequestId | None = self._ids[self._fields[_NEWER] >> _NUMBER_BITS]
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
        number = self._new(request_id, node)
        self._number_of[request_id] = number
        self.size += id_size(request_id)
        top = self._tree.ends[node]
        if top:
            self._put_behind(number, top)
        else:
            self._tree.ends[node] = number

    def forget(self, request_id: RequestId) -> int:
        """Forget a request; return the node where it ended, 0 if it is not known."""
        number = self._number_of.pop(request_id, 0)
        if not number:  # as nearly always
            return 0
        node, fields = self._end(number), self._fields
        self._ids[number >> _NUMBER_BITS] = None
        self.size -= id_size(request_id)
        older, newer = fields[number + _OLDER], fields[number + _NEWER]
        fields[older + _NEWER], fields[newer + _OLDER] = newer, older
        self._free_bare(number, node)
        return node

    def forget_one_at(self, node: int) -> None:
        """Forget any of the requests that end at a node, where there is one."""
        number, fields = self._tree.ends[node], self._fields
        while fields[number + _BEHIND]:
            number = fields[number + _BEHIND]
        request_id = self._ids[number >> _NUMBER_BITS]
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
        elif self._fields[there + _RANK] < self._fields[moved + _RANK]:
            self._stand_at(moved, end)
            self._put_behind(there, moved)
        else:
            self._put_behind(moved, there)

    def drop(self) -> Iterator[None]:
        """Forget all requests at once, and free their memory as `NodeTree.drop` does."""
        yield from drop_objects(self._ids)
        yield from drop_items(self._number_of)

    def _end(self, number: int) -> int:
        fields = self._fields
        while fields[number + _TOP]:
            number = fields[number + _TOP]
        return fields[number + _NODE]

    def _stand_at(self, number: int, node: int) -> None:
        self._tree.ends[node] = number
        self._fields[number + _NODE] = node

    def _put_behind(self, number: int, top: int) -> None:
        fields = self._fields
        first = fields[top + _BEHIND]
        fields[number + _TOP] = top
        fields[number + _NEXT], fields[number + _PREVIOUS] = first, 0
        if first:
            fields[first + _PREVIOUS] = number
        fields[top + _BEHIND] = number
        if fields[top + _RANK] == fields[number + _RANK]:
            fields[top + _RANK] += 1

    def _free_bare(self, number: int, node: int) -> None:
        """Free a number that no id has and nothing stands behind, then those before it, too.

        Args:
            number: The number.
            node: Where its requests ended.
        """
        fields = self._fields
        while self._ids[number >> _NUMBER_BITS] is None and not fields[number + _BEHIND]:
            top = fields[number + _TOP]
            if top:
                following, previous = fields[number + _NEXT], fields[number + _PREVIOUS]
                if previous:
                    fields[previous + _NEXT] = following
                else:
                    fields[top + _BEHIND] = following
                if following:
                    fields[following + _PREVIOUS] = previous
            else:
                self._tree.ends[node] = 0
            fields[number + _NEXT], self._free = self._free, number
            if not top:
                break
            number = top

    def _new(self, request_id: RequestId, node: int) -> int:
        """Return a number for a request, the newest."""
        fields = self._fields
        newest, number = fields[_OLDER], self._free
        if number:
            self._free = fields[number + _NEXT]
            fields[number + _NODE], fields[number + _OLDER] = node, newest
            fields[number + _TOP] = fields[number + _RANK] = fields[number + _NEWER] = 0
        else:
            number = len(fields)
            fields.frombytes(_NEW)
            fields[number + _NODE], fields[number + _OLDER] = node, newest
            if number >> _NUMBER_BITS == len(self._ids):
                self._ids = with_room(self._ids)
        self._ids[number >> _NUMBER_BITS] = request_id
        fields[newest + _NEWER] = fields[_OLDER] = number
        return number
