"""The time that adapters plan with: planning itself reads no clock.

All adapters of a process read the same one, because a planner may serve several of them; and that
of other processes tells the same time, because they may share what they have sent.
"""

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
