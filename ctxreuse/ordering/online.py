"""The order of one arriving context (online): what goes in front, and how the rest follows.

The best cached path comes first, if it has more tokens than what is cached in the retriever's order
and words on the ranking. The rest follows by co-occurrence or as retrieved (the papers' way),
whichever has gained more on the tenant's own requests.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial
from operator import itemgetter
from typing import NamedTuple, TypeAlias

import numpy as np

from ctxreuse.context.blocks import BlockKey
from ctxreuse.context.flat_arrays import Objects
from ctxreuse.context.rendering import DEFAULT_TEMPLATES
from ctxreuse.context.tokens import ENGINE_BLOCK_TOKENS
from ctxreuse.index.nodes import NodeTree
from ctxreuse.index.path_search import Match, heaviest_path, sent_prefix
from ctxreuse.index.radix_tree import ContextIndex

_TRIED_AT_LEAST = 32
_TRIED_ALWAYS = 256
_TRIED_LATER = 4
_FORGETTING = 0.998
_TRIAL_NODES = 4_000
_MORE_THAN_ALL = -1  # every bit set, as an integer of any width
_STEPS = 1 << 17
_STEPS_A_BLOCK = 32

LONG_CONTEXT = 64
"""Blocks; the order of a longer context is worked out while its tenant's other requests go on."""


class Continuation(NamedTuple):
    """The order of the blocks behind a cached path."""

    order: list[BlockKey]
    is_cut_short: bool = False  # the work ended at its bound


_Follow: TypeAlias = Callable[[Iterable[BlockKey], Mapping[BlockKey, int]], Continuation]
"""From the blocks in front and the others with their weights to the order of the others."""


class Cooccurrence:
    """Which blocks came together in the last `window` requests of one tenant.

    Each block has a bit set over the window: blocks came together as often as their conjunction has
    ones, at a few dozen nanoseconds whatever their popularity.
    """

    def __init__(self, window: int = 1024, max_entries: int = 500_000) -> None:
        self._window = window
        self._max_entries = max_entries
        self._requests: Objects = np.empty(window, dtype=object)  # the collector looks past it
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

    def continuation(
        self, placed: Iterable[BlockKey], rest: Mapping[BlockKey, int], first_choices: int = 4
    ) -> Continuation:
        """Order the blocks behind `placed`; see the function `continuation`."""
        return continuation(self._members, placed, rest, first_choices)

    def _forget(self, slot: int) -> None:
        members = self._members
        keep = ~(1 << slot)
        blocks: tuple[BlockKey, ...] = self._requests[slot]
        for key in blocks:
            left = members[key] & keep
            if left:
                members[key] = left
            else:
                del members[key]
        self._entries -= len(blocks)
        self._requests[slot] = ()


def continuation(
    members: Mapping[BlockKey, int],
    placed: Iterable[BlockKey],
    rest: Mapping[BlockKey, int],
    first_choices: int = 4,
) -> Continuation:
    """Order the blocks behind `placed` so that later requests find the longest prefix.

    The next block is the one that most often came together with all placed so far. The first
    decides what others can be, so the most frequent few are tried, and the continuation that
    earlier requests could have shared most of, in weight, wins. The work is bounded; the rest stays
    as retrieved.
    """
    together = _MORE_THAN_ALL
    for key in placed:
        together &= members.get(key, 0)
    if not together:
        return Continuation(list(rest))
    known = [
        (both.bit_count(), key, both) for key in rest if (both := together & members.get(key, 0))
    ]
    if not known:
        return Continuation(list(rest))
    known_first = sorted(known, key=itemgetter(0), reverse=True)  # stable: rank breaks ties
    best: list[BlockKey] = []
    best_value = -1
    candidates = [key for _, key, _ in known]
    steps = _STEPS + _STEPS_A_BLOCK * len(rest)
    for total, first, both in known_first[:first_choices]:
        value, order, steps = _greedy(members, first, total, both, candidates, rest, steps)
        if value > best_value:
            best, best_value = order, value
    chosen = set(best)
    return Continuation(best + [key for key in rest if key not in chosen], steps < 0)


