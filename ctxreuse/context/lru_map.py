"""A map of bounded size that forgets the least recently used entries."""

from __future__ import annotations

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
            gone.append(self._entries.popitem(last=False))
            self.weight -= self._weight_of(gone[-1][1])
        return gone

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
