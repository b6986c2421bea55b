"""Maps of bounded size that forget the least recently used, and bounds that tenants share."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, NamedTuple, TypeVar

from ctxreuse.context.blocks import id_size

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
Name = TypeVar("Name", str, tuple[int, str])


class PartSize(NamedTuple):
    """How large a part of what is remembered is."""

    entries: int  # a long id counts once for every 64 characters
    bound: int


def _count_one(value: object) -> int:
    return 1


class LRUMap(Generic[Key, Value]):
    """Keys and values, the least recently used first; not locked, its owner does that.

    The newest entry stays, however heavy it is. A value always has the same weight.
    """

    __slots__ = ("_entries", "_max_entries", "_max_weight", "_weight_of", "weight")

    def __init__(
        self,
        max_entries: float = math.inf,
        *,
        max_weight: float = math.inf,
        weight_of: Callable[[Value], int] = _count_one,
    ) -> None:
        self._entries: OrderedDict[Key, Value] = OrderedDict()
        self._max_entries = max_entries
        self._max_weight = max_weight
        self._weight_of = weight_of
        self.weight = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[Key]:
        return iter(self._entries)

    def values(self) -> Iterator[Value]:
        """Yield the values, the least recently used first."""
        return iter(self._entries.values())

    def items(self) -> list[tuple[Key, Value]]:
        """Return the keys and values, the least recently used first."""
        return list(self._entries.items())

    @property
    def size(self) -> PartSize:
        """How many entries there are, and how many there may be."""
        return PartSize(len(self._entries), int(self._max_entries))

    def get(self, key: Key) -> Value | None:
        """Return a key's value and count that as a use; None if it is not there."""
        value = self._entries.get(key)
        if value is not None:
            self._entries.move_to_end(key)
        return value

    def peek(self, key: Key) -> Value | None:
        """Return a key's value without using it; None if it is not there."""
        return self._entries.get(key)

    def put(self, key: Key, value: Value) -> list[tuple[Key, Value]]:
        """Keep a value as the newest; return the entries that went, that of the key included."""
        entries, gone = self._entries, []
        if key in entries:
            earlier = entries.pop(key)
            gone.append((key, earlier))
            self.weight -= self._weight_of(earlier)
        entries[key] = value
        self.weight += self._weight_of(value)
        while (self.weight > self._max_weight or len(entries) > self._max_entries) and (
            len(entries) > 1
        ):
            gone.append(self.pop_oldest())
        return gone

    def pop_oldest(self) -> tuple[Key, Value]:
        """Forget the least recently used entry and return it; there must be one."""
        key, value = self._entries.popitem(last=False)
        self.weight -= self._weight_of(value)
        return key, value

    def get_or_make(self, key: Key, make: Callable[[], Value]) -> Value:
        """Return a key's value, used; a new one is made and kept if it is not there."""
        value = self.get(key)
        if value is None:
            value = make()
            self.put(key, value)
        return value

    def pop(self, key: Key) -> Value | None:
        """Forget a key; return its value, or None if it is not there."""
        value = self._entries.pop(key, None)
        if value is not None:
            self.weight -= self._weight_of(value)
        return value


class TenantShares(Generic[Name]):
    """How much of a bound each tenant holds; not locked, its owner does that."""

    def __init__(self, bound: float) -> None:
        self.bound = bound
        self.total = 0
        self._held: dict[Name, int] = {}
        # a heap of negative sizes, made when first asked for; those of tenants that hold less now,
        # or more, are out of date
        self._largest: list[tuple[int, Name]] = []

    @property
    def size(self) -> PartSize:
        """How much all tenants hold together, and may hold."""
        return PartSize(self.total, int(self.bound))

    @property
    def equal(self) -> float:
        """An equal share of the bound, for each tenant that holds something."""
        return self.bound // max(1, len(self._held))

    def note(self, tenant: Name, held: int) -> None:
        """Take note of how much a tenant holds now."""
        before = self._held.get(tenant, 0)
        self.total += held - before
        if not held:
            self._held.pop(tenant, None)
        elif held != before:
            self._held[tenant] = held
            if held > before and self._largest:
                heapq.heappush(self._largest, (-held, tenant))
                if len(self._largest) > 2 * len(self._held) + 64:
                    self._largest = []

    def largest(self) -> Name:
        """Return the tenant that holds most, of several the first; one must hold something."""
        if not self._largest:
            self._largest = [(-held, tenant) for tenant, held in self._held.items()]
            heapq.heapify(self._largest)
        while True:
            negative, tenant = self._largest[0]
            held = self._held.get(tenant, 0)
            if held == -negative:
                return tenant
            if 0 < held < -negative:
                heapq.heapreplace(self._largest, (-held, tenant))
            else:  # it holds nothing, or more, for which there is a later entry
                heapq.heappop(self._largest)


class TenantLRUMap(Generic[Key, Value]):
    """The entries of several tenants in common bounds; who holds most loses first.

    So a tenant loses nothing to others while it holds no more than an equal share. Not locked.
    """

    def __init__(
        self,
        max_entries: float = math.inf,
        *,
        max_weight: float = math.inf,
        weight_of: Callable[[Value], int] = _count_one,
    ) -> None:
        self._weight_of = weight_of
        self._maps: dict[str, LRUMap[Key, Value]] = {}
        self._entries = TenantShares[str](max_entries)
        self._weights = TenantShares[str](max_weight)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def size(self) -> PartSize:
        """How many entries there are, and how many there may be, where that is bounded."""
        return self._entries.size

    @property
    def weight_size(self) -> PartSize:
        """How much they weigh together, and how much they may, where that is bounded."""
        return self._weights.size

    def of(self, tenant: str) -> LRUMap[Key, Value]:
        """Return a tenant's entries, for reading; empty if there are none."""
        return self._maps.get(tenant) or LRUMap()

    def values(self) -> Iterator[Value]:
        """Yield the values, tenant by tenant, each one's least recently used first."""
        for entries in self._maps.values():
            yield from entries.values()

    def get(self, tenant: str, key: Key) -> Value | None:
        """Return the value of a tenant's key and count that as a use; None if it is not there."""
        entries = self._maps.get(tenant)
        return None if entries is None else entries.get(key)

    def put(self, tenant: str, key: Key, value: Value) -> list[tuple[str, Key, Value]]:
        """Keep a value as its tenant's newest; return the entries that went, maybe the new one."""
        entries = self._maps.get(tenant)
        if entries is None:
            entries = self._maps[tenant] = LRUMap(weight_of=self._weight_of)
        gone = [(tenant, *one) for one in entries.put(key, value)]
        self._count += 1 - len(gone)
        self._note(tenant)
        for shares in (self._entries, self._weights):
            while shares.total > shares.bound and self._count > 1:
                largest = shares.largest()
                gone.append((largest, *self._maps[largest].pop_oldest()))
                self._count -= 1
                self._note(largest)
        return gone

    def pop(self, tenant: str, key: Key) -> Value | None:
        """Forget a tenant's key; return its value, or None if it is not there."""
        entries = self._maps.get(tenant)
        value = None if entries is None else entries.pop(key)
        if value is not None:
            self._count -= 1
            self._note(tenant)
        return value

    def _note(self, tenant: str) -> None:
        entries = self._maps[tenant]
        self._entries.note(tenant, len(entries) and len(entries) + id_size(tenant) - 1)
        self._weights.note(tenant, entries.weight)
        if not entries:
            del self._maps[tenant]
