"""What the runs of a workflow engine share: options, services, and what was learned of nodes."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

import numpy as np

from ctxreuse.context.checks import (
    checked_choice,
    checked_integer,
    checked_optional_integer,
    checked_share,
)
from ctxreuse.context.fail_open import FailOpen
from ctxreuse.context.lru_map import LRUMap, PartSize, TenantLRUMap
from ctxreuse.planner import ReusePlanner
from ctxreuse.serving.aio.concurrency import Execute, Threads
from ctxreuse.workflow.graph.compiled import Graph
from ctxreuse.workflow.graph.nodes import Generation, Node
from ctxreuse.workflow.models.language_model import LanguageModel
from ctxreuse.workflow.retrievers import Retriever
from ctxreuse.workflow.runtime.events import Emit
from ctxreuse.workflow.runtime.generations import Generations
from ctxreuse.workflow.runtime.measurements import Outcome, Span, SpeculationCounters, Timeline
from ctxreuse.workflow.vector_search.executor import SearchExecutor
from ctxreuse.workflow.vector_search.handle import SearchRecord
from ctxreuse.workflow.vector_search.scheduler import MovingMean
from ctxreuse.workflow.vector_search.vector_retriever import VectorRetriever

Rule: TypeAlias = Literal["adaptive", "always", "off"]
"""When to speculate: when the expected gain is greatest; at once, from what the last search of the
session has found (RaLMSpec); never."""

_BINS = 32
_FADING = 0.98
_LEAST_PROBABILITY = 0.3
_PRIOR_BINS = (8, 4.0)
"""Until searches have ended: previews of a quarter of a search are final, as if seen four times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowOptions:
    """How a workflow engine works. No option changes what a run returns.

    Args:
        max_in_flight: Runs at a time; others wait in the order of arrival.
        reorder: Whether a search begins where the last one of its run or session has found
            something.
        speculation: When to start a generation before its retrieval has ended.
        speculative_retrieval: Whether a search begins with a part of the text that will be its
            query, to tell the real one which clusters to scan first.
        max_generations: No speculation while this many generations are under way (HedraRAG, 4.3).
        max_retrievals: No speculative retrieval while this many searches are under way.
        max_wasted_share: The part of all generated tokens that wrong speculations may have cost.
        workers: Scans at a time, each in a thread; None takes one for each CPU.
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
        checked_choice("rule of speculation", self.speculation, get_args(Rule))
        checked_integer("max_in_flight", self.max_in_flight, 1)
        checked_integer("max_generations", self.max_generations)
        checked_integer("max_retrievals", self.max_retrievals)
        checked_optional_integer("workers", self.workers, 1)
        checked_share("max_wasted_share", self.max_wasted_share)


DEFAULT_RETRIEVER = "default"
"""The name of the retriever that is asked where a node names none."""

NodeKey: TypeAlias = tuple[str, str]
"""A workflow's name and a node's."""

_MOST_NODES = 10_000
_MOST_SESSIONS = 10_000
_MOST_SESSION_BYTES = 256 * 2**20
_MOST_SPANS = 20_000
_OTHER_THREADS = 2
"""For work that is not a search: looking up vectors, filling the hot tier."""


@dataclass(slots=True)
class GenerationStatistics:
    """Averages of a node's generations: seconds and tokens of one."""

    seconds: MovingMean = field(default_factory=lambda: MovingMean(0.5))
    tokens: MovingMean = field(default_factory=lambda: MovingMean(48.0))


