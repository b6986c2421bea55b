"""ctxreuse for LlamaIndex: a postprocessor, a retriever, a model, memories and a chat engine.

Each is swapped in for, or wrapped around, what an application has already.

Tenant, conversation and history reach all of them through `ctxreuse.request_context`, across
`await`, `asyncio_run`, `run_jobs` and LlamaIndex's own threads. Steps of a workflow run in the
context in which its `run` was called, whoever sends them events; what a step sets ends with it.
A thread pool of one's own loses it, unless work goes through `contextvars.copy_context().run`.

A `ctxreuse.workflow.WorkflowEngine` plugs in as `WorkflowRetriever` or as `LinkedQueryEngine`
(retriever, template and model); a step of a workflow awaits the engine's `run`. `LlamaIndexLLM` and
`RetrieverStage` serve LlamaIndex's models and retrievers to the engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ctxreuse.errors import MissingExtraError

try:
    import llama_index.core  # noqa: F401  # the one package that all of this needs
except ImportError as error:
    raise MissingExtraError("llamaindex_ctxreuse", "llamaindex") from error

from llamaindex_ctxreuse.chat_engine import ReuseChatEngine
from llamaindex_ctxreuse.formatting import format_context
from llamaindex_ctxreuse.llm import ReuseLLM
from llamaindex_ctxreuse.memory_block import ReuseMemoryBlock
from llamaindex_ctxreuse.postprocessor import ReusePostprocessor
from llamaindex_ctxreuse.replay_memory import ReplayMemory, reuse_memory
from llamaindex_ctxreuse.retriever import ReuseRetriever

if TYPE_CHECKING:
    from llamaindex_ctxreuse.linked import LinkedQueryEngine
    from llamaindex_ctxreuse.workflow_model import LlamaIndexLLM
    from llamaindex_ctxreuse.workflow_retriever import WorkflowRetriever
    from llamaindex_ctxreuse.workflow_stage import RetrieverStage

__all__ = [
    "LinkedQueryEngine",
    "LlamaIndexLLM",
    "ReplayMemory",
    "RetrieverStage",
    "ReuseChatEngine",
    "ReuseLLM",
    "ReuseMemoryBlock",
    "ReusePostprocessor",
    "ReuseRetriever",
    "WorkflowRetriever",
    "format_context",
    "reuse_memory",
]

_ON_DEMAND = {
    "LinkedQueryEngine": "linked",
    "LlamaIndexLLM": "workflow_model",
    "RetrieverStage": "workflow_stage",
    "WorkflowRetriever": "workflow_retriever",
}


def __getattr__(name: str) -> Any:
    """Import what workflows need when it is asked for."""
    if name not in _ON_DEMAND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ON_DEMAND[name]}"), name)
