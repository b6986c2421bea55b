"""Cutting a batch that no single process plans into partitions, so that little sharing is lost.

A request goes with those that hold its heaviest shared block (`group_tree`). Groups larger than a
partition are cut again; parts are joined while they fit, those first that have most in common. All
is counted batch by batch, so memory grows with the number of different blocks, not of requests.
Nothing depends on the order of the requests, nor on how they come in batches.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ctxreuse.distributed.group_tree import Contexts, ConversationTurns, GroupTree, Pairs
from ctxreuse.distributed.tallies import NONE, Digests, Integers, at, positions

_MOST_LEVELS = 16


@dataclass(frozen=True, slots=True)
class Partitioning:
    """Where each request of a large batch goes."""

    count: int  # partitions are numbered from 0, small ones last
    _turns: ConversationTurns
    _leaves: _LeafPartitions
    _followed: Integers

    def of(self, contexts: Contexts) -> Integers:
        """Return the partition of each request."""
        conversations = self._turns.followed(contexts)
        partitions = at(self._followed, conversations)
        leading = self._turns.leading(contexts).contexts
        partitions[conversations == NONE] = self._leaves.of(leading)
        return partitions


def partition(batches: Iterable[Contexts], most: int) -> Partitioning:
    """Cut requests into partitions of at most `most`; conversations and repeats stay whole."""
    turns = ConversationTurns.of(batches)
    tree = GroupTree.of(batches, turns)
    pairs: list[Pairs] = []
    for _ in range(_MOST_LEVELS):
        large = (tree.sizes > most) & ~tree.are_tried
        if not large.any():
            break
        pairs.append(tree.cut(batches, turns, large))
    bounds = _bounds(batches, turns, tree, most)
    count, first = _numbered(tree, _joined(tree.sizes, pairs, most), bounds, most)
    leaves = _LeafPartitions(tree, first, bounds)
    return Partitioning(count, turns, leaves, _followed(batches, turns, leaves, count))


@dataclass(frozen=True, slots=True)
class _LeafPartitions:
    """The partition of each leaf of the tree."""

    tree: GroupTree
    first: Integers
    bounds: Mapping[int, Digests]  # of spread leaves, the smallest digest of each but the first

    def of(self, leading: Contexts) -> Integers:
        """Return the partitions of leading requests."""
        leaves = self.tree.leaves(leading)
        partitions = self.first[leaves]
        for leaf in np.unique(leaves).tolist():
            if leaf in self.bounds:
                here = leaves == leaf
                after = np.searchsorted(self.bounds[leaf], leading.digests[here], "right")
                partitions[here] += after
        return partitions


def _joined(sizes: Integers, pairs: Iterable[Pairs], most: int) -> Integers:
    """Join groups while they fit into one partition, those first that have most in common."""
    leader = list(range(len(sizes)))
    size = sizes.tolist()

    def leader_of(group: int) -> int:
        while leader[group] != group:
            leader[group] = group = leader[leader[group]]
        return group

    for ones, others, tokens in pairs:
        # what each shares with the other counts, whichever of the two is named first
        low, high = np.minimum(ones, others), np.maximum(ones, others)
        order = np.lexsort((high, low))
        low, high = low[order], high[order]
        new = np.concatenate(([True], (low[1:] != low[:-1]) | (high[1:] != high[:-1])))
        starts = np.flatnonzero(new[: len(low)])
        common = np.add.reduceat(tokens[order], starts) if len(starts) else tokens
        for pair in starts[np.argsort(-common, kind="stable")].tolist():
            one, other = leader_of(int(low[pair])), leader_of(int(high[pair]))
            if one != other and size[one] + size[other] <= most:
                leader[other] = one
                size[one] += size[other]
    return np.array([leader_of(group) for group in range(len(size))], dtype=np.int64)


def _bounds(
    batches: Iterable[Contexts], turns: ConversationTurns, tree: GroupTree, most: int
) -> dict[int, Digests]:
    """Spread the leaves that no block cuts over several partitions, by digest."""
    large = np.flatnonzero(tree.are_leaves & (tree.sizes > most)).tolist()
    digests: dict[int, list[Digests]] = {leaf: [] for leaf in large}
    sizes: dict[int, list[Integers]] = {leaf: [] for leaf in large}
    for contexts in batches if large else ():
        leading = turns.leading(contexts)
        leaves = tree.leaves(leading.contexts)
        for leaf in np.unique(leaves).tolist():
            if leaf in digests:
                digests[leaf].append(leading.contexts.digests[leaves == leaf])
                sizes[leaf].append(leading.sizes[leaves == leaf])
    bounds = {}
    for leaf in large:
        ordered = np.concatenate(digests[leaf])
        order = np.argsort(ordered, kind="stable")
        ordered, ends = ordered[order], np.cumsum(np.concatenate(sizes[leaf])[order])
        total = int(ends[-1])
        share = math.ceil(total / math.ceil(total / most))
        starts = np.unique(ordered[np.searchsorted(ends, np.arange(share, total, share), "right")])
        bounds[leaf] = starts[starts > ordered[0]]
    return bounds


def _numbered(
    tree: GroupTree, leaders: Integers, bounds: Mapping[int, Digests], most: int
) -> tuple[int, Integers]:
    """Return how many partitions there are, and each leaf's, or the first of several."""
    leaves = np.flatnonzero(tree.are_leaves)
    sizes = np.zeros(len(leaders), dtype=np.int64)
    np.add.at(sizes, leaders[leaves], tree.sizes[leaves])
    together: dict[int, list[int]] = {}
    for leader in np.unique(leaders[leaves]).tolist():
        together.setdefault(int(tree.scopes[leader]), []).append(leader)
    small: list[list[int]] = []
    partitions: list[list[int]] = []
    for members in together.values():
        spread = [[leader] for leader in members if leader in bounds]
        whole = [leader for leader in members if leader not in bounds]
        filled = spread + _filled(whole, sizes[whole].tolist(), most)
        (small if len(filled) == 1 and not spread else partitions).extend(filled)
    scope_sizes = [int(sizes[members].sum()) for members in small]
    partitions += [
        [leader for number in numbers for leader in small[number]]
        for numbers in _filled(range(len(small)), scope_sizes, most)
    ]
    partitions.sort(
        key=lambda members: (
            4 * sizes[members].sum() < most,
            min((tree.parents[one], one) for one in members),
        )
    )
    first = np.full(len(leaders), NONE)
    count = 0
    for members in partitions:
        first[members] = count
        count += 1 + sum(len(bounds.get(leader, ())) for leader in members)
    return count, first[leaders]


def _filled(members: Iterable[int], sizes: Sequence[int], most: int) -> list[list[int]]:
    """Fill partitions: the largest first, into the emptiest or, if too full, a new one."""
    filled: list[list[int]] = []
    emptiest: list[tuple[int, int]] = []
    for size, member in sorted(zip(sizes, members, strict=True), key=lambda one: (-one[0], one[1])):
        if emptiest and emptiest[0][0] + size <= most:
            taken, number = emptiest[0]
            filled[number].append(member)
            heapq.heapreplace(emptiest, (taken + size, number))
        else:
            heapq.heappush(emptiest, (size, len(filled)))
            filled.append([member])
    return filled


def _followed(
    batches: Iterable[Contexts], turns: ConversationTurns, leaves: _LeafPartitions, count: int
) -> Integers:
    """Return the partition of each conversation's first turn; the lowest if it has several."""
    partitions = np.full(len(turns.conversations), count)
    for contexts in batches if len(partitions) else ():
        leading = turns.leading(contexts)
        named = leading.are_first & (leading.contexts.conversations != 0)
        found = positions(turns.conversations, leading.contexts.conversations[named])
        np.minimum.at(partitions, found, leaves.of(leading.contexts)[named])
    return partitions
