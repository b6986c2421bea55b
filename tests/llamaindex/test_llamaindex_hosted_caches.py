"""Wrapped LlamaIndex models in front of hosted caches."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import pytest
import pytest_socket
from caching_provider import count_tokens
from caching_server import CachingServer, caching_server
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.llms.types import (
    CacheControl,
    CachePoint,
    ChatMessage,
    ChatResponse,
    MessageRole,
    TextBlock,
)
from llama_index.core.llms import MockLLM
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import ResponseMode
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.llms.openai_like import OpenAILike
from llamaindex_anthropic import Anthropic
from pydantic import Field

from ctxreuse import ReusePlanner
from llamaindex_ctxreuse import (
    ReuseChatEngine,
    ReuseLLM,
    ReusePostprocessor,
    ReuseRetriever,
    format_context,
)


@pytest.fixture(autouse=True)
def with_this_machine(_without_network: None) -> None:
    """Let a module talk to its servers on this machine."""
    pytest_socket.enable_socket()


ROUNDS = [("one", "two", "three"), ("two", "one", "four"), ("five", "one", "two"), ("one", "two")]


def context(*names: str) -> str:
    nodes = [TextNode(id_=name, text=f"{name} " * 800) for name in names]
    return format_context([NodeWithScore(node=node, score=1.0) for node in nodes])


def claude(server: CachingServer, window_s: float = 0, **settings: Any) -> ReuseLLM:
    planner = ReusePlanner(cache="anthropic", token_counter=count_tokens)
    inner = Anthropic.at(server.url, **settings)
    return ReuseLLM(inner=inner, planner=planner, window_s=window_s)


def marked(body: dict[str, Any]) -> list[str]:
    parts = [part for one in body["messages"] for part in one["content"]]
    return [part["text"].split()[0] for part in parts if part.get("cache_control")]


def test_cache_points_stand_where_prompts_fork():
    with caching_server("anthropic") as server:
        llm = claude(server)
        for number, names in enumerate([*ROUNDS, *ROUNDS]):
            question = ChatMessage(content=f"{context(*names)}\n\nQuestion {number}?")
            answer = llm.chat([ChatMessage(role=MessageRole.SYSTEM, content="Be brief."), question])
            assert "In France [Doc_" in str(answer.message.content)
        assert server.usages[-1].read > 1_500
        reported = llm.planner.savings.reported
        assert reported.cached_tokens == sum(usage.read for usage in server.usages)
        assert reported.prompt_tokens == sum(usage.total for usage in server.usages)
        assert reported.written["5m"] == sum(one.written.get("5m", 0) for one in server.usages)


class BedrockConverse(MockLLM):
    """Notes what it is asked."""

    asked: list[Sequence[ChatMessage]] = Field(default_factory=list)

    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        self.asked.append(messages)
        return ChatResponse(message=ChatMessage(role="assistant", content="In France."))


def test_bedrock_gets_the_type_of_cache_points_that_it_knows():
    inner = BedrockConverse()
    planner = ReusePlanner(cache="bedrock", token_counter=count_tokens)
    llm = ReuseLLM(inner=inner, planner=planner, window_s=0)
    for number, names in enumerate([*ROUNDS, *ROUNDS]):
        llm.chat([ChatMessage(content=f"{context(*names)}\n\nQuestion {number}?")])
    blocks = [block for messages in inner.asked for one in messages for block in one.blocks]
    points = [block.cache_control for block in blocks if isinstance(block, CachePoint)]
    assert points
    assert {(point.type, point.ttl) for point in points} == {("default", "5m")}


def test_the_users_cache_points_stay_and_a_fifth_never_leaves_us():
    point = CachePoint(cache_control=CacheControl(type="ephemeral"))
    for users in range(6):
        with caching_server("anthropic") as server:
            llm = claude(server)
            for number, names in enumerate(ROUNDS):
                rules = [(TextBlock(text=f"rule{n} holds"), point) for n in range(users)]
                text = TextBlock(text=f"{context(*names)}\n\nQuestion {number}?")
                blocks = [block for pair in rules for block in pair]
                llm.chat([ChatMessage(blocks=[*blocks, text])])
            expected = [f"rule{n}" for n in range(users)][-4:]
            assert marked(server.bodies[-1])[: len(expected)] == expected
            assert len(marked(server.bodies[-1])) <= 4
            assert not server.refusals


def test_the_marks_of_cache_idx_count():
    with caching_server("anthropic") as server:
        llm = claude(server, cache_idx=-1)
        for number, names in enumerate(ROUNDS):
            messages = [
                ChatMessage(content=f"{n}: {context(*names) if n == 4 else 'well'}", role=role)
                for n, role in enumerate(["user", "assistant"] * 2 + ["user"])
            ][1 if number % 2 else 2 :]
            llm.chat(messages)
        assert not server.refusals


def test_a_model_without_marks_gets_the_key_alone_and_says_so(caplog):
    from llamaindex_ctxreuse.llm import planned_prompts

    planned_prompts._log_no_marks.cache_clear()
    with caching_server("openai") as server, caplog.at_level(logging.WARNING, "ctxreuse"):
        inner = OpenAILike(
            model="m", api_base=f"{server.url}/v1", api_key="k", is_chat_model=True,
            context_window=100_000,
        )  # fmt: skip
        llm = ReuseLLM(inner=inner, planner=ReusePlanner(cache="openai"), window_s=0)
        for _ in range(2):
            llm.chat([ChatMessage(content=f"{context('one', 'two')}\n\nWhich?")])
        body = server.bodies[-1]
        assert "prompt_cache_options" not in body
        assert len(body["prompt_cache_key"]) == 32
        assert isinstance(body["messages"][0]["content"], str)
    assert sum("OpenAILike sends none" in one.message for one in caplog.records) == 1


def test_in_shadow_mode_the_provider_gets_what_the_plain_model_sends():
    planner = ReusePlanner(cache="openai", mode="shadow")
    with caching_server("openai") as server:
        inner = OpenAILike(
            model="m", api_base=f"{server.url}/v1", api_key="k", is_chat_model=True,
            context_window=100_000,
        )  # fmt: skip
        for llm in (inner, ReuseLLM(inner=inner, planner=planner, window_s=0)):
            llm.chat([ChatMessage(content=f"{context('one', 'two')}\n\nWhich?")])
        assert server.bodies[0] == server.bodies[1]


QUERIES = ["one two three", "two one four", "five one two", "one two", "two one six", "one two"]


class Named(BaseRetriever):
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


@pytest.mark.parametrize("mode", [ResponseMode.COMPACT, ResponseMode.TREE_SUMMARIZE])
@pytest.mark.parametrize("is_retriever", [False, True])
def test_a_query_engine_sends_the_marks_of_planned_nodes(mode, is_retriever):
    with caching_server("anthropic") as server:
        llm = claude(server)
        engine: Any
        if is_retriever:
            retriever = ReuseRetriever(Named(), planner=llm.planner)
            engine = RetrieverQueryEngine.from_args(retriever, llm=llm, response_mode=mode)
        else:
            engine = RetrieverQueryEngine.from_args(
                Named(),
                llm=llm,
                response_mode=mode,
                node_postprocessors=[ReusePostprocessor(planner=llm.planner)],
            )
        for query in [*QUERIES, *QUERIES]:
            engine.query(query)
        assert server.usages[-1].read > 1_600
        assert not server.refusals


def test_chat_engines_send_the_marks_of_their_plans():
    with caching_server("anthropic") as server:
        llm = claude(server)
        for query in [*QUERIES, *QUERIES]:
            engine = ReuseChatEngine.from_defaults(retriever=Named(), llm=llm, planner=llm.planner)
            engine.chat(query)
        assert server.usages[-1].read > 1_600


async def test_single_calls_wait_for_the_one_that_writes_what_they_read():
    with caching_server("anthropic") as server:
        llm = claude(server, window_s=0.2)
        nodes = Named().retrieve("one two")
        prompts = [
            [ChatMessage(content=f"{format_context(nodes)}\n\nQuestion {n}?")] for n in range(4)
        ]
        await asyncio.gather(*map(llm.achat, prompts))
        assert sum(usage.read == 0 for usage in server.usages) == 1
