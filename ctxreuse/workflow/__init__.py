"""RAG workflows as graphs of generations and retrievals, many at once over one engine.

A wrong type or value raises `InvalidRequestError`, in a graph `GraphError`, everywhere.
"""

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
from ctxreuse.workflow.graph.builder import WorkflowGraph
from ctxreuse.workflow.graph.compiled import Graph
from ctxreuse.workflow.graph.nodes import END, START
from ctxreuse.workflow.graph.state import Documents, State
from ctxreuse.workflow.library import hyde, irg, multistep, one_shot, recomp
from ctxreuse.workflow.memory_split import ThroughputTable, split_memory
from ctxreuse.workflow.models.embedders import LangChainEmbedder, TfidfEmbedder, WordLlamaEmbedder
from ctxreuse.workflow.models.emulated_llm import EmulatedLLM
from ctxreuse.workflow.models.language_model import LanguageModel, OpenAILLM, Piece
from ctxreuse.workflow.retrievers import (
    CallableRetriever,
    FusedRetriever,
    KeywordRetriever,
    Retriever,
)
from ctxreuse.workflow.runtime.events import (
    DocumentsFound,
    Event,
    NodeFinished,
    NodeStarted,
    RunFinished,
    SearchResult,
    TextDelta,
    WorkflowResult,
)
from ctxreuse.workflow.runtime.services import WorkflowOptions
from ctxreuse.workflow.vector_search.gpu_tier import GpuTier, fastest_tier
from ctxreuse.workflow.vector_search.hot_tier import HotTier
from ctxreuse.workflow.vector_search.ivf import IVFIndex
from ctxreuse.workflow.vector_search.vector_retriever import VectorRetriever

__all__ = [
    "END",
    "START",
    "CallableRetriever",
    "DeadlineError",
    "Documents",
    "DocumentsFound",
    "EmulatedLLM",
    "EngineClosedError",
    "Event",
    "FusedRetriever",
    "GpuTier",
    "Graph",
    "GraphError",
    "HotTier",
    "IVFIndex",
    "KeywordRetriever",
    "LangChainEmbedder",
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
    "TfidfEmbedder",
    "ThroughputTable",
    "VectorRetriever",
    "VisitLimitError",
    "WordLlamaEmbedder",
    "WorkflowEngine",
    "WorkflowError",
    "WorkflowGraph",
    "WorkflowOptions",
    "WorkflowResult",
    "fastest_tier",
    "hyde",
    "irg",
    "multistep",
    "one_shot",
    "recomp",
    "split_memory",
]
