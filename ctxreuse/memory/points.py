"""What a cache keeps of a tenant's prompts up to marks, and which prefixes are worth marking.

A written token costs `1 + premium`, a read one `1 - saving`. What is written now and never read is
lost, so a prefix is written if it is likely to come again, and writing is paid out of what reading
has saved. A policy that nothing limits is followed beside it; once it would have gained several
times what a write costs, a small bound may be paid in advance, as the first few prompts may for one
write. For prompts that are planned one by one:

    bill <= (1 + 1/4,096) * uncached + 2 * premium * longest prompt
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from itertools import accumulate
from typing import NamedTuple

from ctxreuse.context.blocks import BlockKey
from ctxreuse.memory.prefix_index import Inserted, Node, Point, PrefixIndex, Worth
from ctxreuse.memory.sent_log import SentEntry
from ctxreuse.rules.cache_rules import CacheRules

_MOST_SIGHTINGS = 4  # that are told apart
_EXACT = 12  # so many blocks each count apart, longer prefixes by their logarithm
_A_DOUBLING = 4
_LONGEST = 4_096
_MOST_COUNTED = 4_096
_BEFORE_ANY = {1: 0.0}  # a prefix that came once comes again with this probability; unless learnt
_BEFORE_ANY_LATER = 0.4
_WEIGHT_OF_THAT = 3.0
_WEIGHT_OF_ALL = 8.0
_CAUTION = 0.7
_MOST_PRIMES = 4
"""Of a request that arrives, with the place that needs none."""
_PRIMES_A_REQUEST = 0.75
"""Of requests that arrive, at most: towards it, a prime's price rises to the whole one."""
_STEEPNESS = 8
_LEAST_PRICE = 0.08
_LATEST_REQUESTS = 64
A_TOKEN_SEEN = 0.1
"""What a token that came before is worth, though it cannot be read yet."""
_CLOCKS_APART = 30.0
"""Seconds that the clocks of processes that share what they have sent may be apart."""
_CERTAINTY = 4.0
"""How many times a payment in advance must have been gained by the policy that nothing limits."""
_FIRST = 16
"""So many prompts may pay for one write in advance, while nothing is known."""
_WRITES_IN_ADVANCE = 2
"""So many writes of the longest prompt may be paid before as much is saved by reading."""
_FORGIVEN = 1 / 4_096
"""What part of all tokens may be lost beyond that, so that no early loss ends writing for good."""


_LENGTHS = [
    blocks if blocks <= _EXACT else _EXACT + int(_A_DOUBLING * math.log2(blocks / _EXACT))
    for blocks in range(_LONGEST + 1)
]
"""The class of each length in blocks; longer ones are of the last."""


class _Again:
    """How often prefixes came again, by how often they had come and how long they are."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, int], list[float]] = {}

    def note(self, sightings: int, blocks: int, came_again: bool) -> None:
        """Count a prefix that came for the n-th time; or, if it `came_again`, once more."""
        sightings = min(sightings, _MOST_SIGHTINGS)
        for state in ((sightings, _LENGTHS[min(blocks, _LONGEST)]), (sightings, -1)):
            counts = self._counts.setdefault(state, [0.0, 0.0])
            counts[came_again] += 1
            if counts[0] > _MOST_COUNTED:
                counts[:] = counts[0] / 2, counts[1] / 2

    def probability(self, sightings: int, blocks: int, caution: float = _CAUTION) -> float:
        """Return how likely such a prefix comes again, on the careful side."""
        sightings = min(sightings, _MOST_SIGHTINGS)
        trials, hits = self._counts.get((sightings, -1), (0.0, 0.0))
        first = _BEFORE_ANY.get(sightings, _BEFORE_ANY_LATER)
        average = (hits + _WEIGHT_OF_THAT * first) / (trials + _WEIGHT_OF_THAT)
        trials, hits = self._counts.get((sightings, _LENGTHS[min(blocks, _LONGEST)]), (0.0, 0.0))
        number = trials + _WEIGHT_OF_ALL
        again = min((hits + _WEIGHT_OF_ALL * average) / number, 1.0)
        return max(0.0, again - caution * math.sqrt(again * (1 - again) / number))


class WriteLedger:
    """What a tenant's writing has cost and its reading saved, in uncached tokens."""

    def __init__(self, premium: float, saving: float) -> None:
        self._premium = premium
        self._saving = saving
        self.saved = 0.0
        self._gained = 0.0  # by the policy that nothing limits, since it last had lost all it had
        self._prompts = self._sent = self._longest = 0

    def most(self, tokens: int) -> float:
        """Return how many tokens a prompt may write behind what it reads."""
        write = self._premium * max(self._longest, tokens)
        proven = max(self._gained / _CERTAINTY, write if self._prompts < _FIRST else 0.0)
        advance = min(proven, _WRITES_IN_ADVANCE * write + _FORGIVEN * self._sent)
        limit = max(0.0, self.saved + advance)
        return limit / self._premium if self._premium > 0 else float("inf")

    def note(
        self, tokens: int, read: int, written: int, could_read: int = 0, could_write: int = 0
    ) -> None:
        """Count a prompt, and what the policy that nothing limits would have done with it."""
        self._prompts += 1
        self._sent += tokens
        self._longest = max(self._longest, tokens)
        self.saved += self._saving * read - self._premium * written
        gained = self._gained + self._saving * could_read - self._premium * could_write
        self._gained = max(0.0, gained)


