"""ctxreuse for LangChain: a retriever, a compressor, a chat model, an agent middleware, a store.

Each replaces a component that an application has, or wraps it. A `ctxreuse.workflow.WorkflowEngine`
plugs in as `WorkflowRetriever`, `SpeculativeRAGChain` or, with a whole graph, `WorkflowRunnable`.
A wrong type or value raises `InvalidRequestError`; where pydantic checks it, `ValueError`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ctxreuse.context.fork_safety import on_demand
from ctxreuse.errors import MissingExtraError

try:
    import langchain_core  # noqa: F401  # the one package that all of this needs
except ImportError as error:
    raise MissingExtraError("langchain_ctxreuse", "langchain") from error

from langchain_ctxreuse.documents.document_components import ReuseCompressor, ReuseRetriever
from langchain_ctxreuse.documents.document_plans import cited_documents, format_context

if TYPE_CHECKING:
    from langchain_ctxreuse.agents.middleware import ReuseMiddleware
    from langchain_ctxreuse.chat_model.reuse_chat_model import ReuseChatModel
    from langchain_ctxreuse.reuse_store import ReuseStore
    from langchain_ctxreuse.workflow.served_components import LangChainLLM, RetrieverStage
    from langchain_ctxreuse.workflow.workflow_runnable import (
        SpeculativeRAGChain,
        WorkflowRetriever,
        WorkflowRunnable,
    )

__all__ = [
    "LangChainLLM",
    "RetrieverStage",
    "ReuseChatModel",
    "ReuseCompressor",
    "ReuseMiddleware",
    "ReuseRetriever",
    "ReuseStore",
    "SpeculativeRAGChain",
    "WorkflowRetriever",
    "WorkflowRunnable",
    "cited_documents",
    "format_context",
]

_LATE = {
    "LangChainLLM": "workflow.served_components",
    "SpeculativeRAGChain": "workflow.workflow_runnable",
    "RetrieverStage": "workflow.served_components",
    "ReuseChatModel": "chat_model.reuse_chat_model",
    "ReuseMiddleware": "agents.middleware",
    "ReuseStore": "reuse_store",
    "WorkflowRetriever": "workflow.workflow_runnable",
    "WorkflowRunnable": "workflow.workflow_runnable",
}
# these need more than langchain-core, or much of it
__getattr__, __dir__ = on_demand(__name__, _LATE)