def _greedy(
    members: Mapping[BlockKey, int],
    first: BlockKey,
    requests: int,
    together: int,
    candidates: list[BlockKey],
    weights: Mapping[BlockKey, int],
    steps: int,
) -> tuple[int, list[BlockKey], int]:
    """Continue from a first block; return the weight that requests share, the order, steps left."""
    order = [first]
    value = requests * weights[first]
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


class OnlineOrder:
    """Orders the arriving requests of one tenant."""

    def __init__(
        self,
        recent: Cooccurrence,
        words: Callable[[int], int] = DEFAULT_TEMPLATES.order_tokens,
        note_limit: Callable[[str], object] = lambda name: None,
        *,
        keeps_best: bool = False,
    ) -> None:
        self.recent = recent
        self._words = words
        self._note_limit = note_limit
        self._keeps_best = keeps_best
        self._requests = 0
        self._gains = {True: 0.0, False: 0.0}
        self.follows_cooccurrence = True
        self.forget_trials()

    def forget_trials(self) -> None:
        """Empty the index in which continuations are tried; what they gained so far counts on."""
        self._trials = ContextIndex(max_nodes=_TRIAL_NODES)

    @property
    def node_count(self) -> int:
        """How many index nodes the trials hold."""
        return self._trials.node_count

    @property
    def block_count(self) -> int:
        """How many blocks these nodes hold together."""
        return self._trials.block_count

    def first(self, context: Iterable[BlockKey]) -> BlockKey | None:
        """Return the block that a context begins with whatever is cached; None for any."""
        return next(iter(context), None) if self._keeps_best else None

    def order(
        self,
        context: Mapping[BlockKey, int],
        tree: NodeTree,
        root: int,
        least: int = ENGINE_BLOCK_TOKENS,
    ) -> list[BlockKey]:
        """Return a permutation of a context."""
        path = self._cached_path(context, tree, root, least)
        follows = self.follows_cooccurrence and _leads_on(tree, root)
        follow = self.recent.continuation if follows else None
        return _order_behind(path, context, follow, self._note_limit, least, self.first(context))

    def learn(
        self,
        context: Mapping[BlockKey, int],
        system: Hashable,
        least: int = ENGINE_BLOCK_TOKENS,
    ) -> None:
        """Try both continuations on a request, before it counts as a recent one."""
        if not self._is_tried():
            return
        trials = self._trials
        for by_cooccurrence, path in self._trial_paths(context, system, least).items():
            root = trials.root((by_cooccurrence, system))
            follows = by_cooccurrence and _leads_on(trials.tree, root)
            follow = self.recent.continuation if follows else None
            order = _order_behind(
                path, context, follow, self._note_limit, least, self.first(context)
            )
            self._gain(by_cooccurrence, order, context, system)
        self._compare()

    def look_up(
        self,
        context: Mapping[BlockKey, int],
        tree: NodeTree,
        root: int,
        system: Hashable,
        *,
        learns: bool,
        order: list[BlockKey] | None = None,
        least: int = ENGINE_BLOCK_TOKENS,
    ) -> LongContext:
        """Return all that a long context's order depends on, so that the state need not be held."""
        follow = partial(continuation, self.recent.members(context))
        return LongContext(
            context,
            system,
            self._cached_path(context, tree, root, least) if order is None else order,
            follow,
            self.follows_cooccurrence and _leads_on(tree, root),
            self._trial_paths(context, system, least) if learns and self._is_tried() else {},
            self._note_limit,
            least,
            self.first(context),
        )

    def learn_from(self, looked_up: LongContext) -> None:
        """Do what `learn` does with the orders of a long context."""
        for by_cooccurrence, order in looked_up.tried.items():
            self._gain(by_cooccurrence, order, looked_up.context, looked_up.system)
        if looked_up.tried:
            self._compare()

    def _is_tried(self) -> bool:
        """Count a request, and return whether it is one of those that are tried."""
        self._requests += 1
        return self._requests <= _TRIED_ALWAYS or not self._requests % _TRIED_LATER

    def _trial_paths(
        self, context: Mapping[BlockKey, int], system: Hashable, least: int
    ) -> dict[bool, Match | None]:
        trials = self._trials
        return {
            one: self._cached_path(context, trials.tree, trials.root((one, system)), least)
            for one in (True, False)
        }

    def _gain(
        self,
        by_cooccurrence: bool,
        order: list[BlockKey],
        context: Mapping[BlockKey, int],
        system: Hashable,
    ) -> None:
        """Count what a continuation would have gained, and send the request in its trial."""
        weights = [context[key] for key in order]
        root = by_cooccurrence, system
        inserted = self._trials.insert(root, order, weights, None, self._requests)
        gain = sum(weights[: inserted.blocks_before])
        if order != list(context):
            gain -= self._words(len(context))
        self._gains[by_cooccurrence] = _FORGETTING * self._gains[by_cooccurrence] + gain

    def _compare(self) -> None:
        is_ahead = self._gains[True] >= self._gains[False]
        self.follows_cooccurrence = is_ahead or self._requests < _TRIED_AT_LEAST

    def _cached_path(
        self, context: Mapping[BlockKey, int], tree: NodeTree, root: int, least: int
    ) -> Match | None:
        """Return the best cached path; None where it is not worth moving blocks for."""
        match = heaviest_path(tree, root, context, first=self.first(context))
        match.note_limits(self._note_limit)
        words = self._words(len(context))
        return match if is_worth_moving(match, context, tree, root, words, least) else None


