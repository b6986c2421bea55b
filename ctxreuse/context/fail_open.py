"""Failing open: an internal error never fails a user's call; it is logged once, and counted."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ctxreuse.context.fork_safety import ForkSafeLock

_log = logging.getLogger("ctxreuse")
_Result = TypeVar("_Result")


class FailOpen:
    """Runs the work of one component, and something plain instead when that fails."""

    def __init__(
        self,
        component: str,
        instead: str = "documents go through as retrieved",
        work: str = "planning",
        tell: Callable[[], object] | None = None,
    ) -> None:
        self._component = component
        self._instead = instead
        self._work = work
        self._tell = tell
        self.faults = 0  # how often the work has failed
        self._lock = ForkSafeLock()

    def __reduce__(self) -> tuple[Any, ...]:
        return FailOpen, (self._component, self._instead, self._work, self._tell)

    def attempt(
        self,
        work: Callable[[], _Result],
        instead: Callable[[], _Result] = lambda: None,  # type: ignore[assignment, return-value]
    ) -> _Result:
        """Return what `work` returns or, if it raises, what `instead` does: nothing by default."""
        try:
            return work()
        except Exception as error:
            self.note(error)
            return instead()

    def note(self, error: Exception) -> None:
        """Count an error. Log the first one without its message, which may hold a text."""
        with self._lock:
            self.faults += 1
            first = self.faults == 1
        if self._tell is not None:
            self._tell()
        if first:
            frames = traceback.extract_tb(error.__traceback__)
            place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
            _log.warning(
                "%s: %s failed with %s at %s; %s. Further faults are only counted.",
                self._component,
                self._work,
                type(error).__name__,
                place,
                self._instead,
            )
