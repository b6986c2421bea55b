"""Which message of a stream with sequence numbers to apply, and when something is missing."""

from __future__ import annotations

from enum import Enum, auto


class Arrival(Enum):
    """What a message is to the listener."""

    NEXT = auto()
    """The one that was expected."""
    FIRST = auto()
    """The first one seen: of the stream if its number is 0, else the listener is late."""
    KNOWN = auto()
    """One that a replay has brought already."""
    AFTER_GAP = auto()
    """One before which others are missing."""
    RESTARTED = auto()
    """The first one seen of a sender that has started anew."""


class EventSequence:
    """Follows the numbers of live and replayed messages, so that each is applied once, in order.

    A sender counts from 0 and never goes back, so a live number that is not greater than the live
    one before it belongs to a new sender. Replayed messages run ahead of the live ones, which then
    arrive a second time.
    """

    def __init__(self) -> None:
        self.applied: int | None = None
        """The last message that was applied; None before the first."""
        self._live: int | None = None

    def arrive(self, number: int) -> Arrival:
        """Say what a live message is."""
        restarted = self._live is not None and number <= self._live
        if restarted:
            self.applied = None
        self._live = number
        if restarted:
            return Arrival.RESTARTED
        if self.applied is None:
            return Arrival.FIRST
        if number <= self.applied:
            return Arrival.KNOWN
        return Arrival.NEXT if number == self.applied + 1 else Arrival.AFTER_GAP

    def is_next(self, number: int) -> bool:
        """Return whether nothing is missing before a message."""
        return self.applied is None or number == self.applied + 1

    def reset(self) -> None:
        """Forget the sender."""
        self.applied = self._live = None
