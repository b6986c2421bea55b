"""What the runs of a workflow engine share, in one event loop."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TypeAlias

from ctxreuse.context.fail_open import FailOpen
from ctxreuse.context.lru_map import LRUMap
from ctxreuse.planner import ReusePlanner
from ctxreuse.serving.aio.concurrency import Execute, Threads
from ctxreuse.workflow.models.language_model import LanguageModel
from ctxreuse.workflow.retrievers.atomic import Retriever
from ctxreuse.workflow.runtime.generations import Generations
from ctxreuse.workflow.runtime.options import WorkflowOptions, default_workers
from ctxreuse.workflow.runtime.speculation import PreviewStability
from ctxreuse.workflow.runtime.timeline import Timeline
from ctxreuse.workflow.runtime.workflow_metrics import SpeculationCounters
from ctxreuse.workflow.vector_search.costs import MovingMean
from ctxreuse.workflow.vector_search.executor import SearchExecutor
from ctxreuse.workflow.vector_search.handle import SearchRecord
from ctxreuse.workflow.vector_search.vector_retriever import VectorRetriever

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
