"""A turn on its way through a planner: counted, prepared for its tenant's state, sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ctxreuse.context.blocks import BlockKey, ContextBlock, ContextRequest
from ctxreuse.memory.conversations import History
from ctxreuse.memory.names import IndexedContext, Ranks


class CountedRequest(NamedTuple):
    """A request with what follows from it and the sizes of its blocks."""

    request: ContextRequest
    tenant: str  # as `IndexNames` names it; so is `system`
    tokens: Mapping[BlockKey, int]
    system: bytes | None
    is_labelled: bool
    context: IndexedContext
    front_tokens: int  # in front of the blocks; 0 where the cache has no minimum
    root: bytes | None  # what its root in the index is named after


class PreparedRequest(NamedTuple):
    """A request with what is known about it before its tenant's state is held."""

    request: ContextRequest
    tenant: str
    tokens: Mapping[BlockKey, int]
    system: bytes | None
    is_labelled: bool
    context: IndexedContext
    front_tokens: int
    root: bytes | None
    blocks: Mapping[BlockKey, ContextBlock]
    history: History
    shown: Mapping[BlockKey, str]  # blocks to leave out, with their labels there, or ""
    outdated: Mapping[str, BlockKey]  # labels of what no longer holds, and is not yet said
    withdrawn: Sequence[str]  # words on those without a label
    ordinals: Sequence[int]  # of the others

    @property
    def weights(self) -> Mapping[BlockKey, int]:
        """The weight of each block, in the retriever's order."""
        return self.context.own

    def order(self, ranks: Ranks) -> list[BlockKey]:
        """Return the blocks of an order."""
        return self.context.order(ranks)


class SentTurn(NamedTuple):
    """What a turn sends."""

    ranks: Ranks
    keys: list[BlockKey]
    named: list[BlockKey]
    weights: list[int]

    @classmethod
    def of(cls, turn: PreparedRequest, ranks: Ranks) -> SentTurn:
        """Return what is sent in an order: not the blocks that the history shows."""
        (own, names), shown = turn.context, turn.shown
        retrieved = list(own)
        if shown:
            ranks = tuple([rank for rank in ranks if retrieved[rank] not in shown])
        keys = [retrieved[rank] for rank in ranks]
        named = keys if names is own else turn.context.named(ranks)
        return cls(ranks, keys, named, [own[key] for key in keys])
