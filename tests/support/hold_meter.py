"""How long a tenant's lock is held, counted in steps; and what others do between two holds."""

from collections.abc import Callable
from typing import Any

from steps import StepCounter

from ctxreuse import ReusePlanner


class MeteredLock:
    """The lock of a tenant's state, which notes how many steps its holds take.

    Args:
        planner: Whose lock.
        tenant: The tenant, which is known.
        between: Called each time the lock was released, since another thread could run there.

    Attributes:
        holds: How often it was held.
        longest: The most steps of one hold.
    """

    def __init__(
        self, planner: ReusePlanner, tenant: str = "", between: Callable[[], object] | None = None
    ) -> None:
        state = planner._planning._tenants.known(tenant)
        assert state is not None
        self._state = state
        self._lock = state.lock
        self._between = between
        self._steps = StepCounter()
        self._depth = self._begun = self.holds = self.longest = 0

    def acquire(self, *, blocking: bool = True) -> bool:
        is_taken = self._lock.acquire(blocking=blocking)
        if is_taken:
            self._depth += 1
            if self._depth == 1:
                self._begun = self._steps.count
        return is_taken

    def release(self) -> None:
        self._depth -= 1
        self._lock.release()
        if self._depth:
            return
        self.holds += 1
        self.longest = max(self.longest, self._steps.count - self._begun)
        if self._between is not None:
            between, self._between = self._between, None  # what it does is not interrupted
            between()
            self._between = between

    def during(self, call: Callable[[], Any]) -> Any:
        """Return what a call returns, and measure its holds."""
        self._state.lock = self
        try:
            with self._steps:
                return call()
        finally:
            self._state.lock = self._lock
