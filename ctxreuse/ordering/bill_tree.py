"""The orders of a batch where prefixes are written at a price, from a shortest length on.

A prefix tree is wanted whose bill is low. `clustering` builds one that saves many tokens, without
knowing that short prefixes save none, nor that a prefix of two requests costs relatively more to
write than one of ten. This module improves it by large-neighbourhood search (Shaw 1998): again and
again some requests that have much in common are taken out and put back one by one, each where it
saves most then; what does not lower the bill is undone. A fixed number of steps, with fixed chance.

A node stands for the blocks that all contexts below it begin with, whatever their order: those of
its parent and some more. So a context may be put below a node whose blocks it holds, or share a
new node with any other node below such a one: the blocks that the two have in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ctxreuse.ordering.clustering import merge_heaviest
from ctxreuse.ordering.marks import MarkPrices

_Integers: TypeAlias = npt.NDArray[np.int64]
_Numbers: TypeAlias = npt.NDArray[np.floating[Any]]

_STEPS_A_CONTEXT = 6
_MOST_TAKEN_OUT = 15
_MOST_BELOW = 40
_CLIMBS = 0.4
_MOST_CONTEXTS = 1_024
_MOST_CELLS = 8_000_000
_MOST_WORK = 4_000_000_000  # cells that are looked at
_HALF = 0.5  # of a token; tokens are whole
_EXACT_IN_32_BITS = 1 << 23


class _BillTree:
    """The tree of some contexts."""

    def __init__(
        self,
        contexts: Sequence[_Integers],
        counts: Sequence[int],
        tokens: Sequence[int],
        weights: _Numbers,
        base: int,
        prices: MarkPrices,
    ) -> None:
        self._contexts = contexts
        self._counts = counts
        self._weights = weights
        self._prices = prices
        self.size = self.root = len(contexts)
        most = 2 * (self.size + _MOST_TAKEN_OUT + _MOST_BELOW + 1)
        # half as many bytes to look at, where no sum is too long for that
        is_short = base + max(tokens) < _EXACT_IN_32_BITS
        kind = np.float32 if is_short else np.float64
        self._held = np.zeros((len(weights), most), dtype=kind)
        self._depths = np.zeros(most)
        self._parents = np.full(most, self.root)
        self._requests = np.zeros(most, dtype=np.int64)
        self._children = np.zeros(most, dtype=np.int64)
        self._lives = np.zeros(most, dtype=np.bool_)
        self._lives[self.root] = True
        self._depths[self.root] = base
        for number, context in enumerate(contexts):
            self._held[context, number] = weights[context]
            self._depths[number] = tokens[number] + base
        self._base = base
        self._written = float(base if base >= prices.minimum else 0)
        self._free = list(range(most - 1, self.root, -1))
        self._end = self.root + 1  # of the nodes that have ever lived
        self._left: list[int] = []  # nodes that live no more since the last step

    def fill(self, contents: Sequence[tuple[int, ...]], parents: Sequence[int]) -> None:
        """Take over a tree of clusters as `merge_heaviest` returns it, contexts first."""
        inner = {parent for parent in parents if parent >= 0} | {*range(self.size, len(contents))}
        node_of = {-1: self.root}
        for cluster in sorted(inner):
            node_of[cluster] = self._new(np.array(contents[cluster], dtype=np.int64))
        for cluster in inner:
            parent = node_of[parents[cluster]]
            self._parents[node_of[cluster]] = parent
            self._children[parent] += 1
        for context in range(self.size):
            above = context if context in inner else parents[context]
            self._attach(context, node_of[above])

    def improve(self, steps: int) -> None:
        """Take contexts out and put them back, a number of times."""
        chance = np.random.Generator(np.random.PCG64(0))
        gain = self._gain()
        for _ in range(steps):
            kept = self._parents.copy(), self._requests.copy(), self._children.copy()
            lives, free = self._lives.copy(), list(self._free)
            taken = self._related(int(chance.integers(self.size)), chance)
            for context in taken:
                self._remove(context)
            for context in taken:
                self._insert(context)
            new = self._gain()
            if new >= gain:
                gain = new
                for node in self._left:
                    self._held[:, node] = 0
                self._free += self._left
            else:
                for node in free[len(self._free) :]:
                    self._held[:, node] = 0
                self._parents, self._requests, self._children = kept
                self._lives, self._free = lives, free
            self._left = []

    def paths(self) -> list[list[_Integers]]:
        """Return for each context the blocks of the nodes above it, from the top down."""
        blocks: dict[int, _Integers] = {self.root: np.empty(0, dtype=np.int64)}
        paths = []
        for context in range(self.size):
            path, node = [], int(self._parents[context])
            while node != self.root:
                if node not in blocks:
                    blocks[node] = np.flatnonzero(self._held[:, node])
                path.append(blocks[node])
                node = int(self._parents[node])
            paths.append(path[::-1])
        return paths

    def _new(self, content: _Integers) -> int:
        node = self._free.pop()
        self._end = max(self._end, node + 1)
        self._held[content, node] = self._weights[content]
        self._depths[node] = self._base + self._weights[content].sum()
        self._lives[node] = True
        self._requests[node] = self._children[node] = 0
        return node

    def _attach(self, context: int, node: int) -> None:
        self._lives[context] = True
        self._parents[context] = node
        self._children[node] += 1
        self._count(context, self._counts[context])

    def _count(self, node: int, number: int) -> None:
        requests, parents = self._requests, self._parents
        while node != self.root:
            requests[node] += number
            node = parents[node]

    def _remove(self, context: int) -> None:
        self._count(context, -self._counts[context])
        node = int(self._parents[context])
        self._lives[context] = False
        self._parents[context] = self.root
        self._children[node] -= 1
        if node != self.root and self._children[node] == 1:
            end = self._end
            [child] = np.flatnonzero((self._parents[:end] == node) & self._lives[:end])
            self._parents[child] = self._parents[node]
            self._lives[node] = False
            self._parents[node] = self.root
            self._left.append(node)

    def _insert(self, context: int) -> None:
        """Put a context where it saves most."""
        end, prices, count = self._end, self._prices, self._counts[context]
        own = self._contexts[context]
        shared = self._base + self._held[own, :end].sum(axis=0)
        parents, depths = self._parents[:end], self._depths[:end]
        holds_all = shared > depths - _HALF
        places = np.flatnonzero(
            self._lives[:end] & holds_all[parents] & (shared >= max(prices.minimum, self._base + 1))
        )
        if len(places) == 0:
            self._attach(context, self.root)
            return
        above = self._written_above(parents[places])
        tokens, requests = shared[places], self._requests[places]
        # a node that is written already costs nothing to be cut
        is_written = self._are_written(places)
        gains = prices.saving * count * tokens
        gains -= np.where(is_written, 0.0, prices.premium * (tokens - above))
        gains = np.where(
            is_written | (requests + count >= prices.least_requests),
            gains,
            prices.saving * count * above,
        )
        number = int(gains.argmax())
        if gains[number] <= 0:
            self._attach(context, self.root)
            return
        place = int(places[number])
        parent = int(parents[place])
        if holds_all[place] and place > self.root:
            self._attach(context, place)
        elif shared[place] <= depths[parent] + _HALF:
            self._attach(context, parent)
        else:
            node = self._new(own[self._held[own, place] > 0])
            self._parents[node] = parent
            self._parents[place] = node
            self._children[node] = 1
            self._requests[node] = self._requests[place]
            self._attach(context, node)

    def _are_written(self, nodes: _Integers) -> npt.NDArray[np.bool_]:
        return (self._requests[nodes] >= self._prices.least_requests) & (
            self._depths[nodes] >= self._prices.minimum
        )

    def _written_above(self, nodes: _Integers) -> _Numbers:
        """Return the tokens of the last written prefix of each node, that of the node included."""
        found = np.full(len(nodes), self._written)
        left = np.arange(len(nodes))
        while len(left):
            inner = nodes != self.root
            left, nodes = left[inner], nodes[inner]
            is_written = self._are_written(nodes)
            found[left[is_written]] = self._depths[nodes[is_written]]
            left, nodes = left[~is_written], self._parents[nodes[~is_written]]
        return found

    def _gain(self) -> float:
        """Return what the tree saves of the bill behind its root, if all that pays is written."""
        nodes = np.flatnonzero(self._lives[: self._end])
        nodes = nodes[nodes != self.root]
        nodes = nodes[self._are_written(nodes)]
        added = self._depths[nodes] - self._written_above(self._parents[nodes])
        each = self._prices.saving * (self._requests[nodes] - 1) - self._prices.premium
        return float((added * each).sum())

    def _related(self, context: int, chance: np.random.Generator) -> list[int]:
        """Return a context and others that have much in common with it, in a random order."""
        number = int(chance.integers(2, _MOST_TAKEN_OUT + 1))
        shared = self._held[self._contexts[context], : self.size].sum(axis=0)
        shared *= 1 + _HALF * chance.random(self.size)
        shared[context] = np.inf
        number = min(number, self.size)
        taken = np.argpartition(-shared, number - 1)[:number]
        if chance.random() < _HALF:
            node = int(self._parents[context])
            while node != self.root and chance.random() < _CLIMBS:
                node = int(self._parents[node])
            if node != self.root:
                below = self._below(node)
                below = below[chance.permutation(len(below))[:_MOST_BELOW]]
                taken = np.unique(np.concatenate((taken, below)))
        return [int(one) for one in taken[chance.permutation(len(taken))]]

    def _below(self, node: int) -> _Integers:
        above = self._parents[: self.size]
        found = above == node
        while (above != self.root).any():
            above = self._parents[above]
            found |= above == node
        return np.flatnonzero(found)


def cheap_orders(
    contexts: Sequence[Sequence[int]],
    weights: Sequence[int],
    base: int,
    prices: MarkPrices,
) -> list[list[int]]:
    """Order every context of a batch so that its bill is low."""
    numbers: dict[tuple[int, ...], int] = {}
    distinct = [numbers.setdefault(tuple(sorted(one)), len(numbers)) for one in contexts]
    contents, parents = merge_heaviest(list(numbers), list(weights))
    counts = [0] * len(numbers)
    for number in distinct:
        counts[number] += 1
    nodes: list[list[frozenset[int]]] = [[] for _ in numbers]
    for part in _parts(list(numbers), parents):
        for number, path in zip(
            part, _improved(part, contents, parents, counts, weights, base, prices), strict=True
        ):
            nodes[number] = path
    # the earliest context of a node gives the order of its blocks, and that of equal contexts
    leaders: dict[frozenset[int], dict[int, int]] = {}
    ordered: dict[int, list[int]] = {}
    for context, number in zip(contexts, distinct, strict=True):
        if number in ordered:
            continue
        order: dict[int, None] = {}
        for node in nodes[number]:
            if node not in leaders:
                leaders[node] = {block: rank for rank, block in enumerate(context)}
            own = [block for block in node if block not in order]
            order |= dict.fromkeys(sorted(own, key=leaders[node].__getitem__))
        ordered[number] = [*order, *(block for block in context if block not in order)]
    return [list(ordered[number]) for number in distinct]


def _parts(contexts: Sequence[tuple[int, ...]], parents: Sequence[int]) -> list[list[int]]:
    """Cut contexts into parts, small enough for one tree, of which neighbours stay together."""
    children: list[list[int]] = [[] for _ in parents]
    stack: list[int] = []
    for cluster, parent in enumerate(parents):
        (stack if parent < 0 else children[parent]).append(cluster)
    order = []
    stack.reverse()
    while stack:
        cluster = stack.pop()
        if cluster < len(contexts):
            order.append(cluster)
        stack += children[cluster]
    parts: list[list[int]] = []
    blocks: set[int] = set()
    for number in order:
        more = blocks | set(contexts[number])
        size = len(parts[-1]) + 1 if parts else 0
        if not parts or size > _MOST_CONTEXTS or 3 * size * len(more) > _MOST_CELLS:
            parts.append([])
            more = set(contexts[number])
        parts[-1].append(number)
        blocks = more
    return parts


def _improved(
    part: Sequence[int],
    contents: Sequence[tuple[int, ...]],
    parents: Sequence[int],
    counts: Sequence[int],
    weights: Sequence[int],
    base: int,
    prices: MarkPrices,
) -> list[list[frozenset[int]]]:
    """Return, for each context of a part, the nodes above it in the improved tree."""
    holders: dict[int, int] = {}
    for number in part:
        for block in contents[number]:
            holders[block] = holders.get(block, 0) + counts[number]
    shared = [block for block, number in holders.items() if number > 1]
    local = {block: number for number, block in enumerate(shared)}
    own = [
        np.array([local[block] for block in contents[number] if block in local], dtype=np.int64)
        for number in part
    ]
    tree = _BillTree(
        own,
        [counts[number] for number in part],
        [sum(weights[block] for block in contents[number]) for number in part],
        np.array([weights[block] for block in shared], dtype=np.float64),
        base,
        prices,
    )
    clusters = list(part)
    children = dict.fromkeys(part, 1)  # a context that others are part of is one of its own
    for cluster in clusters:  # grows while it is walked
        above = parents[cluster]
        if above >= 0:
            if above not in children:
                children[above] = 0
                clusters.append(above)
            children[above] += 1
    # where only one branch is left in this part, nothing forks
    clusters = [*part, *(one for one in clusters[len(part) :] if children[one] > 1)]
    known = {cluster: number for number, cluster in enumerate(clusters)}
    forks = []
    for cluster in clusters:
        above = parents[cluster]
        while above >= 0 and above not in known:
            above = parents[above]
        forks.append(known.get(above, -1))
    tree.fill(
        [tuple(local[block] for block in contents[one] if block in local) for one in clusters],
        forks,
    )
    cells = 2 * sum(map(len, own)) * _MOST_TAKEN_OUT
    tree.improve(min(_STEPS_A_CONTEXT * len(part), _MOST_WORK // max(cells, 1)))
    return [[frozenset(shared[block] for block in node) for node in path] for path in tree.paths()]
