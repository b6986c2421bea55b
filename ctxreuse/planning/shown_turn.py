"""A turn on its way through a planner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ctxreuse.context.blocks import BlockKey, ContextBlock, ContextRequest
from ctxreuse.memory.conversations import EMPTY_HISTORY, History
from ctxreuse.memory.prefix_index import Root


class PreparedRequest(NamedTuple):
    """A request with the sizes of its blocks and, of an open turn, what its history shows."""

    request: ContextRequest
    tenant: str  # as `IndexNames` names it
    tokens: Mapping[BlockKey, int]
    weights: Mapping[BlockKey, int]  # at least 1 each, in the retriever's order
    named: Mapping[BlockKey, int]  # the same, by the names that the index has for the blocks
    front_tokens: int  # in front of the blocks; 0 where the cache has no minimum
    root: Root  # what its root in the index is named after; whether it shows labels
    blocks: Mapping[BlockKey, ContextBlock]
    history: History = EMPTY_HISTORY
    shown: Mapping[BlockKey, str] = {}  # blocks to leave out, with their labels there, or ""
    outdated: Sequence[str] = ()  # labels of what no longer holds, and is not yet said
    withdrawn: Sequence[str] = ()  # words on those without a label
