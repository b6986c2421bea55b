"""Maps of bounded size that forget the least recently used entries."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class LRUMap(Generic[Key, Value]):
    """Keys and values, the least recently used first; not locked, its owner does that.

    Args:
        max_entries: How many entries it keeps.
        max_weight: How much the entries may weigh together. The newest entry stays however heavy it
            is.
        weight_of: The weight of a value; the same for one value at any time.
    """

    __slots__ = ("_entries", "_max_entries", "_max_weight", "_weight_of", "weight")

    def __init__(
        self,
        max_entries: float = math.inf,
        *,
        max_weight: float = math.inf,
        weight_of: Callable[[Value], int] = lambda value: 1,
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
        """Keep a value as the most recently used.

        Returns:
            The entries that had to go for it: an earlier one of its key, and the oldest.
        """
        gone: list[tuple[Key, Value]] = []
        if key in self._entries:
            gone.append((key, self._entries.pop(key)))
            self.weight -= self._weight_of(gone[0][1])
        self._entries[key] = value
        self.weight += self._weight_of(value)
        while len(self._entries) > 1 and (
            len(self._entries) > self._max_entries or self.weight > self._max_weight
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


class TenantLRUMap(Generic[Key, Value]):
    """The entries of several tenants within common bounds; the tenant that holds most loses first.

    So nobody's traffic makes the map forget what a tenant keeps who holds no more than an equal
    share of the bounds. Not locked, its owner does that; a step takes O(log tenants).

    Args:
        max_entries: How many entries all tenants keep together.
        max_weight: How much they may weigh together.
        weight_of: The weight of a value; the same for one value at any time.
    """

    def __init__(
        self,
        max_entries: float = math.inf,
        *,
        max_weight: float = math.inf,
        weight_of: Callable[[Value], int] = lambda value: 1,
    ) -> None:
        self._max_entries = max_entries
        self._max_weight = max_weight
        self._weight_of = weight_of
        self._maps: dict[str, LRUMap[Key, Value]] = {}
        self._shares: list[tuple[float, str]] = []  # a heap, negative; some are out of date
        self._entries = 0
        self.weight = 0

    def __len__(self) -> int:
        return self._entries

    @property
    def tenants(self) -> int:
        """How many tenants have entries."""
        return len(self._maps)

    def of(self, tenant: str) -> LRUMap[Key, Value]:
        """Return a tenant's entries, for reading; empty if there are none."""
        return self._maps.get(tenant) or LRUMap()

    def get(self, tenant: str, key: Key) -> Value | None:
        """Return the value of a tenant's key and count that as a use; None if it is not there."""
        entries = self._maps.get(tenant)
        return None if entries is None else entries.get(key)

    def put(self, tenant: str, key: Key, value: Value) -> list[tuple[str, Key, Value]]:
        """Keep a value as the most recently used of its tenant.

        Returns:
            Tenant, key and value of the entries that had to go for it: an earlier one of its key,
            and the oldest of the tenants that hold most. The new one is among them if it alone is
            more than an equal share.
        """
        entries = self._maps.get(tenant)
        if entries is None:
            entries = self._maps[tenant] = LRUMap(weight_of=self._weight_of)
        gone = [(tenant, *one) for one in entries.put(key, value)]
        self._entries += 1 - len(gone)
        self.weight += self._weight_of(value) - sum(self._weight_of(one[2]) for one in gone)
        self._note_share(tenant)
        while self._entries > 1 and (
            self._entries > self._max_entries or self.weight > self._max_weight
        ):
            gone.append(self._pop_of_largest())
        return gone

    def _pop_of_largest(self) -> tuple[str, Key, Value]:
        share, tenant = self._shares[0]
        while share != -self._share(tenant):
            heapq.heappop(self._shares)
            share, tenant = self._shares[0]
        key, value = self._maps[tenant].pop_oldest()
        self._entries -= 1
        self.weight -= self._weight_of(value)
        if not self._maps[tenant]:
            del self._maps[tenant]
        self._note_share(tenant)
        return tenant, key, value

    def _share(self, tenant: str) -> float:
        """Return which part of a bound a tenant holds; below 0 without entries."""
        entries = self._maps.get(tenant)
        if entries is None:
            return -1.0
        return max(len(entries) / self._max_entries, entries.weight / self._max_weight)

    def _note_share(self, tenant: str) -> None:
        if tenant in self._maps:
            heapq.heappush(self._shares, (-self._share(tenant), tenant))
        if len(self._shares) > 2 * len(self._maps) + 64:
            self._shares = [(-self._share(name), name) for name in self._maps]
            heapq.heapify(self._shares)
