"""How a workflow engine works: limits and techniques."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ctxreuse.context.checks import checked_integer
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.workflow.runtime.speculation import Rule, check_rule


def default_workers() -> int:
    """Return how many scans to run at a time: one for each CPU."""
    is_known = hasattr(os, "sched_getaffinity")  # what this process may use, where that is told
    return len(os.sched_getaffinity(0)) if is_known else os.cpu_count() or 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowOptions:
    """How a workflow engine works. No option changes what a run returns.

    Args:
        max_in_flight: Runs at a time; others wait in the order of arrival.
        reorder: Whether a search begins where the last one of its run or session has found
            something.
        speculation: When to start a generation before its retrieval has ended.
        speculative_retrieval: Whether a search begins with a part of the text that will be its
            query, to tell the real one where to look first.
        max_generations: No speculation while this many generations are under way; the 16 of
            HedraRAG, section 4.3, unless measured otherwise.
        max_retrievals: No speculative retrieval while this many searches are under way; its 32.
        max_wasted_share: The part of all generated tokens that wrong speculations may have cost;
            beyond it none is launched.
        workers: Scans at a time, each in a thread; None takes one for each CPU.

    Raises:
        InvalidRequestError: wrong type or out of range.
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
        checked_integer("max_in_flight", self.max_in_flight, 1)
        checked_integer("max_generations", self.max_generations)
        checked_integer("max_retrievals", self.max_retrievals)
        if self.workers is not None:
            checked_integer("workers", self.workers, 1)
        share = self.max_wasted_share
        if not isinstance(share, (int, float)) or not 0 <= share <= 1:
            raise InvalidRequestError(
                f"max_wasted_share must be a number from 0 to 1, not {describe(share)}"
            )
