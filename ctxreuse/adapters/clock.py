"""The time that adapters plan with: planning itself reads no clock.

All adapters of a process read the same one, because a planner may serve several of them.
"""

from __future__ import annotations

import time


def now() -> float:
    """Return seconds that only run forward."""
    return time.monotonic()
