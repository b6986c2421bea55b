"""ctxreuse for LangChain: a retriever, a compressor, a chat model and an agent middleware.

Each is swapped in for, or wrapped around, what an application has already.

A `ctxreuse.workflow.WorkflowEngine` plugs in as `WorkflowRetriever`, as `LinkedChain` (retriever,
prompt and model), or with a whole graph as `WorkflowRunnable`; `LangChainLLM` and `RetrieverStage`
serve LangChain's models and retrievers to the engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ctxreuse.errors import MissingExtraError

try:
    import langchain_core  # noqa: F401  # the one package that all of this needs
except ImportError as error:
    raise MissingExtraError("langchain_ctxreuse", "langchain") from error

from langchain_ctxreuse.compressor import ReuseCompressor
from langchain_ctxreuse.formatting import format_context
from langchain_ctxreuse.retriever import ReuseRetriever

if TYPE_CHECKING:
    from langchain_ctxreuse.chat_model import ReuseChatModel
    from langchain_ctxreuse.linked import LinkedChain
    from langchain_ctxreuse.middleware import ReuseMiddleware
    from langchain_ctxreuse.workflow_model import LangChainLLM
    from langchain_ctxreuse.workflow_retriever import WorkflowRetriever
    from langchain_ctxreuse.workflow_runnable import WorkflowRunnable
    from langchain_ctxreuse.workflow_stage import RetrieverStage

__all__ = [
    "LangChainLLM",
    "LinkedChain",
    "RetrieverStage",
    "ReuseChatModel",
    "ReuseCompressor",
    "ReuseMiddleware",
    "ReuseRetriever",
    "WorkflowRetriever",
    "WorkflowRunnable",
    "format_context",
]

_ON_DEMAND = {
    "LangChainLLM": "workflow_model",
    "LinkedChain": "linked",
    "RetrieverStage": "workflow_stage",
    "ReuseChatModel": "chat_model",
    "ReuseMiddleware": "middleware",
    "WorkflowRetriever": "workflow_retriever",
    "WorkflowRunnable": "workflow_runnable",
}


def __getattr__(name: str) -> Any:
    """Import what needs more than langchain-core, or much of it, when it is asked for."""
    if name not in _ON_DEMAND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ON_DEMAND[name]}"), name)
