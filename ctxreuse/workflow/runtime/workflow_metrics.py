"""What a workflow engine has done so far, in numbers."""

from __future__ import annotations

from dataclasses import dataclass

from ctxreuse.workflow.vector_search.scheduler import SearchCounters


@dataclass(slots=True)
class SpeculationCounters:
    """The gains and costs of speculation.

    Attributes:
        retrievals: Retrievals before a generation, so that one could have been launched.
        launched: Generations that were launched before their retrieval had ended.
        committed: How many of them were right.
        wasted_tokens: Tokens that the wrong ones had generated.
        wasted_prompts: How many wrong ones there were.
        generated_tokens: Tokens of all generations that were not wasted.
        searches: Searches that were begun with a part of a generation's text.
        searches_committed: How many of them were for the final text.
        hints: How many others told the real search where to look first.
    """

    retrievals: int = 0
    launched: int = 0
    committed: int = 0
    wasted_tokens: int = 0
    wasted_prompts: int = 0
    generated_tokens: int = 0
    searches: int = 0
    searches_committed: int = 0
    hints: int = 0


@dataclass(frozen=True, slots=True)
class WorkflowMetrics:
    """What a workflow engine has done since it was made.

    Attributes:
        runs: Runs that have begun.
        finished: How many of them have ended well.
        failed: How many have ended with an error, a deadline included.
        cancelled: How many were cancelled.
        waiting: Runs that wait for a slot.
        in_flight: Runs under way.
        generations: Generations that were started, speculative ones included.
        searches: Counts of all step-wise retrievers together.
        speculation: Counts of speculation.
        planning_faults: Prompts that were sent with the documents as retrieved, because planning
            failed.
    """

    runs: int
    finished: int
    failed: int
    cancelled: int
    waiting: int
    in_flight: int
    generations: int
    searches: SearchCounters
    speculation: SpeculationCounters
    planning_faults: int
