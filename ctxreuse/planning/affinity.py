"""Ids by which caches and routers keep requests of one prefix group in one place."""

from __future__ import annotations

import hashlib
from math import ceil

from ctxreuse.context.blocks import encoded
from ctxreuse.context.fork_safety import ForkSafeLock
from ctxreuse.context.lru_map import LRUMap

_MINUTE_S = 60.0
_MOST_GROUPS = 10_000


def keyed_digest(key: str, *parts: str) -> str:
    """Return 32 hexadecimal digits that stand for texts; without the key nobody can tell them."""
    secret = hashlib.blake2b(encoded(key), digest_size=32).digest()
    digest = hashlib.blake2b(key=secret, digest_size=16)
    for part in parts:
        piece = encoded(part)
        digest.update(len(piece).to_bytes(8, "big") + piece)
    return digest.hexdigest()


def affinity_id(shard: tuple[str, ...], key: str) -> str:
    """Return the id of a prefix group, and of its shard if it is asked for too often."""
    return keyed_digest(key, "group", *shard)


class GroupRates:
    """Counts the requests a minute of each prefix group; threads may share it."""

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._lock = ForkSafeLock(self._forget)
        self._forget()

    def _forget(self) -> None:
        self._groups: LRUMap[tuple[str, ...], tuple[float, int, int]] = LRUMap(_MOST_GROUPS)

    def shards(self, group: tuple[str, ...], now: float) -> int:
        """Count a request; return into how many shards its group is divided: a power of two."""
        with self._lock:
            began, count, before = self._groups.get(group) or (now, 0, 0)
            if not began <= now < began + _MINUTE_S:
                is_next = began <= now < began + 2 * _MINUTE_S
                began, count, before = now, 0, count if is_next else 0
            self._groups.put(group, (began, count + 1, before))
        needed = ceil(max(count + 1, before) / self._rate)
        return 1 << (needed - 1).bit_length()
