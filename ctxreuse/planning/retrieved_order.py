"""What would be in the engine's cache if everything were sent as it was retrieved: an estimate.

Prompts share a prefix only if they begin with the same block. So all that begin with one block are
followed, or none: the first 256 families, and one in 16 of the others, a sample. They have a share
of the cache that is their share of all tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from itertools import count, islice
from math import inf
from operator import itemgetter
from typing import Final, NamedTuple, TypeAlias

from ctxreuse.context.blocks import BlockKey, encoded
from ctxreuse.context.lru_map import LRUMap, PartSize

MOST_BLOCKS: Final = 50_000
"""Blocks that are remembered, each where it stood; about 300 bytes each."""
_ONE_IN = 16
_WHOLE_FAMILIES = 256
_GROUPS = 32
"""How many groups a sample has; as they differ, so may the sample from all."""
WHOLE = -1
OTHERS = -2
_MOST_OF_A_REQUEST = 256
_MOST_AT_ONCE = 64

_Place: TypeAlias = bytes
"""The place before a block, as a root or 8 bytes for its number, and the block."""


class Front(NamedTuple):
    """What stands before the blocks of a request."""

    tenant: str
    system: str | bytes | None  # what stands for the text
    is_labelled: bool = False

    def root(self) -> bytes:
        """Return 16 bytes for it."""
        tenant, system, is_labelled = encoded(self.tenant), self.system, self.is_labelled
        named = bytes([is_labelled]) + len(tenant).to_bytes(8, "little") + tenant
        if system is not None:
            named += b"\0" + (encoded(system) if isinstance(system, str) else system)
        return hashlib.blake2b(named, digest_size=16).digest()


class RetrievedOrder:
    """Says what would be cached of some requests as retrieved; not locked, its owner does that."""

    def __init__(self, capacity_tokens: int | None = None) -> None:
        self._capacity = inf if capacity_tokens is None else capacity_tokens
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self._blocks = LRUMap[_Place, tuple[int, int]](MOST_BLOCKS, weight_of=itemgetter(1))
        self._numbers = count()
        self._families: set[tuple[Front, BlockKey]] = set()
        self._owed = 0.0
        self._tokens = self._followed_tokens = 0

    @property
    def size(self) -> PartSize:
        """How many blocks are remembered, and may be."""
        return self._blocks.size

    def follow(self, front: Front, blocks: Mapping[BlockKey, int]) -> tuple[int, int]:
        """Return what is cached of a request that is sent now, and for what that stands.

        Returns:
            The tokens; `WHOLE`, the group of the sample, or `OTHERS`, which are not followed.
        """
        first, size = next(iter(blocks), None), sum(blocks.values())
        if first is None:
            return 0, WHOLE
        family = (front, first)
        if len(self._families) < _WHOLE_FAMILIES:
            self._families.add(family)
        group = OTHERS if first[0] % _ONE_IN else first[1] % _GROUPS
        if family in self._families:
            group = WHOLE
        self._tokens += size
        if group == OTHERS:
            return 0, group
        self._followed_tokens += size
        self._make_room()
        found: list[_Place] = []
        new: list[tuple[_Place, tuple[int, int]]] = []
        before, cached = front.root(), 0
        for key, tokens in islice(blocks.items(), _MOST_OF_A_REQUEST):
            place = before + key
            known = None if new else self._blocks.peek(place)
            if known is None:
                known = (next(self._numbers), tokens)
                new.append((place, known))
            else:
                found.append(place)
                cached += tokens
            before = known[0].to_bytes(8, "little")
        # a block is used no later than what stands before it, so that an end is forgotten first
        for place, known in reversed(new):
            self._blocks.put(place, known)
        for place in reversed(found):
            self._blocks.get(place)
        return cached, group

    def evict(self, tokens: int) -> None:
        """Forget as large a share as the engine has dropped, some of it later."""
        self._owed = min(self._owed + tokens * self._share(), float(self._blocks.weight))
        self._make_room()

    def _share(self) -> float:
        """Return the share of all tokens that is followed."""
        return self._followed_tokens / self._tokens if self._tokens else 1.0

    def _make_room(self) -> None:
        limit = self._capacity * self._share()
        for _ in range(_MOST_AT_ONCE):
            if not len(self._blocks) or (self._owed <= 0 and self._blocks.weight <= limit):
                break
            _, (_, tokens) = self._blocks.pop_oldest()
            self._owed = max(0.0, self._owed - tokens)
