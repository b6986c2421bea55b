"""What would be in the engine's cache if everything were sent as it was retrieved: an estimate.

Prompts share a prefix only if they begin with the same block. So all that begin with one block are
followed, or none: the first 256 families, and one in 16 of the others, a sample. They have a share
of the cache that is their share of all tokens.
"""

from __future__ import annotations

from itertools import count
from math import inf
from typing import Final

from ctxreuse.context.blocks import BlockKey, text_digest
from ctxreuse.context.lru_map import PartSize
from ctxreuse.memory.prefix_index import PrefixIndex
from ctxreuse.memory.sent_log import SentEntry

MOST_BLOCKS: Final = 50_000
"""Blocks that are remembered, each where it stood."""
_MOST_NODES = 10_000
_ONE_IN = 16
_WHOLE_FAMILIES = 256
_GROUPS = 32
"""How many groups a sample has; as they differ, so may the sample from all."""
WHOLE = -1
OTHERS = -2
_MOST_OF_A_REQUEST = 256
_MOST_AT_ONCE = 64


class RetrievedOrder:
    """Says what would be cached of some requests as retrieved; not locked, its owner does that."""

    def __init__(self, capacity_tokens: int | None = None) -> None:
        self._capacity = inf if capacity_tokens is None else capacity_tokens
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self._index = PrefixIndex(max_nodes=_MOST_NODES)
        self._times = count()
        self._families: set[tuple[object, BlockKey]] = set()
        self._owed = 0.0
        self._tokens = self._followed_tokens = 0

    @property
    def size(self) -> PartSize:
        """How many blocks are remembered, and may be."""
        return PartSize(self._index.block_count, MOST_BLOCKS)

    def follow(self, entry: SentEntry) -> tuple[int, int]:
        """Return what is cached of a request sent now, and its group; `OTHERS` are not followed."""
        blocks = entry.as_retrieved()
        path, weights = list(blocks), list(blocks.values())
        if not path:
            return 0, WHOLE
        first, size = path[0], sum(weights)
        root = text_digest(entry.tenant), entry.system, entry.is_labelled
        if len(self._families) < _WHOLE_FAMILIES:
            self._families.add((root, first))
        group = OTHERS if first[0] % _ONE_IN else first[1] % _GROUPS
        if (root, first) in self._families:
            group = WHOLE
        self._tokens += size
        if group == OTHERS:
            return 0, group
        self._followed_tokens += size
        self._make_room()
        followed = path[:_MOST_OF_A_REQUEST], weights[:_MOST_OF_A_REQUEST]
        inserted = self._index.insert(root, *followed, None, next(self._times))
        return sum(weights[: inserted.blocks_before]), group

    def evict(self, tokens: int) -> None:
        """Forget as large a share as the engine has dropped, some of it later."""
        self._owed = min(self._owed + tokens * self._share(), float(self._index.tokens))
        self._make_room()

    def _share(self) -> float:
        """Return the share of all tokens that is followed."""
        return self._followed_tokens / self._tokens if self._tokens else 1.0

    def _make_room(self) -> None:
        index, limit = self._index, self._capacity * self._share()
        for _ in range(_MOST_AT_ONCE):
            excess = max(self._owed, index.tokens - limit)
            if excess <= 0 and index.block_count <= MOST_BLOCKS:
                break
            self._owed = max(0.0, self._owed - index.evict_oldest(max(excess, 1)))