class MarkPlace(NamedTuple):
    """A place where a mark may stand."""

    blocks: int  # before it
    tokens: int  # before it, the system text included
    again: float  # the probability that these are wanted again while they live
    price: float = 0.0  # of a prime's call, in tokens


def most_gainful(
    places: Sequence[MarkPlace], read: int, most: int, saving: float, premium: float
) -> tuple[int, ...]:
    """Return the blocks before each mark that gain most by what is expected to be read again."""
    # best[k][i]: the gain with k + 1 marks, the last at place i, and the place before it
    best: list[list[tuple[float, int]]] = []
    top = 0.0
    end: tuple[int, int] | None = None
    for level in range(most):
        row: list[tuple[float, int]] = []
        for number, place in enumerate(places):
            gain = (saving + premium) * place.again - premium
            if level == 0:
                value, before = (place.tokens - read) * gain, -1
            else:
                value, before = -math.inf, -1
                for earlier in range(level - 1, number):
                    sum_ = best[-1][earlier][0] + (place.tokens - places[earlier].tokens) * gain
                    if sum_ > value:
                        value, before = sum_, earlier
            value -= place.price
            row.append((value, before))
            if value > top:
                top, end = value, (level, number)
        best.append(row)
    marks: list[int] = []
    while end is not None:
        level, number = end
        marks.append(places[number].blocks)
        end = (level - 1, best[level][number][1]) if level else None
    return tuple(reversed(marks))


class Looked(NamedTuple):
    """What is known of the prefixes of what is about to be sent; each by the blocks in it."""

    tokens: list[int]  # of the prefix of so many blocks, the system text included
    sightings: list[tuple[int, int]]  # where marks may stand, and how often it came before
    met: int  # how many blocks an earlier prompt began with
    readable: list[int]  # ascending; -1 stands before them
    could: int  # the longest that could be read if nothing limited writing; negative is none


