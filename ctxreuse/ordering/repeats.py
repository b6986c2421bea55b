"""Exact repeats: a context that comes again as it was retrieved before keeps its order."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from ctxreuse.context.blocks import BlockKey
from ctxreuse.context.lru_map import LRUMap

Ranks: TypeAlias = tuple[int, ...]
"""An order: the place of each of its blocks as they were retrieved, from 0."""

_MAX_BLOCKS = 100_000
_DIGEST_BYTES = 16


def context_digest(system: bytes | None, blocks: Iterable[BlockKey]) -> bytes:
    """Return 16 bytes that stand for a context as it was retrieved."""
    root = b"\0" if system is None else b"\1" + system
    return hashlib.blake2b(root + b"".join(blocks), digest_size=_DIGEST_BYTES).digest()


def ranks_of(order: Sequence[BlockKey], retrieved: Iterable[BlockKey]) -> Ranks:
    """Return the ranks of the blocks of an order."""
    rank = {key: place for place, key in enumerate(retrieved)}
    return tuple([rank[key] for key in order])


class SentOrders:
    """In which order each context of one tenant was sent last, least recently sent first."""

    def __init__(self, max_blocks: int = _MAX_BLOCKS) -> None:
        self._orders = LRUMap[bytes, Ranks](max_weight=max_blocks, weight_of=_weight, is_plain=True)

    @property
    def size(self) -> int:
        """The blocks of all contexts together; one that was sent as retrieved counts once."""
        return self._orders.weight

    def forget_oldest(self) -> None:
        """Forget the context that was sent least recently; there must be one."""
        self._orders.pop_oldest()

    def order(self, context: bytes, retrieved: Iterable[BlockKey]) -> list[BlockKey] | None:
        """Return the order in which a context was sent last; None if it is not known."""
        ranks = self._orders.peek(context)
        if ranks is None:
            return None
        keys = list(retrieved)
        return [keys[rank] for rank in ranks] if ranks else keys

    def note(self, context: bytes, ranks: Ranks) -> None:
        """Note that a context is sent."""
        if len(ranks) > 1:
            self._orders.put(context, _shortened(ranks))

    def note_others(self, context: bytes, ranks: Ranks) -> None:
        """Note that another planner has sent a context."""
        if len(ranks) > 1:
            known = self._orders.peek(context)
            new = _shortened(ranks)
            self._orders.put(context, new if known is None else min(known, new))


def _shortened(ranks: Ranks) -> Ranks:
    return () if ranks == tuple(range(len(ranks))) else ranks


def _weight(ranks: Ranks) -> int:
    return len(ranks) or 1
