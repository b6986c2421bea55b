"""The order that this package sends: `strategy="reuse"`.

One context that arrives: the path that is worth most in front comes first. Behind it stands what
most often came together with all blocks placed so far, since that is what later requests can share;
the retriever's order where nothing did. A batch: contexts are merged bottom-up by what they share,
and run depth first. Nothing moves unless that saves more tokens than the words on it cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

from ctxreuse.context.blocks import BlockKey
from ctxreuse.context.fork_safety import importing_late
from ctxreuse.memory.prefix_index import common_blocks
from ctxreuse.policy.view import Arrangement, Policy, View, depth_first_order

_MORE_THAN_ALL = -1  # every bit set, as an integer of any width
_FIRST_CHOICES = 10
_SEEN_OFTEN = 2  # requests that hold a block with all before it; or one in so many of these:
_ONE_IN = 5
_A_SHORT_TOKEN = 1e-3  # what a token of a prefix that is too short is worth, to tell ties
_STEPS = 1 << 17
_STEPS_A_BLOCK = 32


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

    That is the chain which earlier requests could have shared for most tokens, counted from
    `missing` tokens on. What too few requests share stays as retrieved.
    """
    together = _MORE_THAN_ALL
    for key in placed:
        together &= members.get(key, 0)
    known = [
        (both.bit_count(), key, both) for key in rest if (both := together & members.get(key, 0))
    ]
    known.sort(key=itemgetter(0), reverse=True)  # stable: rank breaks ties
    all_together = together.bit_count() if together > 0 else 0
    is_frequent = known and (
        known[0][0] >= _SEEN_OFTEN or 0 < all_together <= _ONE_IN * known[0][0]
    )
    if not known or not (is_frequent or missing):  # where much is missing, length is the evidence
        return Continuation(list(rest))
    candidates = [key for _, key, _ in known]
    best, most, tokens = [], 0.0, 0
    steps = _STEPS + _STEPS_A_BLOCK * len(rest)
    for _, first, both in known[:_FIRST_CHOICES]:
        if steps < 0:
            break
        order, value, depth, steps = _chain(members, first, both, candidates, rest, missing, steps)
        if value > most and depth >= missing:
            best, most, tokens = order, value, depth
    chosen = set(best)
    return Continuation([*best, *(key for key in rest if key not in chosen)], tokens, steps < 0)


def _chain(
    members: Mapping[BlockKey, int],
    first: BlockKey,
    together: int,  # the requests that hold all so far
    candidates: list[BlockKey],
    weights: Mapping[BlockKey, int],
    missing: int,
    steps: int,
) -> tuple[list[BlockKey], float, int, int]:
    """Continue from a block with what most requests hold; return order, value, tokens and steps."""
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
    return order, value, depth, steps


class Reuse(Policy):
    """What is cached in front, then what is likely to come again together."""

    name = "reuse"

    def order(self, view: View) -> Sequence[BlockKey]:
        """Return the order of a context that arrives."""
        retrieved, weights = list(view.weights), view.weights
        if view.is_too_short:
            return retrieved
        path, gain = view.beginning()
        is_moved = list(path) != retrieved[: len(path)]
        if is_moved and gain <= view.words:
            return retrieved
        missing = 0 if path else view.missing  # of a beginning that is too short to be kept
        if missing and view.sent_prefix(retrieved):
            return retrieved  # it begins as another did, so they may come to be kept together
        if not path and view.first is not None:
            path, missing = (view.first,), max(0, missing - weights[view.first])
        placed = set(path)
        rest = {key: weight for key, weight in weights.items() if key not in placed}
        members = view.members() if rest else {}
        if not members:
            return [*path, *rest]
        following = continuation(members, path, rest, missing)
        if following.is_cut_short:
            view.note_limit("continuations")
        if not is_moved and following.tokens <= view.words:
            return retrieved
        return [*path, *following.order]

    def arrange(self, views: Sequence[View]) -> Arrangement:
        """Put each context behind its cached path, and merge the remainders that share one."""
        # numpy comes with it: the first batch pays for that, not the import of this package
        with importing_late:
            from ctxreuse.policy.clustering import reuse_orders

        cached = [view.readable() for view in views]
        fronts = [
            path or (() if view.first is None else (view.first,))
            for view, path in zip(views, cached, strict=True)
        ]
        orders = [list(view.weights) for view in views]
        behind: dict[tuple[BlockKey, ...], list[int]] = {}
        for position, front in enumerate(fronts):
            behind.setdefault(front, []).append(position)
        for path, positions in behind.items():
            weights: dict[BlockKey, int] = {}
            for position in positions:
                for key, weight in views[position].weights.items():
                    weights.setdefault(key, weight)
            for key in path:
                del weights[key]
            keys = list(weights)
            numbers = {key: number for number, key in enumerate(keys)}
            remainders = [
                [numbers[key] for key in views[position].weights if key in numbers]
                for position in positions
            ]
            first = views[positions[0]]
            least = first.missing - sum(map(first.weights.__getitem__, path))
            ordered = reuse_orders(remainders, list(weights.values()), least)
            for position, order in zip(positions, ordered, strict=True):
                orders[position] = [*path, *(keys[number] for number in order)]
        # a request has few marks, and in a small branch the first one has fewer forks to write
        schedule = partial(depth_first_order, largest_first=not views[0].rules.marks)
        execution = schedule(orders)
        moved = _moved_for_too_little(views, cached, fronts, execution, orders)
        if moved:
            for position in moved:
                orders[position] = list(views[position].weights)
            execution = schedule(orders)
        return Arrangement(orders, execution)


def _moved_for_too_little(
    views: Sequence[View],
    cached: Sequence[Sequence[BlockKey]],
    fronts: Sequence[Sequence[BlockKey]],
    execution: Sequence[int],
    orders: Sequence[Sequence[BlockKey]],
) -> list[int]:
    shared = [0] * len(views)
    # in depth-first order a context shares most with a neighbour
    for one, other in pairwise(execution):
        blocks = common_blocks(orders[one], orders[other])
        common = sum([views[one].weights[key] for key in orders[one][:blocks]])
        shared[one] = max(shared[one], common)
        shared[other] = max(shared[other], common)
    moved = []
    for position in execution:
        view, front = views[position], fronts[position]
        # what stands in front is shared in any order
        worth = max(sum([view.weights[key] for key in front]) + view.words, view.missing - 1)
        is_moved = orders[position] != list(view.weights)
        if is_moved and not cached[position] and shared[position] <= worth:
            moved.append(position)
    return moved


REUSE = Reuse()
