"""What a run brings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ctxreuse.workflow.graph.found_documents import Documents
from ctxreuse.workflow.graph.state import State


@dataclass(frozen=True, slots=True)
class WorkflowResult:
    """The end of a run.

    Attributes:
        answer: What the workflow's answer key holds; None where nothing has written it.
        state: All values, by key.
        visited: The nodes as they ended, wavefront by wavefront.
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
