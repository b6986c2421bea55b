"""RAG workflows as graphs of generations and retrievals, many at once over one engine."""

from ctxreuse.workflow.compiled import Graph
from ctxreuse.workflow.documents import Documents
from ctxreuse.workflow.embedders import (
    LangChainEmbedder,
    SentenceTransformerEmbedder,
    TfidfEmbedder,
)
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
from ctxreuse.workflow.fusion import FusedRetriever
from ctxreuse.workflow.gpu_tier import GpuTier, fastest_tier
from ctxreuse.workflow.graph import WorkflowGraph
from ctxreuse.workflow.ivf import IVFIndex
from ctxreuse.workflow.keyword import KeywordRetriever
from ctxreuse.workflow.llm import LanguageModel, Piece
from ctxreuse.workflow.memory_split import ThroughputTable, split_memory
from ctxreuse.workflow.nodes import END, START
from ctxreuse.workflow.openai_llm import OpenAILLM
from ctxreuse.workflow.options import EngineOptions
from ctxreuse.workflow.results import SearchResult, WorkflowResult
from ctxreuse.workflow.retrievers import CallableRetriever, Retriever
from ctxreuse.workflow.state import State
from ctxreuse.workflow.tiers import HotTier
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
    "SentenceTransformerEmbedder",
    "StageError",
    "State",
    "StateKeyError",
    "TextDelta",
    "TfidfEmbedder",
    "ThroughputTable",
    "VectorRetriever",
    "VisitLimitError",
    "WorkflowEngine",
    "WorkflowError",
    "WorkflowGraph",
    "WorkflowResult",
    "fastest_tier",
    "hyde",
    "irg",
    "multistep",
    "one_shot",
    "recomp",
    "split_memory",
]
