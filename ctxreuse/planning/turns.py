"""A turn on its way through a planner: counted, and prepared for its tenant's state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ctxreuse.context.blocks import BlockKey, ContextBlock, ContextRequest
from ctxreuse.memory.conversations import History
from ctxreuse.memory.names import IndexedContext, Ranks
from ctxreuse.memory.prefix_index import Root


class CountedRequest(NamedTuple):
    """A request with what follows from it and the sizes of its blocks."""

    request: ContextRequest
    tenant: str  # as `IndexNames` names it; so is `system`
    tokens: Mapping[BlockKey, int]
    system: bytes | None
    is_labelled: bool
    context: IndexedContext
    front_tokens: int  # in front of the blocks; 0 where the cache has no minimum
    root: Root  # what its root in the index is named after


class PreparedRequest(NamedTuple):
    """A request with what is known about it before its tenant's state is held."""

    request: ContextRequest
    tenant: str
    tokens: Mapping[BlockKey, int]
    system: bytes | None
    is_labelled: bool
    context: IndexedContext
    front_tokens: int
    root: Root
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
