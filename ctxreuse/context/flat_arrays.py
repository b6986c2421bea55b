"""Much that is remembered, as flat arrays: the garbage collector looks into none of it.

A collection looks at every reference of every list and dictionary, and the process waits. What
stands in an array of integers, or in one of numpy, it does not see, nor a plain dictionary whose
keys and values are strings, bytes and numbers. Only what refers to nothing else may stand here: a
circle of references would never be freed.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

Objects: TypeAlias = NDArray[Any]
Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

_DOUBLES_UP_TO = 1 << 18
_MOST_ROOM = 4_096
_DROPPED_AT_ONCE = 2_000

# the fields of a number in `LinkedNumbers`, of two; those of 0 are the newest and the oldest
_OLDER = 0
_NEWER = 1


def with_room(objects: Objects | None = None) -> Objects:
    """Return objects in an array that has room for more.

    It is doubled, and a large one becomes a far larger one, because to copy a million objects takes
    longer than others may have to wait; room that is not used takes no memory.
    """
    if objects is None:
        return np.empty(16, dtype=object)
    size = len(objects)
    larger: Objects = np.empty(size * (2 if size < _DOUBLES_UP_TO else 8), dtype=object)
    larger[:size] = objects
    return larger


def room_behind(size: int) -> int:
    """Return how many numbers an array of a size is lengthened by, at least 1."""
    return min(_MOST_ROOM, 8 + size // 8)


def drop_objects(objects: Objects) -> Iterator[None]:
    """Take the objects out of an array, some at a time, between the yields."""
    for start in range(0, len(objects), _DROPPED_AT_ONCE):
        objects[start : start + _DROPPED_AT_ONCE] = None
        yield


def drop_items(table: dict[Any, Any]) -> Iterator[None]:
    """Take the items out of a dictionary, some at a time, between the yields."""
    while table:
        for _ in range(min(len(table), _DROPPED_AT_ONCE)):
            table.popitem()
        yield


class LinkedNumbers:
    """Numbers from 1 in an order, the oldest first; each stands in it once."""

    __slots__ = ("_links",)

    def __init__(self) -> None:
        self._links = array("i", [0, 0])

    @property
    def oldest(self) -> int:
        """The first number; 0 if there is none."""
        return self._links[_NEWER]

    @property
    def newest(self) -> int:
        """The last number; 0 if there is none."""
        return self._links[_OLDER]

    def __iter__(self) -> Iterator[int]:
        """Yield the numbers, the oldest first."""
        number = self._links[_NEWER]
        while number:
            yield number
            number = self._links[2 * number + _NEWER]

    def append(self, number: int) -> None:
        """Put a number that does not stand here behind all."""
        links, place = self._links, 2 * number
        if place >= len(links):
            self._make_room(place)
        newest = links[_OLDER]
        links[place + _OLDER], links[place + _NEWER] = newest, 0
        links[2 * newest + _NEWER] = links[_OLDER] = number

    def add(self, number: int, older: int) -> None:
        """Put a number that does not stand here behind another one, or behind 0 before all."""
        links = self._links
        if 2 * number >= len(links):
            self._make_room(2 * number)
        newer = links[2 * older + _NEWER]
        links[2 * number + _OLDER], links[2 * number + _NEWER] = older, newer
        links[2 * older + _NEWER] = links[2 * newer + _OLDER] = number

    def remove(self, number: int) -> None:
        """Take out a number that stands here."""
        links = self._links
        older, newer = links[2 * number + _OLDER], links[2 * number + _NEWER]
        links[2 * older + _NEWER], links[2 * newer + _OLDER] = newer, older

    def _make_room(self, place: int) -> None:
        links = self._links
        missing = place + 2 - len(links)
        links.frombytes(bytes(links.itemsize * (missing + 2 * room_behind(len(links)))))


class FlatOrderedDict(Generic[Key, Value]):
    """What an `OrderedDict` can do, for plain keys and values.

    Keys are strings, bytes or numbers; values hold nothing but such, in tuples if need be.
    """

    __slots__ = ("_free", "_keys", "_number_of", "_order", "_values")

    def __init__(self) -> None:
        self._number_of: dict[Key, int] = {}
        self._keys = with_room()
        self._values = with_room()
        self._order = LinkedNumbers()
        self._free = 0  # the first free number; its value is the next one

    def __len__(self) -> int:
        return len(self._number_of)

    def __contains__(self, key: object) -> bool:
        return key in self._number_of

    def __iter__(self) -> Iterator[Key]:
        for number in self._order:
            yield self._keys[number]

    def values(self) -> Iterator[Value]:
        """Yield the values in order."""
        for number in self._order:
            yield self._values[number]

    def get(self, key: Key) -> Value | None:
        """Return a key's value; None if it is not there."""
        number = self._number_of.get(key)
        if number is None:
            return None
        value: Value = self._values[number]
        return value

    def __setitem__(self, key: Key, value: Value) -> None:
        """Set a key's value; a new key stands last."""
        number = self._number_of.get(key)
        if number is None:
            number = self._number_of[key] = self._new()
            self._keys[number] = key
            self._order.append(number)
        self._values[number] = value

    def move_to_end(self, key: Key) -> None:
        """Let a key that is there stand last."""
        number, order = self._number_of[key], self._order
        if number != order.newest:
            order.remove(number)
            order.append(number)

    def pop(self, key: Key, default: Value | None = None) -> Value | None:
        """Take a key out; return its value, or the default if it is not there."""
        number = self._number_of.pop(key, None)
        if number is None:
            return default
        value: Value = self._values[number]
        self._order.remove(number)
        self._keys[number], self._values[number], self._free = None, self._free, number
        return value

    def popitem(self, last: bool = True) -> tuple[Key, Value]:
        """Take out the last key, or the first, and return it with its value."""
        number = self._order.newest if last else self._order.oldest
        if not number:
            raise KeyError("it is empty")
        key: Key = self._keys[number]
        value: Value = self._values[number]
        self.pop(key)
        return key, value

    def _new(self) -> int:
        number = self._free
        if number:
            self._free = self._values[number]
            return number
        number = len(self._number_of) + 1  # of those that there are, none is free
        if number == len(self._keys):
            self._keys, self._values = with_room(self._keys), with_room(self._values)
        return number
