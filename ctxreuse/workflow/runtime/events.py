"""What a run shows, as it happens, and its result. Nothing speculative is ever shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ctxreuse.workflow.graph.state import Documents, State


@dataclass(frozen=True, slots=True)
class WorkflowResult:
    """The result of a run.

    Attributes:
        answer: What the workflow's answer key holds; None where nothing has written it.
        state: All values, by key.
        visited: The nodes in the order in which they ended, wavefront by wavefront.
        seconds: How long the run took, its wait for a turn included.
    """

    answer: Any
    state: State
    visited: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        return str(self.answer)


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What a search has found.

    Attributes:
        documents: The documents, best first.
        scores: How near each of them is, the higher the nearer: inner products, or squared
            distances with a minus sign. None where the retriever does not say.
    """

    documents: Documents
    scores: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class NodeStarted:
    """A node begins.

    Attributes:
        node: Its name.
        visit: Which visit of it in this run, from 1.
    """

    node: str
    visit: int


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A generation has said something more.

    Attributes:
        node: The node's name.
        visit: Which visit of it.
        text: The piece of text.
    """

    node: str
    visit: int
    text: str


@dataclass(frozen=True, slots=True)
class DocumentsFound:
    """A retrieval has ended.

    Attributes:
        node: The node's name.
        visit: Which visit of it.
        documents: What it has found, best first.
        scores: How near each of them is, the higher the nearer: inner products, or squared
            distances with a minus sign. None where the retriever does not say.
    """

    node: str
    visit: int
    documents: Documents
    scores: tuple[float, ...] | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class NodeFinished:
    """A node has ended.

    Attributes:
        node: Its name.
        visit: Which visit of it.
        value: What it has written.
    """

    node: str
    visit: int
    value: Any


@dataclass(frozen=True, slots=True)
class RunFinished:
    """The run has ended; nothing comes after this.

    Attributes:
        result: What it has brought.
    """

    result: WorkflowResult


Event: TypeAlias = NodeStarted | TextDelta | DocumentsFound | NodeFinished | RunFinished
Emit: TypeAlias = Callable[[Event], None]
