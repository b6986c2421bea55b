"""What one tenant's requests have sent of late: what a planner writes to a file, to start from."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from ctxreuse.planning.sharing import Entry, LostEntry, SentEntry

_MAX_BLOCKS = 100_000


class Noted(NamedTuple):
    """An entry of a journal."""

    time: int  # on the planner's clock, by which tenants' journals are merged
    entry: Entry


class Journal:
    """The latest entries of one tenant, oldest first; not locked, its owner does that."""

    def __init__(self) -> None:
        # (time, whether it is of what was sent, its fields): the collector need not look into these
        self._noted: deque[tuple[int, bool, tuple[Any, ...]]] = deque()
        self.size = 0

    def note(self, time: int, entry: Entry) -> None:
        """Note what was sent or lost, and forget the oldest entries over the bound."""
        self._noted.append((time, isinstance(entry, SentEntry), tuple(entry)))
        self.size += _size(entry)
        while self.size > _MAX_BLOCKS and len(self._noted) > 1:
            self.forget_oldest()

    def forget_oldest(self) -> None:
        """Forget the oldest entry; there must be one."""
        self.size -= _size(_entry(*self._noted.popleft()[1:]))

    def noted(self) -> list[Noted]:
        """Return the entries, oldest first."""
        return [Noted(time, _entry(is_sent, fields)) for time, is_sent, fields in self._noted]


def _entry(is_sent: bool, fields: tuple[Any, ...]) -> Entry:
    return SentEntry(*fields) if is_sent else LostEntry(*fields)


def _size(entry: Entry) -> int:
    return len(entry.keys) or 1 if isinstance(entry, SentEntry) else 1
