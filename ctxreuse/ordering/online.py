"""The order of one arriving context (online): what goes in front, and how the rest follows."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from operator import itemgetter

from ctxreuse.context.blocks import BlockKey
from ctxreuse.context.tokens import ENGINE_BLOCK_TOKENS
from ctxreuse.index.path_search import heaviest_path
from ctxreuse.index.radix_tree import ContextIndex, Node

_TRIED_AT_LEAST = 32
_TRIED_ALWAYS = 256
_TRIED_LATER = 4
_FORGETTING = 0.998
_TRIAL_NODES = 2_000
_MORE_THAN_ALL = -1  # every bit set, as an integer of any width
_STEPS = 1 << 17
_STEPS_A_BLOCK = 32


class Cooccurrence:
    """Which blocks came together in the last `window` requests of one tenant.

    Each block has a bit set over the window, one bit a request, as a Python integer: how often some
    blocks came together is the number of ones in the conjunction, a few dozen nanoseconds whatever
    the blocks' popularity.

    Args:
        window: How many requests are remembered.
        max_entries: Bound on the blocks remembered in all of them together.

    Attributes:
        cut_short: How many continuations ended at the bound on their work.
    """

    def __init__(self, window: int = 1024, max_entries: int = 500_000) -> None:
        self._window = window
        self._max_entries = max_entries
        self._requests: list[tuple[BlockKey, ...]] = [()] * window
        self._next = 0
        self._oldest = 0
        self._entries = 0
        self._members: dict[BlockKey, int] = {}
        self.cut_short = 0

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

        The work is bounded: 131,072 blocks are looked at, and 32 for each block of `rest`. What is
        then still to be placed keeps the retriever's order, and `cut_short` counts it.

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
        known_first = sorted(known, key=itemgetter(0), reverse=True)  # stable: rank breaks ties
        best: list[BlockKey] = []
        best_value = -1
        candidates = [key for _, key, _ in known]
        steps = _STEPS + _STEPS_A_BLOCK * len(rest)
        for total, first, both in known_first[:first_choices]:
            value, order, steps = self._greedy(first, total, both, candidates, rest, steps)
            if value > best_value:
                best, best_value = order, value
        self.cut_short += steps < 0
        chosen = set(best)
        return best + [key for key in rest if key not in chosen]

    def _greedy(
        self,
        first: BlockKey,
        requests: int,
        together: int,
        candidates: list[BlockKey],
        weights: Mapping[BlockKey, int],
        steps: int,
    ) -> tuple[int, list[BlockKey], int]:
        """Continue from a first block, `together` being the requests that hold all so far.

        Returns:
            The weight that those earlier requests could have shared, the order, and how many of
            `steps`, the blocks that may be looked at, are left; below 0 says that it was cut short.
        """
        order = [first]
        value = requests * weights[first]
        members = self._members
        left = [key for key in candidates if key != first]
        while left and steps >= 0:
            steps -= len(left)
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
        return value, order, steps

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


class OnlineOrder:
    """Orders the arriving requests of one tenant.

    The best cached path comes first. The papers append the remaining blocks as retrieved; but their
    order is what later requests can share, and mostly more is shared if they follow by
    co-occurrence. Not always: where similar questions get the same first blocks, the retriever's
    order is as good and needs no annotation. So both are tried on the tenant's own requests, each
    in a small index of its own. What a continuation would have found cached, less what its
    annotations would have cost, is its gain; the one that is ahead orders the next request.

    Every request is tried at first, then every fourth, which is cheaper; the two stay comparable,
    since both see the same requests.

    Args:
        recent: The tenant's recent requests.

    Attributes:
        recent: The tenant's recent requests; the caller adds each that is sent.
        follows_cooccurrence: Whether co-occurrence, rather than the retriever, orders what stands
            behind a cached path.
        node_count: How many index nodes the trials hold.
        block_count: How many blocks these nodes hold together.
    """

    def __init__(self, recent: Cooccurrence) -> None:
        self.recent = recent
        self._requests = 0
        self._gains = {True: 0.0, False: 0.0}
        self.follows_cooccurrence = True
        self._cut_short = 0
        self.forget_trials()

    def forget_trials(self) -> None:
        """Empty the indexes in which continuations are tried; what they gained so far counts on."""
        self._trials = {
            True: ContextIndex(max_nodes=_TRIAL_NODES),
            False: ContextIndex(max_nodes=_TRIAL_NODES),
        }
        self.node_count = self.block_count = 0

    @property
    def cut_short(self) -> int:
        """How many searches and continuations ended at the bound on their work."""
        return self._cut_short + self.recent.cut_short

    def order(self, context: Mapping[BlockKey, int], root: Node) -> list[BlockKey]:
        """Order a context.

        Args:
            context: Block -> weight (tokens, at least 1), in the retriever's order.
            root: The root of the request's system text in the tenant's context index.

        Returns:
            A permutation of the context's keys.
        """
        return self._arrange(context, root, self.follows_cooccurrence)[1]

    def learn(self, context: Mapping[BlockKey, int], system: Hashable) -> None:
        """Try both continuations on a request, before it counts as a recent one."""
        self._requests += 1
        if self._requests > _TRIED_ALWAYS and self._requests % _TRIED_LATER:
            return
        annotation = 20 + 6 * len(context)  # about its tokens: some words, and a label a block
        for by_cooccurrence, trial in self._trials.items():
            root = trial.root(system)
            cached, order = self._arrange(context, root, by_cooccurrence)
            gain = cached if order == list(context) else cached - annotation
            self._gains[by_cooccurrence] = _FORGETTING * self._gains[by_cooccurrence] + gain
            weights = [context[key] for key in order]
            trial.insert(root, order, weights, self._requests, self._requests)
        one, other = self._trials.values()
        self.node_count = one.node_count + other.node_count
        self.block_count = one.block_count + other.block_count
        is_ahead = self._gains[True] >= self._gains[False]
        self.follows_cooccurrence = is_ahead or self._requests < _TRIED_AT_LEAST

    def _arrange(
        self, context: Mapping[BlockKey, int], root: Node, by_cooccurrence: bool
    ) -> tuple[int, list[BlockKey]]:
        """Return the weight of the best cached path, and the order.

        The order begins with that path unless the path is shorter than an engine block.
        """
        match = heaviest_path(root, context)
        self._cut_short += match.is_cut_short
        # a shorter path saves nothing and is no reason to move anything
        placed = match.path if match.weight >= ENGINE_BLOCK_TOKENS else ()
        taken = set(placed)
        rest = {key: weight for key, weight in context.items() if key not in taken}
        if not rest:
            return match.weight, list(placed)
        following = self.recent.continuation(placed, rest) if by_cooccurrence else rest
        return match.weight, [*placed, *following]
