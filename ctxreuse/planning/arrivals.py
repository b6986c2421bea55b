"""What a tenant's state says of a context that arrives, and the marks of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ctxreuse.context.blocks import BlockKey
from ctxreuse.context.tokens import ENGINE_BLOCK_TOKENS
from ctxreuse.memory.prefix_index import SearchBudget
from ctxreuse.ordering.marks import MarkPrices, marks_of_batch
from ctxreuse.ordering.online import Arrival
from ctxreuse.planning.tenant_state import TenantState


def arrive(
    state: TenantState,  # held
    root: bytes | None,
    context: Mapping[BlockKey, int],
    *,
    least: int,  # tokens that a common beginning needs to save anything
    now: float | None,
    words: int,
    note_limit: Callable[[str], object],
    budget: SearchBudget | None = None,
) -> Arrival:
    """Look up what decides the order of an arriving context."""
    first = next(iter(context), None) if state.keeps_best else None
    if state.prefixes is None:
        match = state.index.search(root, context, budget, first)
        match.note_limits(note_limit)
        path, gain = match.path if match.weight >= least else (), float(match.weight)
        if path:
            retrieved = list(context)
            sent = retrieved[: state.index.sent_prefix(root, retrieved)]
            gain -= sum(map(context.__getitem__, sent))
    else:
        path, gain = state.prefixes.beginning(root, context, now, first)
    is_shared = state.index.leads_on(root)  # behind a new text nothing can be
    return Arrival(
        context=context,
        path=path,
        gain=gain,
        members=state.recent.members(context) if is_shared else {},
        missing=least if least > ENGINE_BLOCK_TOKENS else 0,
        words=words,
        first=first,
        note_limit=note_limit,
    )


class Sent(NamedTuple):
    """The blocks of a request in the order in which they are sent, and their tokens."""

    keys: Sequence[BlockKey]
    weights: Sequence[int]


def marks_together(
    sent: Sequence[Sent], readable: Sequence[int], system_tokens: int, prices: MarkPrices
) -> list[tuple[int, ...]]:
    """Return the marks of requests behind one system text that are known together."""
    keys, weights = [one.keys for one in sent], [one.weights for one in sent]
    return marks_of_batch(keys, weights, system_tokens, readable, prices)
