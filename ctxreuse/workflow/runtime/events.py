"""The events of a run, and its result. Nothing speculative is ever shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ctxreuse.workflow.graph.state import Documents, State


@dataclass(frozen=True, slots=True)
class WorkflowResult:
    """The result of a run.

    Attributes:
        answer: The value of the workflow's answer key; None if no node has written it.
        state: All values, by key.
        visited: The nodes in the order in which they ended, wavefront by wavefront.
        seconds: How long the run took, its wait for a slot included.
    """

    answer: Any
    state: State
    visited: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        return str(self.answer)


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The documents that a search has found, best first.

    Scores are inner products, or negated squared distances; None if the retriever gives none.
    """

    documents: Documents
    scores: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class _NodeEvent:
    node: str
    visit: int


@dataclass(frozen=True, slots=True)
class NodeStarted(_NodeEvent):
    """A node begins; `visit` counts its visits in this run, from 1."""


@dataclass(frozen=True, slots=True)
class TextDelta(_NodeEvent):
    """A generation has a new piece of text."""

    text: str


@dataclass(frozen=True, slots=True)
class DocumentsFound(_NodeEvent):
    """A retrieval has ended, with documents and scores as in `SearchResult`."""

    documents: Documents
    scores: tuple[float, ...] | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class NodeFinished(_NodeEvent):
    """A node has ended, and has written `value`."""

    value: Any


@dataclass(frozen=True, slots=True)
class RunFinished:
    """The run has ended; this is the last event."""

    result: WorkflowResult


Event: TypeAlias = NodeStarted | TextDelta | DocumentsFound | NodeFinished | RunFinished
Emit: TypeAlias = Callable[[Event], object]
