"""Talking to engines: a client, dispatch of batches, an emulated engine for tests.

Nothing is imported here that needs an optional package; `openai` and `tenacity` are imported when a
client is made.
"""

from ctxreuse.serving.client import CompletionStream, EngineClient
from ctxreuse.serving.completion import Completion
from ctxreuse.serving.dispatch import Outcome, dispatch, progress_bar
from ctxreuse.serving.emulated import EmulatedEngine
from ctxreuse.serving.openai_replies import ToolCall

__all__ = [
    "Completion",
    "CompletionStream",
    "EmulatedEngine",
    "EngineClient",
    "Outcome",
    "ToolCall",
    "dispatch",
    "progress_bar",
]
