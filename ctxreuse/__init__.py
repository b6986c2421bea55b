"""ctxreuse: retrieved blocks in, prompts that hit the engine's prefix cache out."""

from ctxreuse.annotations import Templates
from ctxreuse.blocks import ContextBlock, ContextRequest
from ctxreuse.chat import Conversation
from ctxreuse.errors import CtxreuseError
from ctxreuse.index import Evicted
from ctxreuse.planner import ReusePlanner
from ctxreuse.plans import BatchPlan, Plan
from ctxreuse.request_scope import request_context

__version__ = "0.1.0"

__all__ = [
    "BatchPlan",
    "ContextBlock",
    "ContextRequest",
    "Conversation",
    "CtxreuseError",
    "Evicted",
    "Plan",
    "ReusePlanner",
    "Templates",
    "request_context",
]
