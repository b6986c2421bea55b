"""A batch: every context's order, and which request runs when.

Requests run in depth-first order of the prefix tree that they form, so that those that share a
prefix run back to back, and even a small cache keeps it.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Mapping, Sequence

from ctxreuse.context.blocks import BlockKey, ContextRequest
from ctxreuse.memory.prefix_index import Root
from ctxreuse.policy.view import Arrangement, Policy, View

_GRAIN = 64
"""Characters; about one engine block of 16 tokens."""


def arrange(
    requests: Sequence[ContextRequest], views: Mapping[int, View], policy: Policy
) -> Arrangement:
    """Order the contexts of a batch and schedule its requests, of which first turns have views.

    Later turns keep the retriever's order and run behind their conversation's first turn, or at the
    end; turns of one conversation keep the order of the input.
    """
    orders: list[list[BlockKey]] = [[] for _ in requests]
    # only requests of one tenant and one system text, all with labels or none, share a prefix
    groups: dict[tuple[str, Root], list[int]] = {}
    for position, view in views.items():
        groups.setdefault((requests[position].tenant, view.root), []).append(position)
    execution: list[int] = []
    for group in sorted(groups.values(), key=len, reverse=True):
        arranged = policy.arrange([views[position] for position in group])
        for position, order in zip(group, arranged.orders, strict=True):
            orders[position] = order
        execution += [group[i] for i in arranged.execution]
    if policy.keeps_schedule:
        execution = list(range(len(requests)))
    elif any(request.history is not None for request in requests):
        execution = _with_later_turns(requests, execution)
    return Arrangement(orders, execution)


def _with_later_turns(requests: Sequence[ContextRequest], execution: list[int]) -> list[int]:
    """Insert the later turns, and put the turns of each conversation in input order."""
    conversations = [_conversation(request) for request in requests]
    place_of: dict[Hashable, int] = {}  # where a conversation's first turn runs
    keys: dict[int, tuple[int, bool, int]] = {}
    for place, position in enumerate(execution):
        keys[position] = place, False, position
        if conversations[position] is not None:
            place_of.setdefault(conversations[position], place)
    for position, request in enumerate(requests):
        if request.history:
            conversation = conversations[position]
            name = position if conversation is None else conversation
            place = place_of.setdefault(name, len(requests) + position)  # at the end
            keys[position] = place, True, position
    order = sorted(keys, key=keys.__getitem__)

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
