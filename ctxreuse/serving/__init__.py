"""Talking to engines: a client, dispatch of batches, an emulated engine for tests.

Nothing is imported here that needs an optional package; `openai` and `tenacity` are imported when a
client is made.
"""

from ctxreuse.serving.client import EngineClient
from ctxreuse.serving.completion import Completion, ToolCall
from ctxreuse.serving.dispatch import Outcome, dispatch, progress_bar
from ctxreuse.serving.emulated import EmulatedEngine
from ctxreuse.serving.pool import EnginePool
from ctxreuse.serving.replica import ReplicaStatus
from ctxreuse.serving.replicas import Engine
from ctxreuse.serving.served import PoolStream, Served
from ctxreuse.serving.stream import CompletionStream

__all__ = [
    "Completion",
    "CompletionStream",
    "EmulatedEngine",
    "Engine",
    "EngineClient",
    "EnginePool",
    "Outcome",
    "PoolStream",
    "ReplicaStatus",
    "Served",
    "ToolCall",
    "dispatch",
    "progress_bar",
]