def is_worth_moving(
    path: Match,
    context: Mapping[BlockKey, int],
    tree: NodeTree,
    root: int,
    words: int,
    least: int = ENGINE_BLOCK_TOKENS,
) -> bool:
    """Return whether a cached path may come first: none does, or it saves more than words cost."""
    if path.weight < least:
        return True
    retrieved = list(context)
    as_retrieved = sum([context[key] for key in retrieved[: sent_prefix(tree, root, retrieved)]])
    return path.weight - as_retrieved > words


def _leads_on(tree: NodeTree, node: int) -> bool:
    return tree.first_children[node] != 0


def _order_behind(
    path: Match | None,
    context: Mapping[BlockKey, int],
    follow: _Follow | None,
    note_limit: Callable[[str], object],
    least: int,
    first: BlockKey | None,
) -> list[BlockKey]:
    """Return the order that begins with a path, unless it is shorter than an engine block."""
    # of an engine's blocks even the shortest context may be one; a provider keeps nothing as short
    is_never_kept = least > ENGINE_BLOCK_TOKENS and sum(context.values()) < least
    if path is None or is_never_kept:
        return list(context)
    # a shorter path saves nothing and is no reason to move anything
    placed = path.path if path.weight >= least else ()
    if first is not None:
        placed = placed or (first,)
    taken = set(placed)
    rest = {key: weight for key, weight in context.items() if key not in taken}
    if not rest:
        return list(placed)
    if follow is None:
        return [*placed, *rest]
    following = follow(placed, rest)
    if following.is_cut_short:
        note_limit("continuations")
    return [*placed, *following.order]


class LongContext:
    """A long context that is being ordered, with what its tenant's state said about it."""

    def __init__(
        self,
        context: Mapping[BlockKey, int],
        system: Hashable,
        path: Match | list[BlockKey] | None,
        follow: _Follow,
        follows_cooccurrence: bool,
        trials: Mapping[bool, Match | None],
        note_limit: Callable[[str], object],
        least: int = ENGINE_BLOCK_TOKENS,
        first: BlockKey | None = None,
    ) -> None:
        self.context = context
        self.system = system
        self._path = path
        self._follow = follow
        self._follows_cooccurrence = follows_cooccurrence
        self.trials = trials
        self.tried: dict[bool, list[BlockKey]] = {}
        self._note_limit = note_limit
        self._least = least
        self._first = first

    def order(self) -> list[BlockKey]:
        """Return the order, and work out those of the trials; the state need not be held."""
        self.tried = {one: self._behind(path, one) for one, path in self.trials.items()}
        if isinstance(self._path, list):
            return self._path
        return self._behind(self._path, self._follows_cooccurrence)

    def _behind(self, path: Match | None, by_cooccurrence: bool) -> list[BlockKey]:
        follow = self._follow if by_cooccurrence else None
        return _order_behind(path, self.context, follow, self._note_limit, self._least, self._first)
