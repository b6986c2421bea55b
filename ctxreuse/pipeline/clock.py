"""The time that adapters plan with, the same for all of a process: planning reads no clock."""

from __future__ import annotations

import time
from typing import Any

from ctxreuse.planner import ReusePlanner

_BEGAN = time.time() - time.monotonic()


def now() -> float:
    """Return seconds since 1970 that only run forward."""
    return _BEGAN + time.monotonic()


def planning_time(planner: ReusePlanner) -> dict[str, Any]:
    """Return the time as `plan` and `plan_batch` take it: where cache entries expire."""
    return {} if planner.cache.lifetime is None else {"now": now()}