class PreviewStability:
    """Learns how often the best k are final after a part of a search; best is `launch_at`."""

    def __init__(self) -> None:
        self._ended = np.zeros(_BINS + 1)
        self._ended[_PRIOR_BINS[0]] = _PRIOR_BINS[1]
        self._recalled = np.array([0.0, 1.0])
        self._learn()

    def observe(self, changed_at: float) -> None:
        """Learn from a search whose best k changed last after a part of it, from 0 to 1."""
        self._ended *= _FADING
        self._ended[min(_BINS, int(np.ceil(changed_at * _BINS)))] += 1
        self._learn()

    def probability(self, progress: float) -> float:
        """Return the probability that a preview is final, after a part (0 to 1) of the search."""
        return float(self._final[min(_BINS, int(progress * _BINS))])

    def is_worth_it(self, progress: float) -> bool:
        """Return whether to launch now: not much more is to be gained by waiting."""
        return progress >= self.launch_at and self.probability(progress) >= _LEAST_PROBABILITY

    def observe_recalled(self, is_final: bool) -> None:
        """Learn whether the nearest results of the last search were those of a new one."""
        self._recalled = _FADING * self._recalled + np.array([is_final, 1.0])

    def is_recalled_worth_it(self) -> bool:
        """Return whether to launch from the last search's results, before anything is scanned."""
        probability = self._recalled[0] / self._recalled[1]
        return bool(probability >= max(self._gain, _LEAST_PROBABILITY))

    def _learn(self) -> None:
        self._final = np.cumsum(self._ended) / self._ended.sum()
        gains = self._final * (1.0 - np.arange(_BINS + 1) / _BINS)
        best = int(np.argmax(gains[1:])) + 1  # before the first part there is nothing to preview
        self.launch_at, self._gain = best / _BINS, gains[best]


class Services:
    """What the runs of an engine share; of other tenants' runs a tenant gets averages only."""

    def __init__(
        self,
        llm: LanguageModel | None,
        retrievers: dict[str, Retriever],
        planner: ReusePlanner | None,
        options: WorkflowOptions,
        execute: Execute | None,
        clock: Callable[[], float],
    ) -> None:
        self.options = options
        self.clock = clock
        self.generations = Generations(llm, planner)
        self.sessions: TenantLRUMap[tuple[bytes, str], SearchRecord] = TenantLRUMap(
            _MOST_SESSIONS,
            max_weight=_MOST_SESSION_BYTES,
            weight_of=lambda record: record.size_bytes,
        )
        self.generation_statistics = LRUMap[NodeKey, GenerationStatistics](_MOST_NODES)
        self.preview_stability = LRUMap[tuple[NodeKey, bool], PreviewStability](_MOST_NODES)
        self.speculation = SpeculationCounters()
        self.speculating = FailOpen(
            "WorkflowEngine", "stages begin when they are due", work="speculation, or its history,"
        )
        self.timeline = Timeline(maxlen=_MOST_SPANS)
        self._threads = Threads(_OTHER_THREADS)
        cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        workers = options.workers or cpus or 1
        self.retrievers = retrievers
        self.executors = {
            name: SearchExecutor(
                retriever,
                self._threads if execute is None else execute,
                # a worker stays as long as there is work: not in the way of other retrievers
                threads=Threads(workers) if execute is None else None,
                workers=workers,
                reorder=options.reorder,
                clock=clock,
            )
            for name, retriever in retrievers.items()
            if isinstance(retriever, VectorRetriever)
        }

    @property
    def parts(self) -> dict[str, PartSize]:
        """How much is remembered, and how much may be; all tenants together."""
        return {
            "sessions": self.sessions.size,
            "session_bytes": self.sessions.weight_size,
            "generation_statistics": self.generation_statistics.size,
            "preview_stability": self.preview_stability.size,
            "timeline": PartSize(len(self.timeline), _MOST_SPANS),
        }

    async def close(self) -> None:
        """Wait for the searches, and end the threads."""
        for executor in self.executors.values():
            await executor.close()
        self._threads.close()


@dataclass(frozen=True, slots=True)
class RunContext:
    """A run among others."""

    services: Services
    graph: Graph
    emit: Emit
    number: int  # in its engine, from 1
    tenant: str = ""
    session: bytes | None = None  # a digest

    def usual(self, node: Generation) -> GenerationStatistics:
        """Return the averages of a node's generations, in all runs."""
        key = (self.graph.name, node.name)
        return self.services.generation_statistics.get_or_make(key, GenerationStatistics)

    def record(self, node: Node, visit: int, began_s: float, outcome: Outcome) -> None:
        """Enter a stage that has ended into the timeline."""
        kind = type(node).__name__.lower()
        ended_s = self.services.clock()
        self.services.timeline.append(
            Span(self.number, self.graph.name, node.name, visit, kind, began_s, ended_s, outcome)
        )
