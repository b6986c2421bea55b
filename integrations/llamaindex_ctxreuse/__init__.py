"""ctxreuse for LlamaIndex: a postprocessor, a retriever, a model, memories and a chat engine.

Each replaces or wraps a part that an application has already. Tenant, conversation and history
reach all of them through `ctxreuse.request_context`; your own thread pool loses it, unless work
goes through `contextvars.copy_context().run`. A `ctxreuse.workflow.WorkflowEngine` plugs in as
`WorkflowRetriever` or as `SpeculativeRAGQueryEngine`. A wrong type or value raises
`InvalidRequestError`; where pydantic checks it, `ValueError`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ctxreuse.context.fork_safety import on_demand
from ctxreuse.errors import MissingExtraError

try:
    import llama_index.core  # noqa: F401  # the one package that all of this needs
except ImportError as error:
    raise MissingExtraError("llamaindex_ctxreuse", "llamaindex") from error

from llamaindex_ctxreuse.chat.chat_engine import ReuseChatEngine
from llamaindex_ctxreuse.llm.reuse_llm import ReuseLLM
from llamaindex_ctxreuse.memory.memory_block import ReuseMemoryBlock
from llamaindex_ctxreuse.memory.replay_memory import ReplayMemory, reuse_memory
from llamaindex_ctxreuse.nodes.node_components import ReusePostprocessor, ReuseRetriever
from llamaindex_ctxreuse.nodes.node_plans import cited_nodes, format_context

if TYPE_CHECKING:
    from llamaindex_ctxreuse.workflow.engine_components import (
        LlamaIndexLLM,
        RetrieverStage,
        SpeculativeRAGQueryEngine,
        WorkflowRetriever,
    )

__all__ = [
    "LlamaIndexLLM",
    "ReplayMemory",
    "RetrieverStage",
    "ReuseChatEngine",
    "ReuseLLM",
    "ReuseMemoryBlock",
    "ReusePostprocessor",
    "ReuseRetriever",
    "SpeculativeRAGQueryEngine",
    "WorkflowRetriever",
    "cited_nodes",
    "format_context",
    "reuse_memory",
]

_LATE = ("LlamaIndexLLM", "RetrieverStage", "SpeculativeRAGQueryEngine", "WorkflowRetriever")
__getattr__, __dir__ = on_demand(__name__, dict.fromkeys(_LATE, "workflow.engine_components"))
