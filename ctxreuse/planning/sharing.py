"""What planners of one engine tell each other: what each has sent, and in which order."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias, cast

from ctxreuse.context.blocks import BlockKey, encoded, text_digest
from ctxreuse.index.radix_tree import root_of
from ctxreuse.ordering.repeats import Ranks, ranks_of


class Marking(NamedTuple):
    """How a prompt was marked for a cache that keeps only what is marked."""

    marks: tuple[int, ...]  # the blocks before each, ascending
    system_tokens: int
    now: float | None  # seconds on the clock that planners share
    is_alone: bool  # it counts for how likely prefixes come again


class SentEntry(NamedTuple):
    """A context that was sent; conversations' later turns are nobody else's."""

    uid: bytes  # 16 bytes that name the request among those of all planners
    tenant: bytes  # digests, as `system` and `keys`
    system: bytes | None
    keys: tuple[BlockKey, ...]  # as sent
    weights: tuple[int, ...]  # the tokens of each, at least 1
    ranks: tuple[int, ...]  # the place of each as retrieved, from 0
    is_learnt: bool  # continuations were tried on it
    is_labelled: bool = False
    marking: Marking | None = None

    @property
    def root(self) -> bytes | None:
        """What its root in the index is named after."""
        return root_of(self.system, self.is_labelled)

    def as_retrieved(self) -> dict[BlockKey, int]:
        """Return the blocks with their weights in the retriever's order."""
        order = sorted(range(len(self.keys)), key=self.ranks.__getitem__)
        return {self.keys[n]: self.weights[n] for n in order}


class LostEntry(NamedTuple):
    """A request that the engine dropped from its cache, in whole or from a block on."""

    uid: bytes
    tenant: bytes
    blocks: int | None  # still held, from the first on; None is an eviction of the request


class RatioEntry(NamedTuple):
    """How long a tenant's texts are in the engine's tokens, as far as that was learnt."""

    tenant: bytes
    system: bytes | None
    learnt: tuple[float, ...]  # of `TokenRatio`


Entry: TypeAlias = SentEntry | LostEntry
"""What planners tell each other, and a journal holds."""

SavedEntry: TypeAlias = Entry | RatioEntry
"""What a file holds for the process that starts next."""


class Keyed(Protocol):
    """What makes keyed digests."""

    def keyed(self, name: bytes) -> bytes:
        """Return 16 bytes that stand for a name in all planners that share, and nowhere else."""

    def keyed_each(self, names: Iterable[bytes]) -> list[bytes]:
        """Return what `keyed` returns for each name; every plan asks for all its blocks."""


class KeyedDigests:
    """Makes digests that say nothing to who does not have the key."""

    def __init__(self, secret: bytes) -> None:
        # with a key of half a block in front, a block's digest takes one compression
        self._hash = hashlib.blake2s(hashlib.blake2s(secret[:64]).digest(), digest_size=16)

    def keyed(self, name: bytes) -> bytes:
        """Return 16 bytes that stand for a name."""
        return self.keyed_each((name,))[0]

    def keyed_each(self, names: Iterable[bytes]) -> list[bytes]:
        """Return what `keyed` returns for each name."""
        copy, digests = self._hash.copy, []
        for name in names:
            digest = copy()
            digest.update(name)
            digests.append(digest.digest())
        return digests


class Sharing(Keyed, Protocol):
    """What a planner tells others through, and names things by."""

    def own(self, name: bytes) -> bytes:
        """Return 16 bytes that stand for a name of this planner in all that share."""

    def tell(self, entry: Entry) -> None:
        """Tell the others; takes no time, and waits for nobody."""


class IndexedContext(NamedTuple):
    """The weights of a context's blocks, by the names that the index has for them."""

    own: Mapping[BlockKey, int]  # by the blocks' own keys, in the retriever's order
    weights: Mapping[BlockKey, int]

    def ranks(self, order: Sequence[BlockKey]) -> Ranks:
        """Return an order of names as ranks."""
        return ranks_of(order, self.weights)

    def order(self, ranks: Ranks) -> list[BlockKey]:
        """Return the blocks' own keys in an order."""
        keys = list(self.own)
        return [keys[rank] for rank in ranks]

    def named(self, ranks: Ranks) -> list[BlockKey]:
        """Return the blocks' names in an order."""
        names = list(self.weights)
        return [names[rank] for rank in ranks]


class IndexNames:
    """What stands for tenants, system texts and blocks in the index and in shared logs."""

    def __init__(self, keyed: Keyed | None) -> None:
        self._keyed = keyed

    def tenant(self, tenant: str) -> str:
        """Return under which name a tenant's state is kept."""
        if self._keyed is None:
            return tenant
        return self._keyed.keyed(b"tenant" + encoded(tenant)).hex()

    def system(self, system: str | None) -> bytes | None:
        """Return what stands for a system text: the index keeps its roots for long."""
        if system is None:
            return None
        digest = text_digest(system)
        return digest if self._keyed is None else self._keyed.keyed(b"system" + digest)

    def context(self, weights: Mapping[BlockKey, int]) -> IndexedContext:
        """Return the weights of a context's blocks by their names."""
        if self._keyed is None:
            return IndexedContext(weights, weights)
        names = cast(list[BlockKey], self._keyed.keyed_each(weights))
        return IndexedContext(weights, dict(zip(names, weights.values(), strict=True)))

    def renamed(self, tenant: str, entry: SavedEntry) -> SavedEntry:
        """Return an entry of a planner that takes no digests, by these names."""
        keyed = self._keyed
        assert keyed is not None
        digest = bytes.fromhex(self.tenant(tenant))
        if isinstance(entry, LostEntry):
            return entry._replace(tenant=digest)
        system = None if entry.system is None else keyed.keyed(b"system" + entry.system)
        if isinstance(entry, RatioEntry):
            return entry._replace(tenant=digest, system=system)
        keys = cast(list[BlockKey], keyed.keyed_each(entry.keys))
        return entry._replace(tenant=digest, system=system, keys=tuple(keys))
