"""Talking to engines: a client, dispatch of batches, an emulated engine for tests.

A wrong type or value raises `InvalidRequestError` everywhere. Optional packages (`openai`,
`tenacity`) are imported when a client is made.
"""

from ctxreuse.serving.client.engine_client import EngineClient
from ctxreuse.serving.client.reply import Completion, ToolCall
from ctxreuse.serving.client.request import CompletionStream
from ctxreuse.serving.dispatch import Answered, Failed, Outcome, dispatch, progress_bar
from ctxreuse.serving.emulation.emulated_engine import EmulatedEngine
from ctxreuse.serving.pool.engine_pool import EnginePool, EngineSpec, PoolResult, PoolStream
from ctxreuse.serving.pool.replica import ReplicaStatus

__all__ = [
    "Answered",
    "Completion",
    "CompletionStream",
    "EmulatedEngine",
    "EngineClient",
    "EnginePool",
    "EngineSpec",
    "Failed",
    "Outcome",
    "PoolResult",
    "PoolStream",
    "ReplicaStatus",
    "ToolCall",
    "dispatch",
    "progress_bar",
]
