"""RAG workflows as graphs of generations and retrievals, many at once over one engine."""

from ctxreuse.workflow.compiled import Graph
from ctxreuse.workflow.documents import Documents
from ctxreuse.workflow.emulated_llm import EmulatedLLM
from ctxreuse.workflow.engine import WorkflowEngine
from ctxreuse.workflow.errors import (
    DeadlineError,
    EngineClosedError,
    GraphError,
    RouterError,
    StageError,
    StateKeyError,
    VisitLimitError,
    WorkflowError,
)
from ctxreuse.workflow.events import (
    DocumentsFound,
    Event,
    NodeFinished,
    NodeStarted,
    RunFinished,
    TextDelta,
)
from ctxreuse.workflow.graph import WorkflowGraph
from ctxreuse.workflow.llm import LanguageModel, Piece
from ctxreuse.workflow.nodes import END, START
from ctxreuse.workflow.openai_llm import OpenAILLM
from ctxreuse.workflow.options import EngineOptions
from ctxreuse.workflow.results import SearchResult, WorkflowResult
from ctxreuse.workflow.retrievers import CallableRetriever, Retriever
from ctxreuse.workflow.state import State
from ctxreuse.workflow.vector_retriever import VectorRetriever
from ctxreuse.workflow.workflows import hyde, irg, multistep, one_shot, recomp

__all__ = [
    "END",
    "START",
    "CallableRetriever",
    "DeadlineError",
    "Documents",
    "DocumentsFound",
    "EmulatedLLM",
    "EngineClosedError",
    "EngineOptions",
    "Event",
    "Graph",
    "GraphError",
    "LanguageModel",
    "NodeFinished",
    "NodeStarted",
    "OpenAILLM",
    "Piece",
    "Retriever",
    "RouterError",
    "RunFinished",
    "SearchResult",
    "StageError",
    "State",
    "StateKeyError",
    "TextDelta",
    "VectorRetriever",
    "VisitLimitError",
    "WorkflowEngine",
    "WorkflowError",
    "WorkflowGraph",
    "WorkflowResult",
    "hyde",
    "irg",
    "multistep",
    "one_shot",
    "recomp",
]
