"""ctxreuse for LangChain: a retriever, a compressor, a chat model and an agent middleware.

Each is swapped in for, or wrapped around, what an application has already.
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
    from langchain_ctxreuse.middleware import ReuseMiddleware

__all__ = [
    "ReuseChatModel",
    "ReuseCompressor",
    "ReuseMiddleware",
    "ReuseRetriever",
    "format_context",
]

_ON_DEMAND = {"ReuseChatModel": "chat_model", "ReuseMiddleware": "middleware"}


def __getattr__(name: str) -> Any:
    """Import what needs more than langchain-core, or much of it, when it is asked for."""
    if name not in _ON_DEMAND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ON_DEMAND[name]}"), name)
