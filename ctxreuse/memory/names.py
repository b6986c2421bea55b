"""What stands for tenants, system texts and blocks in the index, in files and in shared logs."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeAlias, cast

from ctxreuse.context.blocks import BlockKey, encoded, text_digest
from ctxreuse.memory.prefix_index import RequestId
from ctxreuse.memory.sent_log import EditEntry, Entry, LostEntry, ToldEntry

Ranks: TypeAlias = tuple[int, ...]
"""An order: the place of each of its blocks as they were retrieved, from 0."""


class KeyedDigests:
    """Makes digests that say nothing to who does not have the key."""

    def __init__(self, secret: bytes) -> None:
        # with a key of half a block in front, a block's digest takes one compression
        self._hash = hashlib.blake2s(hashlib.blake2s(secret[:64]).digest(), digest_size=16)

    def keyed(self, name: bytes) -> bytes:
        """Return 16 bytes that stand for a name in all planners that share, and nowhere else."""
        return self.keyed_each((name,))[0]

    def keyed_each(self, names: Iterable[bytes]) -> list[bytes]:
        """Return what `keyed` returns for each name; every plan asks for all its blocks."""
        copy, digests = self._hash.copy, []
        for name in names:
            digest = copy()
            digest.update(name)
            digests.append(digest.digest())
        return digests


class Sharing(KeyedDigests, ABC):
    """What a planner tells others through, and names things by."""

    @abstractmethod
    def tell(self, entry: ToldEntry) -> None:
        """Tell the others; takes no time, and waits for nobody."""

    @abstractmethod
    def tell_own(self, entry: Entry) -> None:
        """Tell the others of a request, under the name that it has in all planners that share."""


class IndexNames:
    """What stands for tenants, system texts and blocks in the index and in shared logs."""

    def __init__(self, keyed: KeyedDigests | None) -> None:
        self._keyed = keyed

    def tenant(self, tenant: str) -> str:
        """Return under which name a tenant's state is kept."""
        if self._keyed is None:
            return tenant
        return self._keyed.keyed(b"tenant" + encoded(tenant)).hex()

    def message(self, digest: bytes) -> bytes:
        """Return what stands for the digest of a message."""
        return digest if self._keyed is None else self._keyed.keyed(b"message" + digest)

    def sealed(self, message: bytes, text: bytes) -> bytes:
        """Return a text as only those with the key can read it, and from that the text again."""
        if self._keyed is None:
            return text
        blocks = range(-(-len(text) // 16))
        pad = self._keyed.keyed_each([b"seal%d " % n + message + b"%d" % len(text) for n in blocks])
        whole = int.from_bytes(text) ^ int.from_bytes(b"".join(pad)[: len(text)])
        return whole.to_bytes(len(text))

    def system(self, system: str | None) -> bytes | None:
        """Return what stands for a system text: the index keeps its roots for long."""
        if system is None:
            return None
        digest = text_digest(system)
        return digest if self._keyed is None else self._keyed.keyed(b"system" + digest)

    def weights(self, weights: Mapping[BlockKey, int]) -> dict[BlockKey, int]:
        """Return the weights of blocks by their names."""
        assert self._keyed is not None, "without a key they have their own"
        names = cast(list[BlockKey], self._keyed.keyed_each(weights))
        return dict(zip(names, weights.values(), strict=True))

    def uid(self, tenant: str, request_id: RequestId, begun_behind: bytes) -> bytes:
        """Return 16 bytes that name a request in a file; ids are counted anew in each process."""
        if isinstance(request_id, bytes):
            return request_id
        named = request_name(tenant, request_id)
        return hashlib.blake2b(named, digest_size=16, key=begun_behind).digest()

    def renamed(self, entry: ToldEntry) -> ToldEntry:
        """Return an entry of a planner that takes no digests, by these names."""
        keyed = self._keyed
        assert keyed is not None
        tenant = self.tenant(entry.tenant)
        if isinstance(entry, LostEntry):
            return entry._replace(tenant=tenant)
        if isinstance(entry, EditEntry):
            message = self.message(entry.request_id)
            return EditEntry(message, tenant, self.sealed(message, entry.edit))
        assert not isinstance(entry.system, str)
        system = None if entry.system is None else keyed.keyed(b"system" + entry.system)
        keys = cast(list[BlockKey], keyed.keyed_each(entry.keys))
        return replace(entry, tenant=tenant, system=system, keys=tuple(keys))


def named_by(entry: Entry, uid: bytes) -> Entry:
    """Return an entry with a name of its request that is the same in any process."""
    if isinstance(entry, LostEntry):
        return entry._replace(request_id=uid)
    return replace(entry, request_id=uid, ids=())


def request_name(tenant: str, request_id: str | int) -> bytes:
    """Return a name of a request that no other one of this planner has."""
    # an integer may have more digits than Python writes in decimal
    shown = f"{request_id:x}" if isinstance(request_id, int) else request_id
    return encoded(f"{tenant} {type(request_id).__name__} {shown}")
