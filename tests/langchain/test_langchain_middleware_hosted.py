"""Agents in front of hosted caches: marks of ours beside those of Anthropic's middleware."""

from typing import Any

import pytest
from caching_provider import count_tokens
from caching_server import CachingServer, caching_server
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_anthropic.middleware import AnthropicPromptCachingMiddleware
from langchain_core.documents import Document
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from ctxreuse import ReusePlanner
from langchain_ctxreuse import ReuseMiddleware

ROUNDS = ["one two three", "two one four", "five one two", "one two", "two one six"]


def found(query: str) -> list[Document]:
    names = query.rstrip("?").split()
    return [Document(id=name, page_content=f"{name} " * 800) for name in names]


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def agent_at(server: CachingServer, *others: Any, **planning: Any) -> Any:
    kind = server.provider.protocol
    model: Any
    if kind == "anthropic":
        model = ChatAnthropic(model="m", base_url=server.url, api_key="k", max_tokens=9)
    else:
        model = ChatOpenAI(model="m", base_url=f"{server.url}/v1", api_key="k")
    planner = ReusePlanner(cache=planning.get("cache", kind), token_counter=count_tokens)
    ours = ReuseMiddleware(planner=planner, retriever=RunnableLambda(found))
    return create_agent(model, tools=[add], middleware=[*others, ours], system_prompt="Be brief.")


def ask(agent: Any, query: str, before: list[Any] | None = None) -> list[Any]:
    messages = [*(before or []), {"role": "user", "content": query}]
    answered: list[Any] = agent.invoke({"messages": messages})["messages"]
    return answered


def texts_of(body: dict[str, Any]) -> str:
    contents = [one["content"] for one in body["messages"]]
    parts = [[c] if isinstance(c, str) else c for c in contents]
    return "".join(p if isinstance(p, str) else p["text"] for part in parts for p in part)


@pytest.mark.parametrize("kind", ["anthropic", "openai"])
def test_users_who_share_documents_read_them(kind):
    with caching_server(kind) as server:
        agent = agent_at(server)
        for query in [*ROUNDS, *ROUNDS]:
            ask(agent, query)
            said = texts_of(server.bodies[-1])
            assert all(one.page_content in said for one in found(query))
            assert said.endswith(f"\n\n{query}")
        assert any(usage.read > 800 for usage in server.usages)
        assert not server.refusals


@pytest.mark.parametrize("kind", ["anthropic", "openai"])
def test_each_turn_reads_the_turn_before(kind):
    with caching_server(kind) as server:
        agent = agent_at(server)
        messages: list[Any] = []
        for query in ("one two", "three four", "one five"):
            before = server.usages[-1].total if server.usages else 0
            messages = ask(agent, query, messages)
            assert server.usages[-1].read == before


@pytest.mark.parametrize("is_first", [False, True])
def test_beside_anthropics_middleware_a_fifth_mark_never_leaves_us(is_first):
    with caching_server("anthropic") as server:
        theirs = AnthropicPromptCachingMiddleware()
        agent = agent_at(server, theirs)
        if is_first:
            planner = ReusePlanner(cache="anthropic", token_counter=count_tokens)
            ours = ReuseMiddleware(planner=planner, retriever=RunnableLambda(found))
            model = ChatAnthropic(model="m", base_url=server.url, api_key="k", max_tokens=9)
            agent = create_agent(
                model, tools=[add], middleware=[ours, theirs], system_prompt="Be brief."
            )
        messages: list[Any] = []
        for query in ROUNDS:
            ask(agent, query)
            messages = ask(agent, query, messages)
        assert not server.refusals
        body = server.bodies[-1]
        assert body["cache_control"] == {"type": "ephemeral", "ttl": "5m"}
        assert body["system"][-1]["cache_control"] == {"type": "ephemeral", "ttl": "5m"}
        assert body["tools"][-1]["cache_control"] == {"type": "ephemeral", "ttl": "5m"}


def test_the_default_profile_sends_texts():
    with caching_server("anthropic") as server:
        ask(agent_at(server, cache="vllm"), "one two")
        assert isinstance(server.bodies[-1]["messages"][0]["content"], str)
