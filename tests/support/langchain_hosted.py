"""LangChain's own models at a provider whose cache is emulated, and what they are asked."""

from typing import Any

from caching_provider import count_tokens
from caching_server import CachingServer
from langchain_anthropic import ChatAnthropic
from langchain_core.documents import Document
from langchain_openai import ChatOpenAI

from ctxreuse import ReusePlanner
from langchain_ctxreuse import ReuseChatModel


def chat_model(server: CachingServer, **settings: Any) -> Any:
    settings = {"model": "m", "api_key": "k", "max_retries": 0, **settings}
    if server.provider.protocol == "openai":
        return ChatOpenAI(base_url=f"{server.url}/v1", **settings)
    return ChatAnthropic(base_url=server.url, max_tokens=9, **settings)


def planner_for(server: CachingServer, cache: str | None = None) -> ReusePlanner:
    return ReusePlanner(cache=cache or server.provider.protocol, token_counter=count_tokens)


def wrapped(
    server: CachingServer, cache: str | None = None, inner: Any = None, **settings: Any
) -> ReuseChatModel:
    settings = {"window_s": 0, "planner": planner_for(server, cache), **settings}
    return ReuseChatModel(inner=inner or chat_model(server), **settings)


def found(query: str, words: int = 800) -> list[Document]:
    """Return the documents that a query names, of so many words each."""
    names = query.rstrip("?").split()
    return [
        Document(id=name, page_content=f"{name} says: {'well ' * words}{name}") for name in names
    ]
