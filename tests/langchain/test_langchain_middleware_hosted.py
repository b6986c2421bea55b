"""Agents in front of hosted caches: marks of ours beside those of Anthropic's middleware."""

from typing import Any

import pytest
from caching_server import CachingServer
from langchain.agents import create_agent
from langchain_anthropic.middleware import AnthropicPromptCachingMiddleware
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from langchain_hosted import chat_model, found, planner_for

from langchain_ctxreuse import ReuseMiddleware

ROUNDS = ["one two three", "two one four", "five one two", "one two", "two one six"]
BOTH = pytest.mark.parametrize("server", ["anthropic", "openai"], indirect=True)


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def agent_at(
    server: CachingServer, *others: Any, cache: str | None = None, is_first: bool = False
) -> Any:
    ours = ReuseMiddleware(planner=planner_for(server, cache), retriever=RunnableLambda(found))
    every = [ours, *others] if is_first else [*others, ours]
    model = chat_model(server)
    return create_agent(model, tools=[add], middleware=every, system_prompt="Be brief.")


def ask(agent: Any, query: str, before: list[Any] | None = None) -> list[Any]:
    messages = [*(before or []), {"role": "user", "content": query}]
    answered: list[Any] = agent.invoke({"messages": messages})["messages"]
    return answered


def said(body: dict[str, Any]) -> str:
    """Return all texts of a request's messages, one after the other."""
    contents = [one["content"] for one in body["messages"]]
    parts = [[one] if isinstance(one, str) else one for one in contents]
    return "".join(p if isinstance(p, str) else p["text"] for part in parts for p in part)


@BOTH
def test_users_who_share_documents_read_them(server):
    agent = agent_at(server)
    for query in [*ROUNDS, *ROUNDS]:
        ask(agent, query)
        shown = said(server.bodies[-1])
        assert all(one.page_content in shown for one in found(query))
        assert shown.endswith(f"\n\n{query}")
    assert any(usage.read > 800 for usage in server.usages)
    assert not server.refusals


@BOTH
def test_each_turn_reads_the_turn_before(server):
    agent = agent_at(server)
    messages: list[Any] = []
    for query in ("one two", "three four", "one five"):
        before = server.usages[-1].total if server.usages else 0
        messages = ask(agent, query, messages)
        assert server.usages[-1].read == before


@pytest.mark.parametrize("is_first", [False, True])
def test_beside_anthropics_middleware_a_fifth_mark_never_leaves_us(server, is_first):
    agent = agent_at(server, AnthropicPromptCachingMiddleware(), is_first=is_first)
    messages: list[Any] = []
    for query in ROUNDS:
        ask(agent, query)
        messages = ask(agent, query, messages)
    assert not server.refusals
    body = server.bodies[-1]
    for marked in (body, body["system"][-1], body["tools"][-1]):
        assert marked["cache_control"] == {"type": "ephemeral", "ttl": "5m"}


def test_the_default_profile_sends_texts(server):
    ask(agent_at(server, cache="vllm"), "one two")
    assert isinstance(server.bodies[-1]["messages"][0]["content"], str)
