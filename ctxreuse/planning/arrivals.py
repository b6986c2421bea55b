"""Requests that arrive where a cache keeps marked prefixes only: their order and their marks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ctxreuse.context.blocks import BlockKey
from ctxreuse.ordering.marked_order import continuation_from
from ctxreuse.ordering.marks import MarkPrices, marks_of_batch
from ctxreuse.ordering.online import LONG_CONTEXT
from ctxreuse.ordering.written_prefixes import Beginning
from ctxreuse.planning.tenant_state import TenantState


@dataclass(frozen=True, slots=True)
class ArrivingContext:
    """An arriving context with what its tenant's state says about it."""

    context: Mapping[BlockKey, int]
    beginning: Beginning
    members: Mapping[BlockKey, int]
    missing: int
    words: int
    note_limit: Callable[[str], object]
    first: BlockKey | None = None

    def order(self) -> list[BlockKey]:
        """Return the order: what gains most in front, then what may be wanted with it."""
        path = self.beginning.path
        retrieved = list(self.context)
        if path and self.beginning.gain <= self.words and list(path) != retrieved[: len(path)]:
            return retrieved
        missing = 0 if path else self.missing
        if not path and self.first is not None:
            path, missing = (self.first,), max(0, missing - self.context[self.first])
        placed = set(path)
        rest = {key: weight for key, weight in self.context.items() if key not in placed}
        if not self.members or not rest:
            return [*path, *rest]
        if sum(rest.values()) < missing:
            return retrieved  # it is too short to be kept, whatever the order
        following = continuation_from(self.members, path, rest, missing)
        if following.is_cut_short:
            self.note_limit("continuations")
        return [*path, *following.order]


def arrive(
    state: TenantState,
    root: bytes | None,
    context: Mapping[BlockKey, int],
    system_tokens: int,
    prices: MarkPrices,
    now: float | None,
    words: int,
    note_limit: Callable[[str], object],
    *,
    learns: bool,
) -> ArrivingContext:
    """Look up what decides the order of an arriving context, in a state that is held."""
    assert state.prefixes is not None, "only with marks"
    first = state.online.first(context)
    beginning = state.prefixes.beginning(root, context, now, first)
    members: Mapping[BlockKey, int] = {}
    index = state.index
    # as in `OnlineOrder`: behind a text that nothing was sent with, nothing can be shared
    if state.online.follows_cooccurrence and index.tree.first_children[index.root(root)]:
        members = state.online.recent.members(context)
    if learns and len(context) <= LONG_CONTEXT:
        state.online.learn(context, root)
    missing = max(0, prices.minimum - system_tokens)
    return ArrivingContext(context, beginning, members, missing, words, note_limit, first)


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
