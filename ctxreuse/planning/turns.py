"""A turn on its way through a planner: counted, prepared for its tenant's state, sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ctxreuse.context.blocks import BlockKey, ContextBlock, ContextRequest
from ctxreuse.index.radix_tree import root_of
from ctxreuse.index.shown_blocks import History
from ctxreuse.ordering.repeats import Ranks
from ctxreuse.planning.sharing import IndexedContext


class CountedRequest(NamedTuple):
    """A request with what follows from it and the sizes of its blocks.

    `tenant` and `system` are the names of the tenant and of the system text in `IndexNames`;
    `is_labelled` says whether the prompt shows blocks under labels; `digest` is that of a first
    turn's context.
    """

    request: ContextRequest
    tenant: str
    tokens: Mapping[BlockKey, int]
    system: bytes | None
    is_labelled: bool
    context: IndexedContext
    digest: bytes

    @property
    def root(self) -> bytes | None:
        """What its root in the index is named after."""
        return root_of(self.system, self.is_labelled)


class PreparedRequest(NamedTuple):
    """A request with what is known about it before its tenant's state is held.

    The first seven are those of a `CountedRequest`; `shown` holds the blocks to leave out, with
    the labels under which the history shows them, "" for none; `outdated` holds the labels there of
    blocks that no longer hold, as far as this has not been said, and `withdrawn` the words on those
    without a label; `ordinals` are those of the others, in any order.
    """

    request: ContextRequest
    tenant: str
    tokens: Mapping[BlockKey, int]
    system: bytes | None
    is_labelled: bool
    context: IndexedContext
    digest: bytes
    blocks: Mapping[BlockKey, ContextBlock]
    history: History
    shown: Mapping[BlockKey, str]
    outdated: Mapping[str, BlockKey]
    withdrawn: Sequence[str]
    ordinals: Sequence[int]

    @property
    def root(self) -> bytes | None:
        """What its root in the index is named after."""
        return root_of(self.system, self.is_labelled)

    @property
    def weights(self) -> Mapping[BlockKey, int]:
        """The weight of each block, in the retriever's order."""
        return self.context.own

    def order(self, ranks: Ranks) -> list[BlockKey]:
        """Return the blocks of an order."""
        return self.context.order(ranks)


class SentTurn(NamedTuple):
    """What a turn sends.

    Attributes:
        ranks: The ranks of its blocks, in order.
        keys: The blocks.
        named: The blocks as the index names them.
        weights: Their weights.
    """

    ranks: Ranks
    keys: list[BlockKey]
    named: list[BlockKey]
    weights: list[int]

    @classmethod
    def of(cls, turn: PreparedRequest, ranks: Ranks) -> SentTurn:
        """Return what is sent in an order: not the blocks that the history shows."""
        if turn.shown:
            order = zip(ranks, turn.order(ranks), strict=True)
            ranks = tuple([rank for rank, key in order if key not in turn.shown])
        own, names = turn.context
        keys = turn.order(ranks)
        named = keys if names is own else turn.context.named(ranks)
        return cls(ranks, keys, named, [own[key] for key in keys])
