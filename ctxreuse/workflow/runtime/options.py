"""How an engine works: limits and techniques."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.workflow.runtime.speculation import Rule, check_rule


def default_workers() -> int:
    """Return how many scans to run at a time: one for each CPU."""
    is_known = hasattr(os, "sched_getaffinity")  # what this process may use, where that is told
    return len(os.sched_getaffinity(0)) if is_known else os.cpu_count() or 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowOptions:
    """How an engine works. Nothing of this changes what a run returns.

    Args:
        max_in_flight: Runs at a time; others wait for their turn, in the order of arrival.
        reorder: Whether a search begins where the last one of its run or session has found
            something.
        speculation: When to start a generation before its retrieval has ended.
        speculative_retrieval: Whether a search begins with a part of the text that will be its
            query, to tell the real one where to look first.
        max_generations: No speculation while so many generations are under way; the 16 of HedraRAG,
            section 4.3, unless measured otherwise.
        max_retrievals: No speculative retrieval while so many searches are under way; its 32.
        max_wasted_share: Of all generated tokens, the part that wrong speculations may have cost;
            beyond it none is launched.
        workers: Scans at a time, each in a thread; None takes one for each CPU.

    Raises:
        InvalidRequestError: If a value is out of range.
    """

    max_in_flight: int = 256
    reorder: bool = True
    speculation: Rule = "adaptive"
    speculative_retrieval: bool = True
    max_generations: int = 16
    max_retrievals: int = 32
    max_wasted_share: float = 0.25
    workers: int | None = None

    def __post_init__(self) -> None:
        check_rule(self.speculation)
        for name, least in (
            ("max_in_flight", 1),
            ("max_generations", 0),
            ("max_retrievals", 0),
        ):
            _check_count(name, getattr(self, name), least)
        if self.workers is not None:
            _check_count("workers", self.workers, 1)
        share = self.max_wasted_share
        if not isinstance(share, (int, float)) or not 0 <= share <= 1:
            raise InvalidRequestError(
                f"max_wasted_share must be a number from 0 to 1, not {describe(share)}"
            )


def _check_count(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidRequestError(f"{name} must be an integer from {least}, not {describe(value)}")
