"""The nodes of the context index, as flat arrays that the garbage collector does not look into.

A node is a number, and each array has an entry for it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TypeAlias

from ctxreuse.context.blocks import BlockKey
from ctxreuse.context.flat_arrays import drop_items, drop_objects, room_behind, with_room

_Packed: TypeAlias = bytes | tuple[int, ...]

_WIDE = 8
_NARROW = 4
_NUMBER_BITS = 32
_NUMBER = (1 << _NUMBER_BITS) - 1
_UNSHARED_KEYS = 256


class NodeTree:
    """A forest of runs of blocks; node 0 is none, and has no children.

    Up to eight children of a node stand in a list, more in a dictionary by their first block. A
    later turn is found by no block, so it stands there by its own number.
    """

    __slots__ = (
        "_born",
        "_free",
        "_same_keys",
        "_used_up",
        "_weights",
        "births",
        "block_count",
        "edges",
        "ends",
        "first_children",
        "last_uses",
        "next_siblings",
        "node_count",
        "opens_turn",
        "parents",
        "queued",
        "runs",
        "tokens",
        "uses",
        "wide",
    )

    def __init__(self, births: int = 0) -> None:
        self.births = births  # in trees before this one, too, so that no name comes again
        self.node_count = self.block_count = self.tokens = 0
        self.runs = with_room()  # of tuples
        self._weights = with_room()
        self.edges = array("q", [0])  # hashes of the first blocks
        self.parents = array("i", [0])  # 0 of a root, and of a free number
        self.first_children = array("i", [0])  # 0 is none, -1 in `wide`
        self.next_siblings = array("i", [0])  # of a free number, the next free one
        self.wide: dict[int, dict[BlockKey | int, int]] = {}
        self.opens_turn = bytearray(1)
        self.uses = array("q", [0])  # requests that went through
        self.last_uses = array("q", [0])  # of a node with children, when one ended there
        self.ends = array("i", [0])  # the tops in `RequestEnds`
        self.queued = bytearray(1)  # where `LeafQueue` has it
        self._born = array("q", [0])
        self._free = self._used_up = 0
        self._same_keys: dict[BlockKey, BlockKey] = {}

    def weights(self, node: int) -> Sequence[int]:
        """Return the weight of each block of a node."""
        packed: _Packed = self._weights[node]
        return memoryview(packed).cast("I") if isinstance(packed, bytes) else packed

    def name(self, node: int) -> int:
        """Return a number that names a node for good: no later node gets it."""
        return self._born[node] << _NUMBER_BITS | node

    def named(self, name: int) -> int:
        """Return the node of a name; 0 if it is gone."""
        node = name & _NUMBER
        if node < len(self._born) and self._born[node] == name >> _NUMBER_BITS:
            return node
        return 0

    def is_older(self, node: int, births: int) -> bool:
        """Return whether a node was there when `births` was read."""
        return self._born[node] <= births

    def is_leaf(self, node: int) -> bool:
        """Return whether a node is no root, and nothing stands below it."""
        return self.parents[node] != 0 and not self.first_children[node]

    def child(self, node: int, key: BlockKey) -> int:
        """Return the child whose run begins with a block; 0 if there is none."""
        child = self.first_children[node]
        if child < 0:
            return self.wide[node].get(key, 0)
        edges, edge = self.edges, hash(key)
        while child:
            if edges[child] == edge and self.runs[child][0] == key and not self.opens_turn[child]:
                return child
            child = self.next_siblings[child]
        return 0

    def children(self, node: int) -> Sequence[int]:
        """Return the children of a node, in order."""
        child = self.first_children[node]
        if child < 0:
            return list(self.wide[node].values())
        children = []
        while child:
            children.append(child)
            child = self.next_siblings[child]
        return children

    def new_root(self) -> int:
        """Return a new root."""
        return self._new(0, (), b"", 0, 0)

    def grow(
        self,
        parent: int,
        run: Sequence[BlockKey],
        weights: Sequence[int],
        now: int,
        *,
        opens_turn: bool = False,
    ) -> int:
        """Return a new last child."""
        same = self._same_keys
        if len(same) > _UNSHARED_KEYS + self.block_count // 4:
            same.clear()
        keys = tuple(map(same.setdefault, run, run))
        node = self._new(parent, keys, _packed(weights), 1, now)
        if opens_turn:
            self.opens_turn[node] = 1
        self._link(parent, node, node if opens_turn else keys[0])
        self.node_count += 1
        self.block_count += len(keys)
        self.tokens += sum(weights)
        return node

    def split(self, node: int, length: int) -> int:
        """Cut a node's run in two; return the upper part, which is new and ends no request."""
        run, weights, parent = self.runs[node], self.weights(node), self.parents[node]
        upper = self._new(
            parent, run[:length], _packed(weights[:length]), self.uses[node], self.last_uses[node]
        )
        self._replace(parent, node, upper)
        self.opens_turn[upper], self.opens_turn[node] = self.opens_turn[node], 0
        self.runs[node], self._weights[node] = run[length:], _packed(weights[length:])
        self.edges[node] = hash(run[length])
        self.parents[node] = upper
        self.first_children[upper], self.next_siblings[node] = node, 0
        self.node_count += 1
        return upper

    def shorten(self, node: int, keep: int) -> int:
        """Shorten a node's run to `keep` blocks; return the weight that leaves."""
        run, weights = self.runs[node], self.weights(node)
        gone = sum(weights[keep:])
        self.tokens -= gone
        self.block_count -= len(run) - keep
        self.runs[node], self._weights[node] = run[:keep], _packed(weights[:keep])
        return gone

    def unlink(self, node: int) -> None:
        """Take a node out of its parent's children; it still knows its parent."""
        parent = self.parents[node]
        first = self.first_children[parent]
        if first < 0:
            table = self.wide[parent]
            del table[self._edge(node)]
            if len(table) <= _NARROW:
                del self.wide[parent]
                self._list_children(parent, list(table.values()))
        elif first == node:
            self.first_children[parent] = self.next_siblings[node]
        else:
            while self.next_siblings[first] != node:
                first = self.next_siblings[first]
            self.next_siblings[first] = self.next_siblings[node]

    def cut_children(self, node: int) -> dict[BlockKey | int, int]:
        """Take all children from a node, and return them."""
        children = self.wide.pop(node, None)
        if children is None:
            children = {child: child for child in self.children(node)}
        self.first_children[node] = 0
        return children

    def pop_child(self, node: int) -> int:
        """Take a child from a node that is cut off and has one; return it."""
        child = self.first_children[node]
        if child > 0:
            self.first_children[node] = self.next_siblings[child]
            return child
        table = self.wide[node]
        _, child = table.popitem()
        if not table:
            del self.wide[node]
            self.first_children[node] = 0
        return child

    def free(self, node: int) -> int:
        """Free a node that stands in no list and has no children; return its weight."""
        weight = 0
        if self.parents[node]:
            weight = self.shorten(node, 0)
            self.node_count -= 1
            self.parents[node] = 0
        self._born[node] = -1
        self.next_siblings[node], self._free = self._free, node
        return weight

    def drop(self) -> Iterator[None]:
        """Free the memory of all nodes, a little at a time, between the yields."""
        yield from drop_objects(self.runs)
        yield from drop_objects(self._weights)
        yield from drop_items(self._same_keys)
        for table in self.wide.values():
            yield from drop_items(table)

    def _new(
        self, parent: int, run: tuple[BlockKey, ...], weights: _Packed, uses: int, now: int
    ) -> int:
        self.births += 1
        node = self._free
        if node:
            self._free = self.next_siblings[node]
            self.next_siblings[node] = self.opens_turn[node] = 0
        else:
            self._used_up += 1
            node = self._used_up
            if node == len(self.parents):
                self._make_room()
        self.runs[node] = run
        self.edges[node] = hash(run[0]) if run else 0
        self._weights[node] = weights
        self.parents[node] = parent
        self.uses[node] = uses
        self.last_uses[node] = now
        self._born[node] = self.births
        return node

    def _make_room(self) -> None:
        """Append zeros to all arrays, as few as others may wait for."""
        room = room_behind(len(self.parents))
        for numbers in (self.parents, self.first_children, self.next_siblings, self.ends):
            numbers.frombytes(bytes(room * numbers.itemsize))
        for times in (self.uses, self.last_uses, self._born, self.edges):
            times.frombytes(bytes(room * times.itemsize))
        self.opens_turn += bytes(room)
        self.queued += bytes(room)
        if len(self.parents) > len(self.runs):
            self.runs, self._weights = with_room(self.runs), with_room(self._weights)

    def _edge(self, node: int) -> BlockKey | int:
        """Return the key of a node in its parent's dictionary."""
        key: BlockKey = self.runs[node][0]
        return node if self.opens_turn[node] else key

    def _link(self, parent: int, node: int, edge: BlockKey | int) -> None:
        """Make a new node the last child."""
        last = self.first_children[parent]
        if last == 0:
            self.first_children[parent] = node
        elif last < 0:
            self.wide[parent][edge] = node
        else:
            following, number = self.next_siblings, 1
            while following[last]:
                last = following[last]
                number += 1
            following[last] = node
            if number == _WIDE:
                self.wide[parent] = {self._edge(one): one for one in self.children(parent)}
                self.first_children[parent] = -1

    def _list_children(self, parent: int, children: Sequence[int]) -> None:
        following = 0
        for child in reversed(children):
            self.next_siblings[child] = following
            following = child
        self.first_children[parent] = following

    def _replace(self, parent: int, node: int, other: int) -> None:
        """Put a node that begins alike into a node's place among its parent's children."""
        one = self.first_children[parent]
        if one < 0:
            table = self.wide[parent]
            if self.opens_turn[node]:
                del table[node]
                table[other] = other
            else:
                table[self.runs[node][0]] = other
            return
        self.next_siblings[other] = self.next_siblings[node]
        if one == node:
            self.first_children[parent] = other
            return
        while self.next_siblings[one] != node:
            one = self.next_siblings[one]
        self.next_siblings[one] = other


def path_to(tree: NodeTree, node: int, matched: int) -> tuple[BlockKey, ...]:
    """Return the blocks from the root to the `matched`-th block of the node's run."""
    runs = [tree.runs[node][:matched]]
    node = tree.parents[node]
    while node:
        runs.append(tree.runs[node])
        node = tree.parents[node]
    runs.reverse()
    return tuple(chain.from_iterable(runs))


def _packed(weights: Sequence[int]) -> _Packed:
    """Return weights as 4 bytes each, if that holds them."""
    try:
        return array("I", weights).tobytes()
    except OverflowError:
        return tuple(weights)
