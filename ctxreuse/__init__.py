"""ctxreuse: retrieved blocks in, prompts that hit the engine's prefix cache out."""

from sys import modules
from typing import TYPE_CHECKING

from ctxreuse.context.blocks import ContextBlock, ContextRequest
from ctxreuse.context.rendering import PAPER_TEMPLATES, Templates
from ctxreuse.context.scope import request_context
from ctxreuse.errors import CtxreuseError
from ctxreuse.memory.prefix_index import Evicted
from ctxreuse.planner import ReusePlanner
from ctxreuse.planning.conversation import Conversation
from ctxreuse.planning.plan import BatchPlan, Plan
from ctxreuse.rules.cache_rules import CacheRules, TimeToLive, cache_profile

__version__ = "0.1.0"

__all__ = [
    "PAPER_TEMPLATES",
    "BatchPlan",
    "CacheRules",
    "ContextBlock",
    "ContextRequest",
    "Conversation",
    "CtxreuseError",
    "Evicted",
    "Plan",
    "ReusePlanner",
    "Templates",
    "TimeToLive",
    "cache_profile",
    "request_context",
]

_ELSEWHERE = {
    "EngineClient": "in ctxreuse.serving",
    "ReuseChatModel": "in langchain_ctxreuse",
    "ReuseLLM": "in llamaindex_ctxreuse",
    "ReuseMemory": "in mem0_ctxreuse",
}

if not TYPE_CHECKING:  # checkers would take every name to be here

    def __getattr__(name: str) -> object:
        """Say in which package a name is that is not here."""
        where = f"; it is {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
        raise AttributeError(f"ctxreuse has no {name!r}{where}", name=name, obj=modules[__name__])
