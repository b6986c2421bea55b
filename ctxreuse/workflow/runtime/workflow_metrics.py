"""What an engine has done so far, in numbers."""

from __future__ import annotations

from dataclasses import dataclass

from ctxreuse.workflow.runtime.speculation import SpeculationCounters
from ctxreuse.workflow.vector_search.search_work import LaneCounters


@dataclass(frozen=True, slots=True)
class WorkflowMetrics:
    """What an engine has done since it was made.

    Attributes:
        runs: Runs that have begun.
        finished: How many of them have ended well.
        failed: How many have ended with an error, a deadline included.
        cancelled: How many were cancelled.
        waiting: Runs that wait for their turn.
        in_flight: Runs under way.
        generations: Generations that were started, speculative ones included.
        searches: What the step-wise retrievers have done, all together.
        speculation: What speculation has brought.
        planning_faults: Prompts that went through with the documents as retrieved.
    """

    runs: int
    finished: int
    failed: int
    cancelled: int
    waiting: int
    in_flight: int
    generations: int
    searches: LaneCounters
    speculation: SpeculationCounters
    planning_faults: int
