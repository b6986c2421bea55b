"""What the runs of a workflow engine share, in one event loop; the options for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TypeAlias

from ctxreuse.context.checks import checked_integer
from ctxreuse.context.fail_open import FailOpen
from ctxreuse.context.lru_map import LRUMap
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.planner import ReusePlanner
from ctxreuse.serving.aio.concurrency import Execute, Threads
from ctxreuse.workflow.models.language_model import LanguageModel
from ctxreuse.workflow.retrievers import Retriever
from ctxreuse.workflow.runtime.generations import Generations
from ctxreuse.workflow.runtime.measurements import SpeculationCounters, Timeline
from ctxreuse.workflow.runtime.speculation import PreviewStability, Rule, check_rule
from ctxreuse.workflow.vector_search.costs import MovingMean
from ctxreuse.workflow.vector_search.executor import SearchExecutor
from ctxreuse.workflow.vector_search.handle import SearchRecord
from ctxreuse.workflow.vector_search.vector_retriever import VectorRetriever


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


DEFAULT_RETRIEVER = "default"
"""The name of the retriever that is asked where a node names none."""

AnyRetriever: TypeAlias = VectorRetriever | Retriever

NodeKey: TypeAlias = tuple[str, str]
"""A workflow's name and a node's."""

_MOST_NODES = 10_000
_MOST_SESSIONS = 10_000
_OTHER_THREADS = 2
"""For work that is not a search: looking up vectors, filling the hot tier."""


@dataclass(frozen=True, slots=True)
class RunContext:
    """A run among others.

    Attributes:
        number: The run's number in its engine, from 1.
        workflow: The name of its graph.
        tenant: The tenant; nothing is shared across tenants.
        session: Runs of one session share their last searches. None has no session.
    """

    number: int
    workflow: str
    tenant: str = ""
    session: str | int | None = None


@dataclass(slots=True)
class GenerationStatistics:
    """Averages of a node's generations.

    Attributes:
        seconds: How long one takes.
        tokens: How many tokens it brings.
    """

    seconds: MovingMean = field(default_factory=lambda: MovingMean(0.5))
    tokens: MovingMean = field(default_factory=lambda: MovingMean(48.0))


class Services:
    """What the runs of a workflow engine share.

    Args:
        llm: The model, if generations name none.
        retrievers: The retrievers, by name.
        planner: Orders the documents of prompts; None leaves them as retrieved.
        options: How the workflow engine works.
        execute: Runs blocking work; None uses threads of its own.
        clock: Seconds from any start.

    Attributes:
        generations: The model.
        executors: The step-wise retrievers, by name.
        retrievers: The atomic ones.
        sessions: The last searches of sessions that outlast a run, by tenant, session and
            retriever.
        generation_statistics: Averages of generations, by node.
        preview_stability: When the previews of a retrieval are final, with or without a last
            search.
        speculation: Counts of speculation.
        speculating: Keeps faults of speculation, or of its history, from the runs.
        timeline: What happened when.
    """

    def __init__(
        self,
        llm: LanguageModel | None,
        retrievers: dict[str, AnyRetriever],
        planner: ReusePlanner | None,
        options: WorkflowOptions,
        execute: Execute | None,
        clock: Callable[[], float],
    ) -> None:
        self.options = options
        self.clock = clock
        self.generations = Generations(llm, planner)
        self.sessions: LRUMap[Hashable, SearchRecord] = LRUMap(_MOST_SESSIONS)
        self.generation_statistics: LRUMap[NodeKey, GenerationStatistics] = LRUMap(_MOST_NODES)
        self.preview_stability: LRUMap[tuple[NodeKey, bool], PreviewStability]
        self.preview_stability = LRUMap(_MOST_NODES)
        self.speculation = SpeculationCounters()
        self.speculating = FailOpen(
            "WorkflowEngine", "stages begin when they are due", work="speculation, or its history,"
        )
        self.timeline = Timeline(maxlen=20_000)
        self._threads = Threads(_OTHER_THREADS)
        workers = options.workers or default_workers()
        self.retrievers = {
            name: one for name, one in retrievers.items() if not isinstance(one, VectorRetriever)
        }
        self.executors = {
            name: SearchExecutor(
                one,
                self._threads if execute is None else execute,
                # a worker stays as long as there is work: not in the way of other retrievers
                threads=Threads(workers) if execute is None else None,
                workers=workers,
                reorder=options.reorder,
                clock=clock,
            )
            for name, one in retrievers.items()
            if isinstance(one, VectorRetriever)
        }

    async def close(self) -> None:
        """Wait for the searches, and end the threads."""
        for executor in self.executors.values():
            await executor.close()
        self._threads.close()
