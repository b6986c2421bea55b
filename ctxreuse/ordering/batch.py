"""Arranging a batch: every context's order, and which request runs when."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ctxreuse.context.blocks import BlockKey, ContextRequest
from ctxreuse.ordering.paper.linkage import paper_orders
from ctxreuse.ordering.schedule import depth_first_order, paper_schedule


@dataclass(frozen=True, slots=True)
class BatchContext:
    """What is arranged of one request.

    Attributes:
        request: The request.
        weights: Block -> weight, in the retriever's order.
        cached: The best path for it that earlier requests left in the cache.
    """

    request: ContextRequest
    weights: Mapping[BlockKey, int]
    cached: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True)
class Arrangement:
    """An arranged batch.

    Attributes:
        orders: For each position in the input the order of its blocks, a permutation of them.
        execution: The positions in the order in which they should run, a permutation.
    """

    orders: list[list[BlockKey]]
    execution: list[int]


def arrange(
    batch: Sequence[BatchContext], strategy: Literal["reuse", "paper"], alpha: float
) -> Arrangement:
    """Order the contexts of a batch and schedule its requests.

    Later turns keep the retriever's order and run behind their conversation's first turn, at the
    end if that is not in the batch. Turns of one conversation keep the order of the input.

    Args:
        batch: The requests, in input order.
        strategy: "reuse" or "paper".
        alpha: Weight of the ranks in the papers' distance.

    Raises:
        BatchTooLargeError: the papers' algorithm cannot hold the batch.
    """
    orders = [list(context.weights) for context in batch]
    # only requests of one tenant and one system text can share a prefix
    groups: dict[tuple[str, str | None], list[int]] = {}
    for position, context in enumerate(batch):
        request = context.request
        if not request.history:
            groups.setdefault((request.tenant, request.system), []).append(position)
    execution: list[int] = []
    by_size = sorted(groups.values(), key=len, reverse=True)
    for group in by_size:
        if strategy == "paper":
            execution += _arrange_paper(batch, group, orders, alpha)
        else:
            execution += _arrange_reuse(batch, group, orders)
    if any(context.request.history is not None for context in batch):
        execution = _with_later_turns([context.request for context in batch], execution)
    return Arrangement(orders, execution)


def _arrange_reuse(
    batch: Sequence[BatchContext], group: list[int], orders: list[list[BlockKey]]
) -> list[int]:
    """Put each context behind its cached path and merge the remainders of those that share one."""
    # numpy comes with it: the first batch pays for that, not the import of this package
    from ctxreuse.ordering.clustering import reuse_orders

    behind: dict[tuple[BlockKey, ...], list[int]] = {}
    for position in group:
        behind.setdefault(batch[position].cached, []).append(position)
    for path, positions in behind.items():
        cached = set(path)
        remainders = [
            [key for key in batch[position].weights if key not in cached] for position in positions
        ]
        numbers: dict[BlockKey, int] = {}
        weights: list[int] = []
        for position, remainder in zip(positions, remainders, strict=True):
            for key in remainder:
                if key not in numbers:
                    numbers[key] = len(numbers)
                    weights.append(batch[position].weights[key])
        keys = list(numbers)
        contexts = [[numbers[key] for key in remainder] for remainder in remainders]
        for position, order in zip(positions, reuse_orders(contexts, weights), strict=True):
            orders[position] = [*path, *(keys[number] for number in order)]
    return [group[i] for i in depth_first_order([orders[position] for position in group])]


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