class Points:
    """Which prefixes one tenant's cache keeps, noted at the nodes of its index."""

    def __init__(self, rules: CacheRules) -> None:
        self._rules = rules
        self.most_marks = rules.marks
        self.saving = rules.saving
        self._premium = rules.write_factor - 1
        self._least = rules.least_tokens
        self._lifetime = math.inf if rules.lifetime is None else rules.lifetime
        self._again = _Again()
        self._ledger = WriteLedger(self._premium, rules.saving)
        self._primes_a_request = 0.0  # of the latest requests

    def gain(self, front: int, now: float | None) -> Worth | None:
        """Return what a beginning gains that is read, or written now; None is its weight."""
        if not self.most_marks:
            return None

        def worth(node: Node, matched: int, weight: int, kept: int) -> tuple[float, int]:
            point, tokens = node.point, front + weight
            if point is None or tokens < self._least:
                return -1.0, kept
            # as if nothing limited writing: that orders what will be written once it may be
            if matched == len(node.run) and (
                self._lives(point.until, now) or self._lives(point.could_until, now)
            ):
                kept = tokens
            value = self.saving * kept
            if self._lives(point.seen + self._lifetime, now):
                blocks = point.blocks - len(node.run) + matched
                again = self._again.probability(point.sightings + 1, blocks)
                gain = (self.saving + self._premium) * again - self._premium
                value += max(0.0, (tokens - kept) * gain)
            return value + A_TOKEN_SEEN * tokens, kept

        return worth

    def length(self, now: float | None) -> Worth:
        """Return how long a beginning is that can be read."""

        def worth(node: Node, matched: int, weight: int, kept: int) -> tuple[float, int]:
            point = node.point
            if point is None or matched < len(node.run) or not self._lives(point.until, now):
                return -1.0, 0
            return weight, 0

        return worth

    def look(
        self,
        index: PrefixIndex,
        root: Hashable,
        front: int,
        path: Sequence[BlockKey],
        weights: Sequence[int],
        now: float | None,
    ) -> Looked:
        """Return what is known of the prefixes of a path behind so many tokens."""
        runs, readable, could = list[tuple[int, int, int]](), [-1], -1
        done = -1
        for node, end, is_whole in index.passed(root, path):
            point, came = node.point, 0
            if point is not None:
                if self._lives(point.seen + self._lifetime, now):
                    came = point.sightings
                if is_whole and self._lives(point.until, now):
                    readable.append(end)
                if is_whole and self._lives(point.could_until, now):
                    could = end
            runs.append((done, end, came))
            done = end
        sightings = [
            (blocks, came)
            for start, end, came in (*runs, (done, len(path), 0))
            for blocks in range(start + 1, end + 1)
            if blocks == end
            or _LENGTHS[min(blocks, _LONGEST)] != _LENGTHS[min(blocks + 1, _LONGEST)]
        ]
        met, tokens = max(done, 0), list(accumulate(weights, initial=front))
        return Looked(tokens, sightings, met, readable, could)

    def primes(self, looked: Looked) -> tuple[int, ...]:
        """Return after how many blocks a prime ends that likely saves more than its call costs."""
        read, tokens = max(0, looked.readable[-1]), looked.tokens
        share = (self._primes_a_request / _PRIMES_A_REQUEST) ** _STEEPNESS
        price = self._rules.prime_tokens * max(_LEAST_PRICE, share)
        places = [
            MarkPlace(
                blocks,
                self._rules.readable(tokens[blocks]),
                self._again.probability(came + 1, blocks, caution=0.0),
                0.0 if blocks == looked.met else price,  # there it leaves a state without a prime
            )
            for blocks, came in looked.sightings
            if read < blocks < len(tokens) - 1
        ]
        chosen = most_gainful(places, tokens[read], _MOST_PRIMES, self.saving, self._premium)
        primes = tuple(blocks for blocks in chosen if blocks != looked.met)
        self._primes_a_request += (len(primes) - self._primes_a_request) / _LATEST_REQUESTS
        return primes

    def choose(
        self, looked: Looked, *, is_limited: bool = True
    ) -> tuple[tuple[int, ...], int, int]:
        """Return what a prompt marks, or would if nothing limited writing; reads and writes."""
        end, most = looked.could, math.inf
        if is_limited:
            end, most = looked.readable[-1], self._ledger.most(looked.tokens[-1])
        read = looked.tokens[end] if end >= 0 else 0
        if not self.most_marks:
            return (), read, 0
        places = [
            MarkPlace(blocks, tokens, self._again.probability(came + 1, blocks))
            for blocks, came in looked.sightings
            if read < (tokens := looked.tokens[blocks]) <= read + most and tokens >= self._least
        ]
        marks = most_gainful(places, read, self.most_marks - (read > 0), self.saving, self._premium)
        written = looked.tokens[marks[-1]] - read if marks else 0
        return (end,) * (read > 0) + marks, read, written

    def note(self, index: PrefixIndex, at: Inserted, sent: SentEntry, looked: Looked) -> int:
        """Note what a sent prompt keeps; return after how many blocks it reads, -1 for nothing."""
        marks, now = sent.marks or (), sent.time_s
        primes: Sequence[int] = ()
        if self.most_marks:  # what is read is marked, too
            blocks_read = max({*looked.readable}.intersection(marks), default=-1)
        else:
            blocks_read, primes = looked.readable[-1], marks
            marks = tuple(self._rules.points(marks, at.blocks_before, len(sent.keys)))
        read = looked.tokens[blocks_read] if blocks_read >= 0 else 0
        gained = paid = 0
        could = marks  # a batch knows what is read again: nothing limits it
        if sent.is_alone:
            could, gained, paid = self.choose(looked, is_limited=False)
            for blocks, came in looked.sightings:
                if came:
                    self._again.note(came, blocks, came_again=True)
                self._again.note(came + 1, blocks, came_again=False)
        until = math.inf if now is None else now + self._lifetime
        deepest = read
        for blocks, node in index.nodes_to(at.end, sorted({*marks, *could})):
            point, tokens = node.point, looked.tokens[blocks]
            if point is None:
                node.point = point = Point(blocks)
            if not self._lives(point.seen + self._lifetime, now):
                point.sightings = 0
            point.sightings += 1
            point.seen = math.inf if now is None else now
            if blocks in could and tokens >= self._least:
                point.could_until = max(point.could_until, until)
            if blocks in marks and tokens >= max(read, self._least):
                point.keep(sent.request_id, until)
                deepest = max(deepest, tokens)
        self._ledger.note(looked.tokens[-1], read, deepest - read, gained, paid)
        return max((blocks_read, *primes))  # a prime is sent before its prompt

    def _lives(self, until: float, now: float | None) -> bool:
        """Return whether something that ends at a time has not ended yet."""
        if now is None:
            return until > -math.inf
        return now < until and (until == math.inf or until <= now + self._lifetime + _CLOCKS_APART)
