"""The order of one arriving context (online): what goes in front, and how the rest follows.

The path of most weight that is cached comes first. Behind it stands what most often came together
with all blocks placed so far, since that is what later requests can share; the retriever's order
where nothing did. Nothing moves unless that saves more tokens than the words on it cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from ctxreuse.context.blocks import BlockKey

_MORE_THAN_ALL = -1  # every bit set, as an integer of any width
_FIRST_CHOICES = 8
_SEEN_OFTEN = 2  # requests that hold a block with all before it; or one in so many of these:
_ONE_IN = 5
_A_SHORT_TOKEN = 1e-3  # what a token of a prefix that is too short is worth, to tell ties
_STEPS = 1 << 17
_STEPS_A_BLOCK = 32


class Cooccurrence:
    """Which blocks came together in the last `window` requests of one tenant."""

    def __init__(self, window: int = 1024, max_entries: int = 500_000) -> None:
        self._window = window
        self._max_entries = max_entries
        self._requests: list[tuple[BlockKey, ...]] = [()] * window
        self._next = 0
        self._oldest = 0
        self._entries = 0
        self._members: dict[BlockKey, int] = {}  # the requests that hold a block, as a bit set

    def add(self, context: Iterable[BlockKey]) -> None:
        """Remember a request, and forget the oldest where the bounds ask for it."""
        slot = self._next % self._window
        if self._requests[slot]:
            self._forget(slot)
        blocks = tuple(context)
        bit = 1 << slot
        members = self._members
        for key in blocks:
            members[key] = members.get(key, 0) | bit
        self._requests[slot] = blocks
        self._entries += len(blocks)
        self._next += 1
        self._oldest = max(self._oldest, self._next - self._window)
        while self._entries > self._max_entries and self._oldest < self._next:
            self.forget_oldest()

    @property
    def entries(self) -> int:
        """How many blocks are remembered, all requests together."""
        return self._entries

    def forget_oldest(self) -> None:
        """Forget the oldest request, if there is one."""
        if self._oldest < self._next:
            self._forget(self._oldest % self._window)
            self._oldest += 1

    def members(self, blocks: Iterable[BlockKey]) -> dict[BlockKey, int]:
        """Return the bit sets of those blocks that are remembered, as they are now."""
        members = self._members
        return {key: members[key] for key in blocks if key in members}

    def _forget(self, slot: int) -> None:
        members = self._members
        keep = ~(1 << slot)
        blocks = self._requests[slot]
        for key in blocks:
            left = members[key] & keep
            if left:
                members[key] = left
            else:
                del members[key]
        self._entries -= len(blocks)
        self._requests[slot] = ()


class Continuation(NamedTuple):
    """The order of the blocks behind a cached path."""

    order: list[BlockKey]
    tokens: int = 0  # of those that came together before
    is_cut_short: bool = False


def continuation(
    members: Mapping[BlockKey, int],
    placed: Iterable[BlockKey],
    rest: Mapping[BlockKey, int],
    missing: int = 0,
) -> Continuation:
    """Order the blocks behind `placed` so that later requests find the longest prefix.

    Of several first blocks the one is taken whose chain the earlier requests could have shared for
    most tokens, counted from `missing` tokens on. What too few requests share stays as retrieved.
    """
    together = _MORE_THAN_ALL
    for key in placed:
        together &= members.get(key, 0)
    known = [
        (both.bit_count(), key, both) for key in rest if (both := together & members.get(key, 0))
    ]
    known.sort(key=itemgetter(0), reverse=True)  # stable: rank breaks ties
    all_together = together.bit_count() if together > 0 else 0
    if not known or not (known[0][0] >= _SEEN_OFTEN or 0 < all_together <= _ONE_IN * known[0][0]):
        return Continuation(list(rest))
    candidates = [key for _, key, _ in known]
    best, most, tokens = [], 0.0, 0
    steps = _STEPS + _STEPS_A_BLOCK * len(rest)
    for _, first, both in known[:_FIRST_CHOICES]:
        if steps < 0:
            break
        tried = _chain(members, first, both, candidates, rest, missing, steps)
        steps = tried.steps
        if tried.value > most and tried.tokens >= missing:
            best, most, tokens = tried.order, tried.value, tried.tokens
    chosen = set(best)
    return Continuation([*best, *(key for key in rest if key not in chosen)], tokens, steps < 0)


class _Chain(NamedTuple):
    """Blocks in order, what earlier requests could have shared of them, and the steps left."""

    order: list[BlockKey]
    value: float
    tokens: int
    steps: int


def _chain(
    members: Mapping[BlockKey, int],
    first: BlockKey,
    together: int,  # the requests that hold all so far
    candidates: list[BlockKey],
    weights: Mapping[BlockKey, int],
    missing: int,
    steps: int,
) -> _Chain:
    """Continue from a first block with what most of the requests hold that hold all so far."""
    order: list[BlockKey] = []
    value, depth = 0.0, 0
    chosen, requests = [first], together.bit_count()
    left = [key for key in candidates if key != first]
    while True:
        for key in chosen:
            weight = weights[key]
            before, depth = depth, depth + weight
            if depth < missing:
                value += requests * weight * _A_SHORT_TOKEN
            else:
                value += requests * (weight if before >= missing else depth)
        order += chosen
        if not left or steps < 0:
            break
        steps -= len(left)
        best, most, best_both = None, 0, 0
        following: list[BlockKey] = []
        everywhere: list[BlockKey] = []
        for key in left:
            both = together & members[key]
            if not both:
                continue
            if both == together:
                everywhere.append(key)
                continue
            following.append(key)
            number = both.bit_count()
            if number > most:
                best, most, best_both = key, number, both
        left, chosen = following, everywhere
        if everywhere:
            continue
        if best is None:
            break
        left.remove(best)
        chosen, together, requests = [best], best_both, most
    return _Chain(order, value, depth, steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """An arriving context with what its tenant's state says about it.

    Attributes:
        context: The weight of each block, in the retriever's order.
        path: The blocks that may come first: cached, or worth to be written.
        gain: What they save in front, as tokens, beyond what the retriever's order saves.
        members: Which recent requests hold which blocks, one bit a request; empty where nothing
            can be shared.
        missing: Tokens that a common beginning still needs to be kept at all.
        words: Tokens of the words on an order that differs from the retriever's.
        first: The block that stands in front whatever is cached; None for any.
        note_limit: Is told where the work ended at its bound.
    """

    context: Mapping[BlockKey, int]
    path: tuple[BlockKey, ...]
    gain: float
    members: Mapping[BlockKey, int]
    missing: int
    words: int
    first: BlockKey | None
    note_limit: Callable[[str], object]

    def order(self) -> list[BlockKey]:
        """Return the order; the tenant's state need not be held."""
        retrieved, path, missing = list(self.context), self.path, self.missing
        is_moved = list(path) != retrieved[: len(path)]
        if is_moved and self.gain <= self.words:
            return retrieved
        if path:
            missing = 0
        elif self.first is not None:
            path, missing = (self.first,), max(0, missing - self.context[self.first])
        placed = set(path)
        rest = {key: weight for key, weight in self.context.items() if key not in placed}
        if not rest or not self.members:
            return [*path, *rest]
        if sum(rest.values()) < missing:
            return retrieved  # it is too short to be kept, whatever the order
        following = continuation(self.members, path, rest, missing)
        if following.is_cut_short:
            self.note_limit("continuations")
        if not is_moved and following.tokens <= self.words:
            return retrieved
        return [*path, *following.order]
