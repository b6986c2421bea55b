"""A batch: every context's order, and which request runs when.

Requests run in depth-first order of the prefix tree that they form, so that those that share a
prefix run back to back, and even a small cache keeps it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Literal

from ctxreuse.context.blocks import BlockKey, ContextRequest
from ctxreuse.context.cache_profile import VLLM, CacheProfile
from ctxreuse.context.fork_safety import importing_late
from ctxreuse.context.rendering import DEFAULT_TEMPLATES
from ctxreuse.ordering.paper import paper_orders, paper_schedule

_GRAIN = 64
"""Characters; about one engine block of 16 tokens."""


@dataclass(frozen=True, slots=True)
class BatchContext:
    """What is arranged of one request."""

    request: ContextRequest
    weights: Mapping[BlockKey, int]  # in the retriever's order
    cached: tuple[BlockKey, ...]  # the best path for it in the cache
    is_labelled: bool = False
    system_tokens: int = 0
    first: BlockKey | None = None  # what it begins with, whatever is cached

    @property
    def front(self) -> tuple[BlockKey, ...]:
        """What its prompt begins with, whatever else is in the batch."""
        return self.cached or (() if self.first is None else (self.first,))

    @property
    def front_tokens(self) -> int:
        """The tokens that it shares with others of the same front in any order."""
        return sum([self.weights[key] for key in self.front])


@dataclass(frozen=True, slots=True)
class Arrangement:
    """An arranged batch."""

    orders: list[list[BlockKey]]  # by position in the input, permutations of the blocks
    execution: list[int]  # a permutation of the positions


def arrange(
    batch: Sequence[BatchContext],
    strategy: Literal["reuse", "paper"],
    alpha: float,
    words: Callable[[int], int] = DEFAULT_TEMPLATES.order_tokens,
    cache: CacheProfile = VLLM,
) -> Arrangement:
    """Order the contexts of a batch and schedule its requests.

    Later turns keep the retriever's order and run behind their conversation's first turn, or at the
    end; turns of one conversation keep the order of the input.
    """
    orders = [list(context.weights) for context in batch]
    # only requests of one tenant and one system text, all with labels or none, share a prefix
    groups: dict[tuple[str, str | None, bool], list[int]] = {}
    for position, context in enumerate(batch):
        request = context.request
        if not request.history:
            root = request.tenant, request.system, context.is_labelled
            groups.setdefault(root, []).append(position)
    execution: list[int] = []
    for group in sorted(groups.values(), key=len, reverse=True):
        if strategy == "paper":
            execution += _arrange_paper(batch, group, orders, alpha)
        else:
            assert strategy == "reuse", f"there is no order for {strategy!r} here"
            execution += _arrange_reuse(batch, group, orders, words, cache)
    if any(context.request.history is not None for context in batch):
        execution = _with_later_turns([context.request for context in batch], execution)
    return Arrangement(orders, execution)


def _arrange_reuse(
    batch: Sequence[BatchContext],
    group: list[int],
    orders: list[list[BlockKey]],
    words: Callable[[int], int],
    cache: CacheProfile,
) -> list[int]:
    """Put each context behind its cached path, and merge the remainders of those that share one."""
    # numpy comes with it: the first batch pays for that, not the import of this package
    with importing_late:
        from ctxreuse.ordering.clustering import reuse_orders

    minimum = 0 if cache is VLLM else cache.least_tokens
    behind: dict[tuple[BlockKey, ...], list[int]] = {}
    for position in group:
        behind.setdefault(batch[position].front, []).append(position)
    for path, positions in behind.items():
        weights: dict[BlockKey, int] = {}
        for position in positions:
            for key, weight in batch[position].weights.items():
                weights.setdefault(key, weight)
        for key in path:
            del weights[key]
        keys = list(weights)
        numbers = {key: number for number, key in enumerate(keys)}
        remainders = [
            [numbers[key] for key in batch[position].weights if key in numbers]
            for position in positions
        ]
        first = batch[positions[0]]
        least = minimum - first.system_tokens - sum(map(first.weights.__getitem__, path))
        ordered = reuse_orders(remainders, list(weights.values()), least)
        for position, order in zip(positions, ordered, strict=True):
            orders[position] = [*path, *(keys[number] for number in order)]
    # a request has few marks, and in a small branch the first one has fewer forks to write
    schedule = partial(depth_first_order, largest_first=not cache.has_marks)
    execution = [group[i] for i in schedule([orders[position] for position in group])]
    least = minimum - batch[group[0]].system_tokens - 1
    moved = _moved_for_too_little(batch, execution, orders, words, least)
    if not moved:
        return execution
    for position in moved:
        orders[position] = list(batch[position].weights)
    return [group[i] for i in schedule([orders[position] for position in group])]


def _moved_for_too_little(
    batch: Sequence[BatchContext],
    execution: Sequence[int],
    orders: Sequence[Sequence[BlockKey]],
    words: Callable[[int], int],
    least: int,
) -> list[int]:
    """Return the positions of moved contexts that share no more than the words on it cost."""
    shared = [0] * len(batch)
    # in depth-first order a context shares most with a neighbour
    for one, other in pairwise(execution):
        common = 0
        for key, same in zip(orders[one], orders[other], strict=False):
            if key != same:
                break
            common += batch[one].weights[key]
        shared[one] = max(shared[one], common)
        shared[other] = max(shared[other], common)
    return [
        position
        for position in execution
        if not batch[position].cached
        and shared[position]
        <= max(batch[position].front_tokens + words(len(orders[position])), least)
        and orders[position] != list(batch[position].weights)
    ]


def _arrange_paper(
    batch: Sequence[BatchContext], group: list[int], orders: list[list[BlockKey]], alpha: float
) -> list[int]:
    numbers: dict[BlockKey, int] = {}
    contexts = [
        [numbers.setdefault(key, len(numbers)) for key in batch[position].weights]
        for position in group
    ]
    keys = list(numbers)
    aligned = paper_orders(contexts, alpha)
    for position, order in zip(group, aligned.orders, strict=True):
        orders[position] = [keys[number] for number in order]
    return [group[i] for i in paper_schedule(aligned.search_paths)]


def _with_later_turns(requests: Sequence[ContextRequest], execution: list[int]) -> list[int]:
    """Insert the later turns, and put the turns of each conversation in input order."""
    conversations = [_conversation(request) for request in requests]
    first_turn = {
        conversations[position]: position
        for position in reversed(execution)
        if conversations[position] is not None
    }
    followers: dict[Hashable, list[int]] = {}
    for position, request in enumerate(requests):
        if request.history:
            conversation = conversations[position]
            leader = first_turn.get(conversation, ("not here", conversation))
            followers.setdefault(position if conversation is None else leader, []).append(position)
    order: list[int] = []
    for position in execution:
        order.append(position)
        order += followers.pop(position, [])
    for waiting in followers.values():
        order += waiting

    places: dict[Hashable, list[int]] = {}
    for place, position in enumerate(order):
        if conversations[position] is not None:
            places.setdefault(conversations[position], []).append(place)
    for turns in places.values():
        for place, position in zip(turns, sorted(order[place] for place in turns), strict=True):
            order[place] = position
    return order


def _conversation(request: ContextRequest) -> Hashable | None:
    """Return the conversation whose turns must stay in order, if the request is part of one."""
    if request.conversation_id is None or request.history is None:
        return None
    return (request.tenant, type(request.conversation_id), request.conversation_id)


def depth_first_order(
    sequences: Sequence[Sequence[Hashable]], *, largest_first: bool = True
) -> list[int]:
    """Return the positions of the sequences in depth-first order of their prefix tree.

    At each node sequences that end there come first, then branches by size, then earlier ones.
    """
    order: list[int] = []
    stack: list[tuple[list[int], int]] = [(list(range(len(sequences))), 0)]
    while stack:
        group, depth = stack.pop()
        if len(group) == 1:
            order += group
            continue
        branches: dict[Hashable, list[int]] = {}
        for position in group:
            sequence = sequences[position]
            if len(sequence) > depth:
                branches.setdefault(sequence[depth], []).append(position)
            else:
                order.append(position)
        ordered = sorted(branches.values(), key=len, reverse=largest_first)  # stable
        stack += [(branch, depth + 1) for branch in reversed(ordered)]
    return order


def prefix_order(prompts: Sequence[str]) -> list[int]:
    """Return positions in `depth_first_order` of the prompts' texts."""
    by_text = sorted(range(len(prompts)), key=lambda position: (prompts[position], position))
    open_groups = [_SharedStart(0)]  # of the prompts that share a beginning with the next one
    for number, position in enumerate(by_text):
        text = prompts[position]
        shared = 0
        if number + 1 < len(by_text):
            shared = _shared_grains(text, prompts[by_text[number + 1]])
        done, first, grains = [position], position, len(text) // _GRAIN
        while open_groups[-1].depth > shared:
            group = open_groups.pop()
            group.add(done, first, grains)
            done, first, grains = group.order(), group.first, -1
        if open_groups[-1].depth < shared:
            open_groups.append(_SharedStart(shared))
        open_groups[-1].add(done, first, grains)
    return open_groups[0].order()


def _shared_grains(one: str, other: str) -> int:
    """Return how many grains two prompts share at their beginning."""
    low, high = 0, min(len(one), len(other)) // _GRAIN
    while low < high:
        middle = (low + high + 1) // 2
        start, end = low * _GRAIN, middle * _GRAIN
        if one[start:end] == other[start:end]:
            low = middle
        else:
            high = middle - 1
    return low


class _SharedStart:
    """Prompts that share their first `depth` grains."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.first = sys.maxsize
        self._members: list[tuple[bool, int, int, list[int]]] = []

    def add(self, members: list[int], first: int, grains: int) -> None:
        """Add a single prompt with its length in grains, or an ordered group with -1."""
        is_continued = 0 < self.depth == grains
        self._members.append((not is_continued, -len(members), first, members))
        self.first = min(self.first, first)

    def order(self) -> list[int]:
        order: list[int] = []
        for *_, members in sorted(self._members):
            order += members
        return order
