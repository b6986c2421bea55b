"""The order of an arriving context where short prefixes save nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import NamedTuple

from ctxreuse.context.blocks import BlockKey
from ctxreuse.ordering.online import Continuation

_FIRST_CHOICES = 12
_STEPS = 1 << 16
_STEPS_A_BLOCK = 32
_A_SHORT_TOKEN = 1e-3  # what a token of a prefix that is too short is worth, to tell ties


def continuation_from(
    members: Mapping[BlockKey, int],
    placed: Iterable[BlockKey],
    rest: Mapping[BlockKey, int],
    missing: int,
) -> Continuation:
    """Order the blocks behind `placed`; where no earlier request shares enough, as retrieved."""
    together = -1  # every bit set
    for key in placed:
        together &= members.get(key, 0)
    known = [
        (both.bit_count(), key, both) for key in rest if (both := together & members.get(key, 0))
    ]
    known_first = sorted(known, key=itemgetter(0), reverse=True)  # stable: rank breaks ties
    candidates = [key for _, key, _ in known]
    best: list[BlockKey] = []
    most = 0.0
    steps = _STEPS + _STEPS_A_BLOCK * len(rest)
    for _, first, both in known_first[:_FIRST_CHOICES]:
        if steps < 0:
            break
        tried = _greedy(members, first, both, candidates, rest, missing, steps)
        steps = tried.steps
        if tried.value > most and tried.is_long:
            best, most = tried.order, tried.value
    chosen = set(best)
    return Continuation(best + [key for key in rest if key not in chosen], steps < 0)


class _PartialOrder(NamedTuple):
    """An order, what earlier requests could have shared of it, and the steps that are left."""

    order: list[BlockKey]
    value: float
    is_long: bool
    steps: int


def _greedy(
    members: Mapping[BlockKey, int],
    first: BlockKey,
    together: int,
    candidates: list[BlockKey],
    weights: Mapping[BlockKey, int],
    missing: int,
    steps: int,
) -> _PartialOrder:
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
    return _PartialOrder(order, value, depth >= missing, steps)
