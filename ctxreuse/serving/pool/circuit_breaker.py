"""A circuit breaker: an engine that keeps failing gets no requests for a while."""

from __future__ import annotations

from typing import Final

_LONGEST_OPEN_S = 300.0

CLOSED: Final = "up"  # the engine answers
OPEN: Final = "resting"  # it has failed too often in a row, and gets no requests
HALF_OPEN: Final = "on trial"  # it rested long enough; one request tries it


class CircuitBreaker:
    """Opens after failures in a row, for a time that doubles; who shares it holds a lock."""

    def __init__(self, failures: int = 3, open_s: float = 10.0) -> None:
        self._limit = failures
        self._first_open_s = open_s
        self._failures = 0
        self._open_s = open_s
        self._opened_at: float | None = None
        self._has_trial = False

    def state(self, now: float) -> str:
        """Return the state at a time, in seconds of any clock that never goes back."""
        if self._opened_at is None:
            return CLOSED
        if now - self._opened_at < self._open_s:
            return OPEN
        return HALF_OPEN

    def admits(self, now: float) -> bool:
        """Return whether a request may be sent now; while it is half-open, one at a time."""
        state = self.state(now)
        return state == CLOSED or (state == HALF_OPEN and not self._has_trial)

    def begin(self, now: float) -> bool:
        """Note that a request is sent; return whether it is the one that tries the engine."""
        is_trial = self.state(now) == HALF_OPEN and not self._has_trial
        self._has_trial |= is_trial
        return is_trial

    def succeed(self) -> None:
        """Note that a request was answered."""
        self._failures = 0
        self._opened_at = None
        self._open_s = self._first_open_s
        self._has_trial = False

    def fail(self, now: float, at_once: bool = False) -> bool:
        """Note that a request was not answered; return whether that opened the circuit."""
        self._failures += 1
        if self._opened_at is not None:
            if self.state(now) == HALF_OPEN:
                self._open_s = max(self._open_s, min(2 * self._open_s, _LONGEST_OPEN_S))
                self._opened_at = now
                self._has_trial = False
            return False
        if self._failures < self._limit and not at_once:
            return False
        self._opened_at = now
        return True

    def abandon(self) -> None:
        """Note that a request was cancelled, so that it does not tell whether the engine works."""
        self._has_trial = False
