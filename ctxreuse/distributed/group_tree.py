"""Groups of requests by their heaviest shared blocks, in whatever order and batches they come.

The heaviest block saves most tokens if all its n requests begin with it: its own * (n - 1).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ctxreuse.distributed.tallies import (
    NONE,
    Booleans,
    Digests,
    Integers,
    Tally,
    at,
    largest_first,
    positions,
)

_STRIDE = np.uint64(0x9E3779B97F4A7C15)
_LOWER_HALF = (1 << 32) - 1
_NEIGHBOURS = 3


@dataclass(frozen=True, slots=True)
class Contexts:
    """What decides where requests go, as arrays; digests of 64 bits stand for names."""

    scopes: Digests  # tenant and system text
    digests: Digests  # of all that is planned of a request
    conversations: Digests  # 0 for none
    are_later: Booleans  # behind a history
    lengths: Integers  # in blocks
    blocks: Digests  # of all requests, one after the other
    weights: Integers  # the tokens of each, at least 1

    def where(self, chosen: Booleans) -> Contexts:
        """Return some of them."""
        held = np.repeat(chosen, self.lengths)
        return Contexts(
            self.scopes[chosen],
            self.digests[chosen],
            self.conversations[chosen],
            self.are_later[chosen],
            self.lengths[chosen],
            self.blocks[held],
            self.weights[held],
        )

    def rows(self) -> Integers:
        """Return for each block the position of the request that holds it."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)


class Leading(NamedTuple):
    """Requests that follow no other one; of a stray later turn only its conversation counts."""

    contexts: Contexts
    sizes: Integers  # of each, how many requests go where it goes, it included
    are_first: Booleans


class ConversationTurns:
    """Conversations: later turns go where the first one goes."""

    def __init__(self, conversations: Digests, later: Integers) -> None:
        self.conversations = conversations  # with the first turn in the batch, sorted
        self._later = later

    @classmethod
    def of(cls, batches: Iterable[Contexts]) -> ConversationTurns:
        """Count the later turns of each conversation."""
        first, later = Tally(np.add), Tally(np.add)
        for contexts in batches:
            named = contexts.conversations != 0
            for tally, chosen in ((first, ~contexts.are_later), (later, contexts.are_later)):
                conversations = contexts.conversations[named & chosen]
                tally.add(conversations, np.ones(len(conversations), dtype=np.int64))
        found = positions(later.digests(), first.digests())
        return cls(first.digests(), at(later.columns()[0], found, 0))

    def followed(self, contexts: Contexts) -> Integers:
        """Return for each request the number of the conversation that it follows; -1 for none."""
        found = positions(self.conversations, contexts.conversations)
        return np.where(contexts.are_later & (contexts.conversations != 0), found, NONE)

    def leading(self, contexts: Contexts) -> Leading:
        """Return the requests that follow no other one."""
        leading = contexts.where(self.followed(contexts) == NONE)
        stray = leading.are_later
        held = np.repeat(~stray, leading.lengths)
        named = stray & (leading.conversations != 0)
        counted = replace(
            leading,
            digests=np.where(named, leading.conversations, leading.digests),
            lengths=np.where(stray, 0, leading.lengths),
            blocks=leading.blocks[held],
            weights=leading.weights[held],
        )
        found = positions(self.conversations, leading.conversations)
        return Leading(counted, 1 + np.where(stray, 0, at(self._later, found, 0)), ~stray)


class Pairs(NamedTuple):
    """Pairs of groups that are cut from the same one."""

    ones: Integers
    others: Integers
    tokens: Integers  # of blocks that requests of the first share with the second


class _Dividers(NamedTuple):
    """Blocks that may name a part of a group, from the lightest up."""

    codes: Digests
    owners: Integers


