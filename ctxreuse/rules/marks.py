"""Which prefixes a prompt marks, or behind which a prime ends where states are kept at junctions.

A written token costs `1 + premium`, a read one `1 - saving`. Among `n` requests that share what a
mark adds, the first pays `premium` more a token, and each other `saving` less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ctxreuse.context.blocks import BlockKey
from ctxreuse.rules.cache_rules import CacheRules

_MOST_LEVELS = 48
"""Forks of a batch's tree above one that may be written; each looks at all written above it."""


@dataclass(slots=True)
class _Fork:
    """A node of a batch's prefix tree: where paths part or end."""

    depth: int  # blocks before its end
    tokens: int
    members: list[int]  # the requests below it, in execution order
    children: list[_Fork]
    ends_first: bool  # whether the first of them ends here


def marks_of_batch(
    sequences: Sequence[list[BlockKey]],
    weights: Sequence[Sequence[int]],
    system_tokens: int,
    written: Sequence[int],
    rules: CacheRules,
) -> list[tuple[int, ...]]:
    """Choose the marks or primes of requests that run one after the other, in depth-first order.

    The first request that has a prefix primes or writes it, as far as it has marks left: dynamic
    programming over the prefix tree, by the last written prefix above a fork and the marks left.
    """
    totals = [list(accumulate(one, initial=system_tokens)) for one in weights]
    marks: list[list[int]] = [[] for _ in sequences]
    groups: dict[tuple[BlockKey, ...] | None, list[int]] = {}
    for position, depth in enumerate(written):
        key = None if depth < 0 else tuple(sequences[position][:depth])
        groups.setdefault(key, []).append(position)
    for key, members in groups.items():
        start = 0 if key is None else len(key)
        read = 0 if key is None else totals[members[0]][start]
        fork = _fork(sequences, totals, members, start)
        if rules.takes_primes:
            _prime(fork, read, rules, marks)
            continue
        for position in () if key is None else members:
            marks[position].append(start)
        # a written beginning is no fork to write, though several requests part there
        _Chosen(rules).mark(fork, read, key is not None, marks)
    return [tuple(sorted(set(one))) for one in marks]


def _fork(
    sequences: Sequence[list[BlockKey]],
    totals: Sequence[Sequence[int]],
    members: list[int],
    depth: int,
    level: int = 0,
) -> _Fork:
    """Return the tree of some requests behind a common beginning, as deep as it is looked at."""
    ends_first = level == _MOST_LEVELS or len(sequences[members[0]]) == depth
    fork = _Fork(depth, totals[members[0]][depth], members, [], ends_first)
    if level == _MOST_LEVELS:
        return fork
    branches: dict[BlockKey, list[int]] = {}
    for position in members:
        if len(sequences[position]) > depth:
            branches.setdefault(sequences[position][depth], []).append(position)
    for branch in branches.values():
        paths = [sequences[position] for position in branch]
        first, last = min(paths), max(paths)  # what these two share, all of them do
        pairs = zip(first, last, strict=False)
        end = next((n for n, (one, other) in enumerate(pairs) if one != other), len(first))
        fork.children.append(_fork(sequences, totals, branch, end, level + 1))
    return fork


def _prime(top: _Fork, read: int, rules: CacheRules, primes: list[list[int]]) -> None:
    """Add the forks below the top one where a prime saves more than its call costs."""
    stack = [(top, read)]
    while stack:
        fork, read = stack.pop()
        added = rules.readable(fork.tokens) - read
        if fork.depth and added > 0 and rules.worth(added, len(fork.members), primed=True) >= 0:
            primes[fork.members[0]].append(fork.depth)
            read += added
        stack += [(child, read) for child in fork.children]


class _Chosen:
    """The best choices below forks, worked out once each."""

    def __init__(self, rules: CacheRules) -> None:
        self._rules = rules
        self._least = rules.least_tokens
        self._known: dict[tuple[int, int, int], tuple[float, bool]] = {}

    def _best(self, fork: _Fork, read: int, left: int) -> tuple[float, bool]:
        """Return the gain at and below a fork, and whether it is written."""
        if len(fork.members) == 1:
            return 0.0, False
        state = id(fork), read, left
        if state in self._known:
            return self._known[state]
        best = self._children(fork, read, left), False
        if left and fork.tokens >= self._least and fork.tokens > read:
            value = self._rules.worth(fork.tokens - read, len(fork.members))
            value += self._children(fork, fork.tokens, left - 1)
            if value > best[0]:
                best = value, True
        self._known[state] = best
        return best

    def _children(self, fork: _Fork, read: int, left: int) -> float:
        return sum(
            self._best(child, read, self._left(fork, number, read, left))[0]
            for number, child in enumerate(fork.children)
        )

    def _left(self, fork: _Fork, number: int, read: int, left: int) -> int:
        """Return the marks left of the first request of a child: the fork's own, or another."""
        return left if number == 0 and not fork.ends_first else self._rules.marks - (read > 0)

    def mark(self, fork: _Fork, read: int, is_written: bool, marks: list[list[int]]) -> None:
        """Add the chosen marks of all requests below the top fork."""
        left = self._rules.marks - (is_written and read > 0)
        # what a request reads, and what it writes as the first
        stack = [(fork, read, fork.depth if is_written else -1, left, is_written)]
        while stack:
            fork, read, depth, left, is_top = stack.pop()
            if not is_top and self._best(fork, read, left)[1]:
                first = fork.members[0]
                marks[first].append(fork.depth)
                for position in fork.members[1:]:
                    if depth >= 0 and marks[position] and marks[position][-1] == depth:
                        marks[position].pop()  # it reads further
                    marks[position].append(fork.depth)
                read, depth, left = fork.tokens, fork.depth, left - 1
            for number, child in enumerate(fork.children):
                below = self._left(fork, number, read, left)
                stack.append((child, read, depth, below, False))
