"""A batch: every context's order, and which request runs when.

Requests run in depth-first order of the prefix tree that they form, so that those that share a
prefix run back to back, and even a small cache keeps it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from ctxreuse.context.blocks import BlockKey, ContextRequest
from ctxreuse.memory.prefix_index import Root
from ctxreuse.policy.view import Arrangement, Policy, View, depth_first_order

_GRAIN = 64
"""Characters; about one engine block of 16 tokens."""


def arrange(
    requests: Sequence[ContextRequest], views: Mapping[int, View], policy: Policy
) -> Arrangement:
    """Order the contexts of a batch and schedule its requests, of which first turns have views.

    Later turns run behind their conversation's first turn, or at the end, in the input's order.
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
    conversations: list[Hashable | None] = [
        None
        if one.conversation_id is None or one.history is None
        else (one.tenant, type(one.conversation_id), one.conversation_id)
        for one in requests
    ]
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
    return in_turn(order, conversations)


def in_turn(order: Sequence[int], groups: Sequence[Hashable | None]) -> list[int]:
    """Return an order in which the members of each group, but None, ascend at their places."""
    ordered, places = list(order), dict[Hashable, list[int]]()
    for place, member in enumerate(order):
        if groups[member] is not None:
            places.setdefault(groups[member], []).append(place)
    for those in places.values():
        for place, member in zip(those, sorted(order[place] for place in those), strict=True):
            ordered[place] = member
    return ordered


class _Grains(Sequence[str]):
    """A prompt as the grains that it shares with others; one shorter than a grain is one."""

    def __init__(self, prompt: str) -> None:
        self._prompt = prompt

    def __len__(self) -> int:
        return max(1, len(self._prompt) // _GRAIN)

    def __getitem__(self, grain: Any) -> Any:
        return self._prompt[grain * _GRAIN : (grain + 1) * _GRAIN]


def prefix_order(prompts: Sequence[str]) -> list[int]:
    """Return positions in `depth_first_order` of the prompts' texts."""
    return depth_first_order([*map(_Grains, prompts)])
