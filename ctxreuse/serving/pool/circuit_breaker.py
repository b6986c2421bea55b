"""A circuit breaker: an engine that keeps failing is left alone for a while."""

from __future__ import annotations

from enum import Enum

_LONGEST_REST_S = 300.0


class Circuit(Enum):
    """The state of the way to an engine."""

    CLOSED = "closed"
    """It answers."""
    OPEN = "open"
    """It has failed too often in a row, and rests."""
    HALF_OPEN = "half-open"
    """It has rested; one request tries it."""


class CircuitBreaker:
    """Opens after so many failures in a row; tries again after a rest, which doubles each time.

    A rest does not grow beyond five minutes.

    It has no clock of its own. Not safe to share between threads without a lock.

    Args:
        failures: How many failures in a row open it.
        rest_s: Seconds of the first rest.
    """

    def __init__(self, failures: int = 3, rest_s: float = 10.0) -> None:
        self._limit = failures
        self._first_rest_s = rest_s
        self._failures = 0
        self._rest_s = rest_s
        self._opened_at: float | None = None
        self._is_tried = False

    def state(self, now: float) -> Circuit:
        """Return the state at a time, in seconds of any clock that never goes back."""
        if self._opened_at is None:
            return Circuit.CLOSED
        if now - self._opened_at < self._rest_s:
            return Circuit.OPEN
        return Circuit.HALF_OPEN

    def admits(self, now: float) -> bool:
        """Return whether a request may be sent now: always, never, or one to try."""
        state = self.state(now)
        return state is Circuit.CLOSED or (state is Circuit.HALF_OPEN and not self._is_tried)

    def begin(self, now: float) -> None:
        """Note that a request is sent."""
        if self.state(now) is Circuit.HALF_OPEN:
            self._is_tried = True

    def succeed(self) -> None:
        """Note that a request was answered."""
        self._failures = 0
        self._opened_at = None
        self._rest_s = self._first_rest_s
        self._is_tried = False

    def fail(self, now: float) -> bool:
        """Note that a request was not answered; return whether that opened the circuit."""
        self._failures += 1
        if self._opened_at is not None:
            if self.state(now) is Circuit.HALF_OPEN:
                self._rest_s = max(self._rest_s, min(2 * self._rest_s, _LONGEST_REST_S))
                self._opened_at = now
                self._is_tried = False
            return False
        if self._failures < self._limit:
            return False
        self._opened_at = now
        return True

    def open(self, now: float) -> None:
        """Note that the engine is known not to work."""
        if self._opened_at is None or self.state(now) is Circuit.HALF_OPEN:
            self._opened_at = now
        self._is_tried = False

    def abandon(self) -> None:
        """Note that a request ended without telling whether the engine works: it was cancelled."""
        self._is_tried = False
