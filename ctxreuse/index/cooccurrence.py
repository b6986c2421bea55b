"""Which blocks came together in recent requests.

Each block has a bit set over a window of recent requests, one bit a request, as a Python integer:
how often some blocks came together is the number of ones in the conjunction, a few dozen
nanoseconds whatever the blocks' popularity.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import itemgetter

from ctxreuse.context.blocks import BlockKey

_MORE_THAN_ALL = -1  # every bit set, as an integer of any width


class Cooccurrence:
    """Block sets of the last `window` requests of one tenant.

    Args:
        window: How many requests are remembered.
        max_entries: Bound on the blocks remembered in all of them together.
    """

    def __init__(self, window: int = 1024, max_entries: int = 500_000) -> None:
        self._window = window
        self._max_entries = max_entries
        self._requests: list[tuple[BlockKey, ...]] = [()] * window
        self._next = 0
        self._oldest = 0
        self._entries = 0
        self._members: dict[BlockKey, int] = {}

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
            self._forget(self._oldest % self._window)
            self._oldest += 1

    def continuation(
        self,
        placed: Iterable[BlockKey],
        rest: Mapping[BlockKey, int],
        first_choices: int = 4,
    ) -> list[BlockKey]:
        """Order the blocks behind `placed` so that later requests find the longest prefix.

        The next block is the one that most often came together with *all* blocks placed so far;
        where no earlier request holds them all, the retriever's order stays. Since the first block
        decides what the others can be, the most frequent few are each tried as the first, and the
        continuation that most earlier requests could have shared, in weight, wins.

        Args:
            placed: The blocks in front.
            rest: Block -> weight, in the retriever's order.
            first_choices: How many first blocks are tried.

        Returns:
            The keys of `rest`, in the chosen order.
        """
        together = _MORE_THAN_ALL
        members = self._members
        for key in placed:
            together &= members.get(key, 0)
        if not together:
            return list(rest)
        known = [
            (both.bit_count(), key, both)
            for key in rest
            if (both := together & members.get(key, 0))
        ]
        if not known:
            return list(rest)
        firsts = sorted(known, key=itemgetter(0), reverse=True)[
            :first_choices
        ]  # stable: rank breaks ties
        best: list[BlockKey] = []
        best_value = -1
        candidates = [key for _, key, _ in known]
        for total, first, both in firsts:
            value, order = self._greedy(first, total, both, candidates, rest)
            if value > best_value:
                best, best_value = order, value
        chosen = set(best)
        return best + [key for key in rest if key not in chosen]

    def _greedy(
        self,
        first: BlockKey,
        requests: int,
        together: int,
        candidates: list[BlockKey],
        weights: Mapping[BlockKey, int],
    ) -> tuple[int, list[BlockKey]]:
        """Continue from a first block, `together` being the requests that hold all so far.

        Returns:
            The weight that those earlier requests could have shared, and the order.
        """
        order = [first]
        value = requests * weights[first]
        members = self._members
        left = [key for key in candidates if key != first]
        while left:
            best, best_count, best_both = None, 0, 0
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
                if number > best_count:
                    best, best_count, best_both = key, number, both
            order += everywhere
            value += requests * sum([weights[key] for key in everywhere])
            if best is None:
                break
            order.append(best)
            value += best_count * weights[best]
            following.remove(best)
            left, together, requests = following, best_both, best_count
        return value, order

    def _forget(self, slot: int) -> None:
        members = self._members
        keep = ~(1 << slot)
        for key in self._requests[slot]:
            left = members[key] & keep
            if left:
                members[key] = left
            else:
                del members[key]
        self._entries -= len(self._requests[slot])
        self._requests[slot] = ()
