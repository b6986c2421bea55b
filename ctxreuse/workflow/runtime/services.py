"""What the runs of an engine share, in one event loop."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from ctxreuse.context.fail_open import FailOpen
from ctxreuse.workflow.retrievers.atomic import Retriever
from ctxreuse.workflow.runtime.generations import Generations
from ctxreuse.workflow.runtime.options import WorkflowOptions
from ctxreuse.workflow.runtime.speculation import PreviewStability, SpeculationCounters
from ctxreuse.workflow.runtime.timeline import Timeline
from ctxreuse.workflow.vector_search.costs import MovingMean
from ctxreuse.workflow.vector_search.search_lane import SearchExecutor
from ctxreuse.workflow.vector_search.sessions import Sessions

DEFAULT_RETRIEVER = "default"
"""The name of the retriever that is asked where a node names none."""

NodeKey: TypeAlias = tuple[str, str]
"""A workflow's name and a node's."""

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
_MOST_NODES = 10_000


@dataclass(slots=True)
class GenerationStatistics:
    """What the generations of a node are like.

    Attributes:
        seconds: How long one takes.
        tokens: How many tokens it brings.
    """

    seconds: MovingMean = field(default_factory=lambda: MovingMean(0.5))
    tokens: MovingMean = field(default_factory=lambda: MovingMean(48.0))


class Statistics:
    """What has been learned of nodes; those that were not used for long are forgotten."""

    def __init__(self) -> None:
        self._generations: OrderedDict[NodeKey, GenerationStatistics] = OrderedDict()
        self._finality: OrderedDict[tuple[NodeKey, bool], PreviewStability] = OrderedDict()

    def generations(self, node: NodeKey) -> GenerationStatistics:
        """Return what a generation node's answers are like."""
        return _kept(self._generations, node, GenerationStatistics)

    def finality(self, node: NodeKey, has_history: bool) -> PreviewStability:
        """Return when the previews of a retrieval node are final, with or without a last search."""
        return _kept(self._finality, (node, has_history), PreviewStability)


def _kept(values: OrderedDict[_Key, _Value], key: _Key, make: Callable[[], _Value]) -> _Value:
    if key not in values:
        values[key] = make()
        if len(values) > _MOST_NODES:
            values.popitem(last=False)
    values.move_to_end(key)
    return values[key]


@dataclass(slots=True, kw_only=True)
class Services:
    """What the runs of an engine share.

    Attributes:
        generations: The model.
        lanes: The step-wise retrievers, by name.
        retrievers: The atomic ones.
        options: How the engine works.
        sessions: The last searches of sessions that outlast a run.
        statistics: What has been learned.
        speculation: What speculation has brought.
        speculating: Keeps what goes wrong with it, or with its history, from the runs.
        timeline: What happened when.
        clock: Seconds from any start.
    """

    generations: Generations
    lanes: Mapping[str, SearchExecutor]
    retrievers: Mapping[str, Retriever]
    options: WorkflowOptions
    sessions: Sessions
    statistics: Statistics
    speculation: SpeculationCounters
    speculating: FailOpen = field(
        default_factory=lambda: FailOpen(
            "WorkflowEngine", "stages begin when they are due", work="speculation, or its history,"
        )
    )
    timeline: Timeline
    clock: Callable[[], float]
