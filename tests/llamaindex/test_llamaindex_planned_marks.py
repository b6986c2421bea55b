"""Marks of nodes that a postprocessor or retriever has planned, sent by a wrapped model."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
import pytest_socket
from caching_provider import count_tokens
from caching_server import CachingServer, caching_server
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import ResponseMode
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llamaindex_anthropic import Anthropic

from ctxreuse import ReusePlanner
from llamaindex_ctxreuse import (
    ReuseChatEngine,
    ReuseLLM,
    ReusePostprocessor,
    ReuseRetriever,
    format_context,
)

QUERIES = ["one two three", "two one four", "five one two", "one two", "two one six", "one two"]


@pytest.fixture(autouse=True)
def with_this_machine(_without_network: None) -> None:
    """Let a module talk to its servers on this machine."""
    pytest_socket.enable_socket()


class Named(BaseRetriever):
    """Finds the nodes that a question names."""

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        names = query_bundle.query_str.split()
        return [
            NodeWithScore(
                node=TextNode(
                    id_=name, text=f"{name} says: {'well ' * 800}", metadata={"file": f"{name}.md"}
                ),
                score=1 / (rank + 1),
            )
            for rank, name in enumerate(names)
        ]


def planner(cache: str = "anthropic") -> ReusePlanner:
    return ReusePlanner(cache=cache, token_counter=count_tokens)


def wrapped(server: CachingServer, planner: ReusePlanner) -> ReuseLLM:
    return ReuseLLM(inner=Anthropic.at(server.url), planner=planner, window_s=0)


@pytest.mark.parametrize("mode", [ResponseMode.COMPACT, ResponseMode.SIMPLE_SUMMARIZE])
@pytest.mark.parametrize("is_retriever", [False, True])
def test_a_query_engine_sends_the_marks_of_planned_nodes(mode, is_retriever):
    with caching_server("anthropic") as server:
        shared = planner()
        llm = wrapped(server, shared)
        engine: Any
        if is_retriever:
            retriever = ReuseRetriever(Named(), planner=shared)
            engine = RetrieverQueryEngine.from_args(retriever, llm=llm, response_mode=mode)
        else:
            engine = RetrieverQueryEngine.from_args(
                Named(),
                llm=llm,
                response_mode=mode,
                node_postprocessors=[ReusePostprocessor(planner=shared)],
            )
        for query in [*QUERIES, *QUERIES]:
            engine.query(query)
        assert server.usages[-1].read > 1_600
        assert not server.refusals


@pytest.mark.parametrize("is_async", [False, True])
def test_a_streaming_query_engine_sends_them_too(is_async):
    async def ask(engine: Any, query: str) -> str:
        response = await engine.aquery(query)
        return "".join([piece async for piece in response.response_gen])

    with caching_server("anthropic") as server:
        shared = planner()
        engine: Any = RetrieverQueryEngine.from_args(
            ReuseRetriever(Named(), planner=shared), llm=wrapped(server, shared), streaming=True
        )
        for query in [*QUERIES, *QUERIES]:
            if is_async:
                answer = asyncio.run(ask(engine, query))
            else:
                answer = "".join(engine.query(query).response_gen)
            assert answer == server.answer
        assert server.usages[-1].read > 1_600


def test_format_context_keeps_the_marks_of_the_plan():
    with caching_server("anthropic") as server:
        shared = planner()
        retriever, llm = ReuseRetriever(Named(), planner=shared), wrapped(server, shared)
        for query in [*QUERIES, *QUERIES]:
            context = format_context(retriever.retrieve(query))
            llm.chat([ChatMessage(content=f"{context}\n\n{query}?")])
        assert server.usages[-1].read > 1_600


def test_a_chat_engines_plan_is_sent_with_its_marks():
    with caching_server("anthropic") as server:
        shared = planner()
        llm = wrapped(server, shared)
        for query in [*QUERIES, *QUERIES]:
            engine = ReuseChatEngine.from_defaults(retriever=Named(), llm=llm, planner=shared)
            engine.chat(query)
        assert server.usages[-1].read > 1_600


def test_without_a_wrapped_model_the_log_says_once_that_no_marks_are_sent(caplog):
    from ctxreuse.adapters import issued_plans

    issued_plans.log_marks_unsent.cache_clear()
    issued_plans.ISSUED_PLANS.forget_marks()
    caplog.set_level(logging.WARNING, "ctxreuse")
    retriever = ReuseRetriever(Named(), planner=planner())
    for query in QUERIES * 7:
        retriever.retrieve(query)
    told = [one.getMessage() for one in caplog.records if "marks" in one.getMessage()]
    assert len(told) == 1
    assert "ReuseLLM(inner=" in told[0]


async def test_single_calls_wait_for_the_one_that_writes_what_they_read():
    with caching_server("anthropic") as server:
        shared = planner()
        inner = Anthropic.at(server.url)
        llm = ReuseLLM(inner=inner, planner=shared, window_s=0.2)
        nodes = Named().retrieve("one two")
        prompts = [
            [ChatMessage(content=f"{format_context(nodes)}\n\nQuestion {n}?")] for n in range(4)
        ]
        await asyncio.gather(*map(llm.achat, prompts))
        assert sum(usage.read == 0 for usage in server.usages) == 1
