"""ctxreuse for LlamaIndex: a postprocessor, a retriever, a model, memories and a chat engine.

Each is swapped in for, or wrapped around, what an application has already.

Tenant, conversation and history reach all of them through `ctxreuse.request_context`, across
`await`, `asyncio_run`, `run_jobs` and LlamaIndex's own threads. Steps of a workflow run in the
context in which its `run` was called, whoever sends them events; what a step sets ends with it.
A thread pool of one's own loses it, unless work goes through `contextvars.copy_context().run`.
"""

from __future__ import annotations

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

__all__ = [
    "ReplayMemory",
    "ReuseChatEngine",
    "ReuseLLM",
    "ReuseMemoryBlock",
    "ReusePostprocessor",
    "ReuseRetriever",
    "format_context",
    "reuse_memory",
]
