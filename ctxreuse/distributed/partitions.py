"""Cutting a batch that no single process plans into partitions, so that little sharing is lost.

A request goes with those that hold its heaviest shared block: that saves most tokens if all its n
requests begin with it, its own * (n - 1). Groups larger than a partition are cut again; parts are
joined while they fit, those first that have most in common. All is counted on digests, 16 bytes for
each block of a request. Nothing depends on the order of the requests.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ctxreuse.context.blocks import ContextRequest, encoded
from ctxreuse.memory.sent_log import MOST_BLOCK_TOKENS

Digests: TypeAlias = npt.NDArray[np.uint64]
Integers: TypeAlias = npt.NDArray[np.int64]
Booleans: TypeAlias = npt.NDArray[np.bool_]

_BYTES = 8


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

    def names(self) -> Digests:
        """Return what requests go by: later turns by their conversation."""
        go_together = self.are_later & (self.conversations != 0)
        return np.where(go_together, self.conversations, self.digests)


def contexts_of(requests: Sequence[ContextRequest], count_tokens: Callable[[str], int]) -> Contexts:
    """Return what decides where requests go, without any text."""
    names = {(one.tenant, one.system): 0 for one in requests}
    for tenant, system in names:
        names[tenant, system] = _digest((tenant, "" if system is None else f"system {system}"))
    weights: dict[bytes, int] = {}
    blocks: list[bytes] = []
    for request in requests:
        for key, block in request.unique_blocks.items():
            if key not in weights:
                tokens = count_tokens(block.text) if block.tokens is None else block.tokens
                weights[key] = min(max(tokens, 1), MOST_BLOCK_TOKENS)
            blocks.append(key)
    return Contexts(
        scopes=_array(names[one.tenant, one.system] for one in requests),
        digests=_array(_distinct(map(request_digest, requests))),
        conversations=_array(map(conversation_digest, requests)),
        are_later=np.array([bool(one.history) for one in requests], dtype=np.bool_),
        lengths=np.array([len(one.unique_blocks) for one in requests], dtype=np.int64),
        blocks=_array(int.from_bytes(key[:_BYTES], "little") for key in blocks),
        weights=np.array([weights[key] for key in blocks], dtype=np.int64),
    )


def joined_contexts(many: Iterable[Contexts]) -> Contexts:
    """Return contexts of several batches as one."""
    parts = [contexts_of([], len), *many]
    columns = ([getattr(one, column.name) for one in parts] for column in fields(Contexts))
    return Contexts(*map(np.concatenate, columns))


def reproducible_order(requests: Sequence[ContextRequest]) -> list[int]:
    """Return positions in an order that does not depend on that of the requests."""
    digests = [request_digest(request) for request in requests]

    def key(position: int) -> tuple[int, int, int]:
        request, digest = requests[position], digests[position]
        conversation = conversation_digest(request)  # its turns stand together, in order
        return conversation or digest, len(request.history or ()), digest

    return sorted(range(len(requests)), key=key)


def request_digest(request: ContextRequest) -> int:
    """Return 64 bits that stand for what is planned of a request."""
    history = [str(message.get("content")) for message in request.history or ()]
    return _digest(
        (
            request.tenant,
            repr(request.system is None),
            request.system or "",
            request.query,
            repr(type(request.request_id)),
            str(request.request_id),
            *history,
        ),
        (block.key for block in request.blocks),
    )


def conversation_digest(request: ContextRequest) -> int:
    """Return 64 bits that stand for the conversation whose turns stay in order; 0 for none."""
    if request.history is None or request.conversation_id is None:
        return 0
    kind = type(request.conversation_id).__name__
    return _digest((request.tenant, kind, str(request.conversation_id))) or 1


def _digest(texts: Iterable[str], keys: Iterable[bytes] = ()) -> int:
    hashed = hashlib.blake2b(digest_size=_BYTES)
    for text in texts:
        data = encoded(text)
        hashed.update(len(data).to_bytes(_BYTES, "little"))
        hashed.update(data)
    for key in keys:
        hashed.update(key)
    return int.from_bytes(hashed.digest(), "little")


def _distinct(digests: Iterable[int]) -> list[int]:
    """Return digests of which equal ones differ, so that equal requests can be spread."""
    seen: Counter[Hashable] = Counter()
    found = []
    for digest in digests:
        found.append(_digest((f"{digest} {seen[digest]}",)) if seen[digest] else digest)
        seen[digest] += 1
    return found


def _array(digests: Iterable[int]) -> Digests:
    return np.fromiter(digests, dtype=np.uint64)


_MOST_LEVELS = 16
_NEIGHBOURS = 3
_STRIDE = np.uint64(0x9E3779B97F4A7C15)
_NONE = -1
"""What stands for no position."""


@dataclass(frozen=True, slots=True)
class Partitioning:
    """Where each request of a large batch goes."""

    count: int  # partitions are numbered from 0, small ones last
    _names: Digests  # of all requests, sorted
    _partitions: Integers

    def of(self, contexts: Contexts) -> Integers:
        """Return the partition of each request."""
        return self._partitions[np.searchsorted(self._names[1:], contexts.names(), "right")]


def partition(contexts: Contexts, most: int) -> Partitioning:
    """Cut requests into partitions of at most `most`; conversations and repeats stay whole."""
    named = contexts.conversations != 0
    begun = contexts.conversations[named & ~contexts.are_later]
    follow = named & contexts.are_later & np.isin(contexts.conversations, begun)
    names, numbers = np.unique(contexts.conversations, return_inverse=True)
    turns = np.bincount(numbers[follow], minlength=len(names))[numbers[~follow]]
    groups = _Groups(contexts.where(~follow), turns)
    pairs: list[Integers] = []
    tried = 0
    for _ in range(_MOST_LEVELS):
        large = groups.sizes > most
        large[:tried] = False
        if not large.any():
            break
        tried = len(large)
        pairs.append(groups.cut(large))
    bounds = groups.bounds(most)
    count, first = _numbered(groups, _joined(groups.sizes, pairs, most), bounds, most)
    return _found(count, groups.requests, groups.spread(first, bounds))


def _found(count: int, leading: Contexts, partitions: Integers) -> Partitioning:
    """Return where all requests go: later turns where the first one does, of several the lowest."""
    order = np.argsort(partitions, kind="stable")
    begin = order[(~leading.are_later & (leading.conversations != 0))[order]]
    names = np.append(leading.names()[order], leading.conversations[begin])
    names, chosen = np.unique(names, return_index=True)
    return Partitioning(count, names, np.append(partitions[order], partitions[begin])[chosen])


class _Groups:
    """A tree of groups of requests that follow no other one; the roots are the scopes."""

    def __init__(self, leading: Contexts, later_turns: Integers) -> None:
        # of a stray later turn only its name counts
        are_first = ~leading.are_later
        held = np.repeat(are_first, leading.lengths)
        self.requests = replace(
            leading,
            lengths=np.where(are_first, leading.lengths, 0),
            blocks=leading.blocks[held],
            weights=leading.weights[held],
        )
        self._turns = 1 + np.where(are_first, later_turns, 0)  # that go where a request goes
        names, self.group_of = np.unique(leading.scopes, return_inverse=True)
        """The smallest group of each request."""
        self.scopes = self.parents = np.arange(len(names))
        self.sizes = _summed(self.group_of, self._turns, len(names))

    def cut(self, large: Booleans) -> Integers:
        """Cut groups by the blocks that are heaviest within them.

        Return pairs of parts, and the tokens of a block that a request of one shares with another.
        """
        members = np.flatnonzero(large[self.group_of])
        contexts, groups = self.requests.where(large[self.group_of]), self.group_of[members]
        rows = np.repeat(np.arange(len(members)), contexts.lengths)
        ranks, owners = self._ranked(contexts, groups[rows])
        heaviest = _largest_first(rows, ranks, len(members))
        first = np.append(ranks, _NONE)[heaviest[:, 0]]
        has = first != _NONE
        # a part for each block that names one, and one for the rest of each group that is cut
        named = np.unique(first[has])
        left = np.intersect1d(owners[named], groups[~has])
        parts, rest = np.full(len(owners), _NONE), np.arange(len(self.sizes))
        parts[named] = len(rest) + np.arange(len(named))
        rest[left] = len(rest) + len(named) + np.arange(len(left))
        self.group_of[members] = np.where(has, np.append(parts, _NONE)[first], rest[groups])
        self._grow(np.append(owners[named], left))
        pairs = []
        for block in heaviest.T[1:]:
            both = np.flatnonzero(block != _NONE)
            others = parts[ranks[block[both]]]
            both, others = both[others != _NONE], others[others != _NONE]
            pairs.append((parts[first[both]], others, contexts.weights[block[both]]))
        return np.concatenate(pairs, axis=1)

    def _ranked(self, contexts: Contexts, owners: Integers) -> tuple[Integers, Integers]:
        """Rank the blocks that several, and at most half, of a group's requests hold, by weight.

        Return the rank of each block, and of each rank the group.
        """
        codes = contexts.blocks + owners.astype(np.uint64) * _STRIDE
        _, one, code_of, holders = np.unique(
            codes, return_index=True, return_inverse=True, return_counts=True
        )
        tokens = np.zeros(len(one), dtype=np.int64)
        np.maximum.at(tokens, code_of, contexts.weights)
        owners, blocks = owners[one], contexts.blocks[one]
        members = _summed(self.group_of, ~self.requests.are_later, len(self.sizes))
        wanted = np.flatnonzero((holders > 1) & (2 * holders <= members[owners]))
        saved = (tokens * (holders - 1))[wanted]
        ordered = wanted[np.lexsort((blocks[wanted], owners[wanted], saved))]
        ranks = np.full(len(one), _NONE)
        ranks[ordered] = np.arange(len(ordered))
        return ranks[code_of], owners[ordered]

    def _grow(self, parents: Integers) -> None:
        """Add the parts of groups, whose requests have moved there."""
        sizes = _summed(self.group_of, self._turns, len(self.sizes) + len(parents))
        self.sizes = np.append(self.sizes, sizes[len(self.sizes) :])
        self.parents = np.append(self.parents, parents)
        self.scopes = np.append(self.scopes, self.scopes[parents])

    def bounds(self, most: int) -> dict[int, Digests]:
        """Spread the leaves that no block cuts over several partitions, by name.

        Return the smallest name in each but the first of them.
        """
        bounds = {}
        leaves = np.unique(self.group_of)
        for leaf in leaves[self.sizes[leaves] > most].tolist():
            here = self.group_of == leaf
            names = self.requests.names()[here]
            order = np.argsort(names, kind="stable")
            names, ends = names[order], np.cumsum(self._turns[here][order])
            total = int(ends[-1])
            share = math.ceil(total / math.ceil(total / most))
            starts = np.unique(
                names[np.searchsorted(ends, np.arange(share, total, share), "right")]
            )
            bounds[leaf] = starts[starts > names[0]]
        return bounds

    def spread(self, first: Integers, bounds: Mapping[int, Digests]) -> Integers:
        """Return the partition of each request, of leaves that begin in the `first` ones."""
        partitions = first[self.group_of]
        for leaf, smallest in bounds.items():
            here = self.group_of == leaf
            partitions[here] += np.searchsorted(smallest, self.requests.names()[here], "right")
        return partitions


def _summed(groups: Integers, numbers: Integers | Booleans, count: int) -> Integers:
    return np.bincount(groups, numbers, count).astype(np.int64)


def _largest_first(rows: Integers, values: Integers, height: int) -> Integers:
    """Return the positions of the largest values of each row, the largest first, -1 behind them."""
    order = np.lexsort((-values, rows))
    starts = np.searchsorted(rows, np.arange(height))
    column = np.arange(len(rows)) - starts[rows]
    wanted = (column <= _NEIGHBOURS) & (values[order] >= 0)
    found = np.full((height, 1 + _NEIGHBOURS), _NONE)
    found[rows[wanted], column[wanted]] = order[wanted]
    return found


def _joined(sizes: Integers, pairs: Iterable[Integers], most: int) -> Integers:
    """Join groups while they fit into one partition, those first that have most in common."""
    leader = list(range(len(sizes)))
    size = sizes.tolist()

    def leader_of(group: int) -> int:
        while leader[group] != group:
            leader[group] = group = leader[leader[group]]
        return group

    for ones, others, tokens in pairs:
        # what each shares with the other counts, whichever of the two is named first
        codes = np.minimum(ones, others) * len(size) + np.maximum(ones, others)
        codes, pair_of = np.unique(codes, return_inverse=True)
        common = _summed(pair_of, tokens, len(codes))
        for code in codes[np.argsort(-common, kind="stable")].tolist():
            one, other = map(leader_of, divmod(code, len(size)))
            if one != other and size[one] + size[other] <= most:
                leader[other] = one
                size[one] += size[other]
    return np.array([leader_of(group) for group in range(len(size))], dtype=np.int64)


def _numbered(
    groups: _Groups, leaders: Integers, bounds: Mapping[int, Digests], most: int
) -> tuple[int, Integers]:
    """Return how many partitions there are, and each leaf's, or the first of several."""
    leaves = np.unique(groups.group_of)
    sizes = _summed(leaders[leaves], groups.sizes[leaves], len(leaders))
    together: dict[int, list[int]] = {}
    for leader in np.unique(leaders[leaves]).tolist():
        together.setdefault(int(groups.scopes[leader]), []).append(leader)
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
            min((groups.parents[one], one) for one in members),
        )
    )
    first = np.full(len(leaders), _NONE)
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
