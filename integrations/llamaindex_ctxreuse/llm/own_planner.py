"""A planner that is left out, which is not the same as None."""

from __future__ import annotations

from typing import Any, Final

from ctxreuse.adapters.prompt_planner import planner_or_new
from ctxreuse.planner import ReusePlanner


class _LeftOut:
    def __repr__(self) -> str:
        return "an own one"


OWN_PLANNER: Final[Any] = _LeftOut()
"""The default of a `planner` argument: every object gets an own planner."""


def given_or_own(planner: object) -> ReusePlanner:
    """Return the planner that was given, or a new one if none was.

    Raises:
        InvalidRequestError: If something else was given.
    """
    return ReusePlanner() if planner is OWN_PLANNER else planner_or_new(planner)
