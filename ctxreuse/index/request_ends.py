"""Which requests end at which nodes of the context index."""

from __future__ import annotations

from array import array
from typing import TypeAlias

from ctxreuse.context.flat_arrays import HashedNumbers
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
_OLDER = 6  # in the order of arrival; of 0, the newest; `_FORGOTTEN` of a forgotten one
_NEWER = 7  # of 0, the oldest
_FIELDS = 8
_NUMBER_BITS = 3  # that are zero in each number
_NEW = bytes(_FIELDS * 4)
_FORGOTTEN = -1

_OF_BYTES = hash("bytes")
_OF_NUMBER = hash("number")


class RequestEnds:
    """Ids of requests, by the nodes at which they end.

    A forest of disjoint sets, united by rank: where a path is cut, all requests behind the cut move
    to its end in one step. A forgotten id keeps its place while others stand behind it. Of an id
    only the hash is kept; of a million ids, two have the same with a probability of 3 in 100
    million, and the first is forgotten.
    """

    __slots__ = ("_fields", "_free", "_hashes", "_tree", "number")

    def __init__(self, tree: NodeTree) -> None:
        self._tree = tree
        self.number = 0
        self._hashes = HashedNumbers()
        self._fields = array("i", _NEW)
        self._free = 0

    def __contains__(self, request_id: RequestId) -> bool:
        """Return whether an id is known; its owner need not be held."""
        return self._hashes.find(_hash(request_id)) != 0

    def end(self, request_id: RequestId) -> int:
        """Return the node where a request ends; 0 if it is not known."""
        return self._end(self._find(request_id))

    def put(self, request_id: RequestId, node: int) -> int:
        """Remember where a request ends, as the newest; return where it ended before, or 0."""
        hashed = _hash(request_id)
        known = self._hashes.find(hashed)
        before = self._forget(known << _NUMBER_BITS) if known else 0
        number = self._new(node)
        self._hashes.add(number >> _NUMBER_BITS, hashed)
        self.number += 1
        top = self._tree.ends[node]
        if top:
            self._put_behind(number, top)
        else:
            self._tree.ends[node] = number
        return before

    def forget(self, request_id: RequestId) -> int:
        """Forget a request; return the node where it ended, 0 if it is not known."""
        number = self._find(request_id)
        return self._forget(number) if number else 0  # as nearly always

    def forget_oldest(self) -> int:
        """Forget the request that was added first; return where it ended, 0 if there is none."""
        number = self._fields[_NEWER]
        return self._forget(number) if number else 0

    def forget_one_at(self, node: int) -> None:
        """Forget any of the requests that end at a node, where there is one."""
        number, fields = self._tree.ends[node], self._fields
        while fields[number + _BEHIND]:
            number = fields[number + _BEHIND]
        self._forget(number)  # behind one that is forgotten stands another

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

    def _find(self, request_id: RequestId) -> int:
        return self._hashes.find(_hash(request_id)) << _NUMBER_BITS

    def _forget(self, number: int) -> int:
        """Forget a request by its number; return where it ended."""
        node, fields = self._end(number), self._fields
        self._hashes.remove(number >> _NUMBER_BITS)
        self.number -= 1
        older, newer = fields[number + _OLDER], fields[number + _NEWER]
        fields[older + _NEWER], fields[newer + _OLDER] = newer, older
        fields[number + _OLDER] = _FORGOTTEN
        self._free_bare(number, node)
        return node

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
        """Free a number that no id has and nothing stands behind, then those before it."""
        fields = self._fields
        while fields[number + _OLDER] == _FORGOTTEN and not fields[number + _BEHIND]:
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

    def _new(self, node: int) -> int:
        """Return a number for a request, the newest."""
        fields = self._fields
        newest, number = fields[_OLDER], self._free
        if number:
            self._free = fields[number + _NEXT]
            fields[number + _TOP] = fields[number + _RANK] = fields[number + _NEWER] = 0
        else:
            number = len(fields)
            fields.frombytes(_NEW)
        fields[number + _NODE], fields[number + _OLDER] = node, newest
        fields[newest + _NEWER] = fields[_OLDER] = number
        return number


def _hash(request_id: RequestId) -> int:
    """Return 64 bits of an id, others in each process; a string, bytes and a number differ."""
    if isinstance(request_id, str):
        return hash(request_id)
    if isinstance(request_id, bytes):
        return hash(request_id) ^ _OF_BYTES
    return hash(f"{request_id:x}") ^ _OF_NUMBER  # a number's own hash is no secret
