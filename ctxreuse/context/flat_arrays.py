"""Much that is remembered, as flat arrays that the garbage collector does not look into.

Only what refers to nothing else may stand here: a circle of references would never be freed.
"""

from __future__ import annotations

import time
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
_FIRST_CHAINS = 8  # a power of two
_IN_A_CHAIN = 2
_LOOKS = 1_000

# the fields of a number in `LinkedNumbers`, of two; those of 0 are the newest and the oldest
_OLDER = 0
_NEWER = 1


def with_room(objects: Objects | None = None) -> Objects:
    """Return objects in an array that has room for more."""
    if objects is None:
        return np.empty(16, dtype=object)
    size = len(objects)
    # large ones grow at once: to copy a million takes longer than others may have to wait
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


class HashedNumbers:
    """Numbers from 1, each found by its hash of 64 bits; no two have the same.

    Linear hashing (Litwin 1980): chains are halved one at a time. One thread changes it at a time;
    others may look meanwhile.
    """

    __slots__ = ("_changes", "_first", "_halved", "_hashes", "_mask", "_next")

    def __init__(self) -> None:
        self._first = array("i", bytes(4 * _FIRST_CHAINS))  # of each chain
        self._mask = _FIRST_CHAINS - 1
        self._halved = 0  # the chains before this one are halved already
        self._next = array("i", [0])  # in the chain
        self._hashes = array("q", [0])
        self._changes = 0  # odd while chains are changed

    def find(self, hashed: int) -> int:
        """Return the number of a hash; 0 if there is none."""
        number = 0
        for _ in range(_LOOKS):
            changes, chain = self._changes, hashed & self._mask
            if chain < self._halved:  # as `_chain`, which takes a third of the time
                chain = hashed & (2 * self._mask + 1)
            number = self._first[chain]
            if number:
                hashes, following = self._hashes, self._next
                while number and hashes[number] != hashed:
                    number = following[number]
            if number or (changes == self._changes and not changes & 1):
                break
            time.sleep(0)  # lets in who changes it; one that Ctrl-C has stopped never ends
        return number

    def add(self, number: int, hashed: int) -> None:
        """Add a number that is not here, whose hash no other one has."""
        first, following = self._first, self._next
        if number >= len(following):
            missing = number + 1 - len(following) + room_behind(len(following))
            self._hashes.frombytes(bytes(8 * missing))
            following.frombytes(bytes(4 * missing))
        chain = self._chain(hashed)
        self._hashes[number], following[number], first[chain] = hashed, first[chain], number
        if number > _IN_A_CHAIN * len(first):
            self._halve_next()

    def remove(self, number: int) -> None:
        """Take out a number that is here."""
        following, chain = self._next, self._chain(self._hashes[number])
        self._changes += 1
        before = self._first[chain]
        if before == number:
            self._first[chain] = following[number]
        else:
            while following[before] != number:
                before = following[before]
            following[before] = following[number]
        self._changes += 1

    def _chain(self, hashed: int) -> int:
        chain = hashed & self._mask
        return chain if chain >= self._halved else hashed & (2 * self._mask + 1)

    def _halve_next(self) -> None:
        """Move those of the next chain that belong there to a new, last one."""
        first, following = self._first, self._next
        chain, new = self._halved, len(first)
        self._changes += 1
        first.append(0)
        number, first[chain] = first[chain], 0
        bit = self._mask + 1
        while number:
            where = new if self._hashes[number] & bit else chain
            after = following[number]
            following[number], first[where] = first[where], number
            number = after
        self._halved += 1
        if self._halved > self._mask:
            # in this order, so that no thread looks for a chain that is not there yet
            self._halved, self._mask = 0, 2 * self._mask + 1
        self._changes += 1


class FlatOrderedDict(Generic[Key, Value]):
    """An `OrderedDict` whose keys and values are strings, bytes, numbers or tuples of such."""

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