class GroupTree:
    """Groups of requests; the roots are the scopes."""

    def __init__(self, names: Digests, holders: Integers, sizes: Integers) -> None:
        self._names = names
        self._holders = holders  # the requests that may share blocks
        self.sizes = sizes
        self.scopes = np.arange(len(names))
        self.parents = np.arange(len(names))
        self.are_leaves = np.ones(len(names), dtype=np.bool_)
        self.are_tried = np.zeros(len(names), dtype=np.bool_)
        self._rest = np.full(len(names), NONE)  # the part that no block names
        # of blocks that name parts: the rank within the group and, in the lower half, the part
        self._codes = np.empty(0, dtype=np.uint64)
        self._ranked = np.empty(0, dtype=np.int64)

    @classmethod
    def of(cls, batches: Iterable[Contexts], turns: ConversationTurns) -> GroupTree:
        """Make the roots."""
        tally = Tally(np.add, np.add)
        for contexts in batches:
            leading = turns.leading(contexts)
            tally.add(leading.contexts.scopes, leading.are_first.astype(np.int64), leading.sizes)
        holders, sizes = tally.columns()
        return cls(tally.digests(), holders, sizes)

    def leaves(self, contexts: Contexts) -> Integers:
        """Return the smallest group of each leading request."""
        groups = np.maximum(positions(self._names, contexts.scopes), 0)
        rows = contexts.rows()
        while True:
            found = positions(self._codes, _codes(groups[rows], contexts.blocks))
            best = np.full(len(groups), NONE)
            np.maximum.at(best, rows, at(self._ranked, found))
            below = np.where(best == NONE, self._rest[groups], best & _LOWER_HALF)
            below = np.where(below == NONE, groups, below)
            if np.array_equal(below, groups):
                return groups
            groups = below

    def cut(self, batches: Iterable[Contexts], turns: ConversationTurns, large: Booleans) -> Pairs:
        """Cut groups by the blocks that are heaviest within them; return what the parts share."""
        candidates = self._candidates(batches, turns, large)
        count = len(candidates.codes)
        order = np.argsort(candidates.codes)
        by_code = candidates.codes[order]
        named, rest = np.zeros((2, count), np.int64), np.zeros((2, len(large)), np.int64)
        pairs = Tally(np.add)
        for leading, groups in self._members(batches, turns, large):
            contexts = leading.contexts
            rows = contexts.rows()
            ranks = at(order, positions(by_code, _codes(groups[rows], contexts.blocks)))
            heaviest = largest_first(rows, ranks, len(groups), 1 + _NEIGHBOURS)
            first = at(ranks, heaviest[:, 0])
            has = first != NONE
            for row, numbers in enumerate((leading.are_first, leading.sizes)):
                np.add.at(named[row], first[has], numbers[has])
                np.add.at(rest[row], groups[~has], numbers[~has])
            for block in heaviest.T[1:]:
                both = block != NONE
                code = first[both] * count + ranks[block[both]]
                pairs.add(code.astype(np.uint64), contexts.weights[block[both]])
        self.are_tried |= large
        parts = self._grow(candidates, named, rest)
        ones, others = np.divmod(pairs.digests().astype(np.int64), max(count, 1))
        is_part = parts[others] != NONE
        return Pairs(parts[ones[is_part]], parts[others[is_part]], pairs.columns()[0][is_part])

    def _members(
        self, batches: Iterable[Contexts], turns: ConversationTurns, chosen: Booleans
    ) -> Iterator[tuple[Leading, Integers]]:
        """Yield the leading requests of some groups, and the group of each."""
        for contexts in batches:
            leading = turns.leading(contexts)
            groups = self.leaves(leading.contexts)
            here = chosen[groups]
            if here.any():
                members = Leading(
                    leading.contexts.where(here), leading.sizes[here], leading.are_first[here]
                )
                yield members, groups[here]

    def _candidates(
        self, batches: Iterable[Contexts], turns: ConversationTurns, large: Booleans
    ) -> _Dividers:
        """Return the blocks that several, and at most half, of a group's requests hold."""
        tally = Tally(np.add, np.maximum, np.maximum)
        for leading, groups in self._members(batches, turns, large):
            contexts = leading.contexts
            owners = groups[contexts.rows()]
            codes = _codes(owners, contexts.blocks)
            tally.add(codes, np.ones(len(codes), dtype=np.int64), contexts.weights, owners)
        codes = tally.digests()
        holders, tokens, owners = tally.columns()
        wanted = (holders > 1) & (2 * holders <= self._holders[owners])
        blocks = _codes(-owners, codes)  # a code would order equal ones by the group's number
        order = np.lexsort((blocks[wanted], owners[wanted], (tokens * (holders - 1))[wanted]))
        return _Dividers(codes[wanted][order], owners[wanted][order])

    def _grow(self, candidates: _Dividers, named: Integers, rest: Integers) -> Integers:
        """Add the parts that candidates name, and one for each group's rest; return them."""
        used = named[1] > 0
        cut = np.unique(candidates.owners[used])
        left = cut[rest[1][cut] > 0]
        before, with_names = len(self.sizes), int(used.sum())
        parts = np.full(len(used), NONE)
        parts[used] = before + np.arange(with_names)
        self._rest[left] = before + with_names + np.arange(len(left))
        self.are_leaves[cut] = False
        parents = np.append(candidates.owners[used], left)
        self.parents = np.append(self.parents, parents)
        self.scopes = np.append(self.scopes, self.scopes[parents])
        self.sizes = np.concatenate((self.sizes, named[1][used], rest[1][left]))
        self._holders = np.concatenate((self._holders, named[0][used], rest[0][left]))
        self._rest = np.append(self._rest, np.full(len(parents), NONE))
        self.are_leaves = np.append(self.are_leaves, np.ones(len(parents), dtype=np.bool_))
        self.are_tried = np.append(self.are_tried, np.zeros(len(parents), dtype=np.bool_))
        codes = np.append(self._codes, candidates.codes[used])
        ranked = np.append(self._ranked, (np.flatnonzero(used) << 32) | parts[used])
        order = np.argsort(codes)
        self._codes, self._ranked = codes[order], ranked[order]
        return parts


def _codes(groups: Integers, blocks: Digests) -> Digests:
    """Return a digest of each block within a group."""
    return blocks + groups.astype(np.uint64) * _STRIDE
