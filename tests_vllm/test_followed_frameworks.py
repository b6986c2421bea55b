"""Beside LangChain, LlamaIndex and Mem0, the index follows the engine's own events."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from engine import Engine
from pydantic import SecretStr
from vllm_process import Server

from ctxreuse import Plan, ReusePlanner
from ctxreuse.cache import KVEventSync
from ctxreuse.measure.traces.trace_files import TraceRequest, read_corpus, read_trace

REQUESTS = 100
BLOCKS = 3
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # the frameworks' own
    pytest.mark.filterwarnings("ignore::PendingDeprecationWarning"),
]

Ask = Callable[[TraceRequest], object]


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    """A client for the frameworks' models, which never close the one they make themselves."""
    with httpx.Client() as client:
        yield client


def langchain(engine: Engine, planner: ReusePlanner, http: httpx.Client, salt: str) -> Ask:
    from langchain_core.documents import Document
    from langchain_openai import ChatOpenAI

    from langchain_ctxreuse import ReuseChatModel, format_context

    model = ChatOpenAI(
        model=engine.model,
        base_url=engine.base_url,
        api_key=SecretStr("EMPTY"),
        http_client=http,
        max_completion_tokens=1,
        extra_body={"cache_salt": salt},
    )
    wrapped = ReuseChatModel(inner=model, planner=planner, window_s=0)

    def ask(one: TraceRequest) -> object:
        context = format_context([Document(block.text) for block in one.blocks[:BLOCKS]])
        return wrapped.invoke(f"{context}\n\n{one.query}")

    return ask


def llamaindex(engine: Engine, planner: ReusePlanner, http: httpx.Client, salt: str) -> Ask:
    from llama_index.core.llms import ChatMessage
    from llama_index.core.schema import NodeWithScore, TextNode
    from llama_index.llms.openai_like import OpenAILike

    from llamaindex_ctxreuse import ReuseLLM, format_context

    model = OpenAILike(
        model=engine.model,
        api_base=engine.base_url,
        api_key="EMPTY",
        http_client=http,
        is_chat_model=True,
        context_window=4_000,
        max_tokens=1,
        additional_kwargs={"extra_body": {"cache_salt": salt}},
    )
    wrapped = ReuseLLM(inner=model, planner=planner, window_s=0)

    def ask(one: TraceRequest) -> object:
        nodes = [NodeWithScore(node=TextNode(text=block.text)) for block in one.blocks[:BLOCKS]]
        return wrapped.chat([ChatMessage(f"{format_context(nodes)}\n\n{one.query}")])

    return ask


def mem0(engine: Engine, planner: ReusePlanner, http: httpx.Client, salt: str) -> Ask:
    """A memory's messages, sent with an `openai.OpenAI` of the application's own."""
    from openai import OpenAI

    from mem0_ctxreuse import ReuseMemory

    found: list[dict[str, Any]] = []

    class Found:
        """Searches as mem0's `Memory` does."""

        def search(self, query: str, **_: Any) -> dict[str, Any]:
            return {"results": [*found]}

    memory = ReuseMemory(Found(), planner=planner, tenant="")
    client = OpenAI(base_url=engine.base_url, api_key="EMPTY", http_client=http)

    def ask(one: TraceRequest) -> object:
        found[:] = [{"id": block.id, "memory": block.text} for block in one.blocks[:BLOCKS]]
        context = memory.context(one.query)
        assert context.plan is not None
        reply: Any = client.chat.completions.create(
            model=engine.model,
            messages=context.messages(),
            max_tokens=1,
            extra_body={"cache_salt": salt, "return_token_ids": True},
        )
        cached = reply.usage.prompt_tokens_details.cached_tokens or 0
        planner.report_usage([context.plan], reply.usage.prompt_tokens, cached)
        assert planner.prompt_follower is not None
        planner.prompt_follower.record(context.plan, reply.prompt_token_ids, cache_salt=salt)
        return reply

    return ask


@pytest.mark.parametrize("framework", [langchain, llamaindex, mem0])
def test_what_is_expected_is_what_the_engine_serves_through_evictions(
    framework: Callable[..., Ask],
    small_server: Server,
    small_engine: Engine,
    data_folder: Path,
    http: httpx.Client,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    corpus = read_corpus(str(data_folder / "xquad" / "corpus.jsonl"))
    trace = read_trace(str(data_folder / "xquad" / "trace_k5.jsonl"), corpus)[: REQUESTS // 2]
    planner, endpoint = ReusePlanner(), small_server.options.events_endpoint
    assert endpoint is not None
    reported: list[tuple[Plan, int, int]] = []
    report = planner.report_usage

    def note(plans: Any, prompt_tokens: int, cached_tokens: int, **fields: Any) -> None:
        reported.extend((plan, prompt_tokens, cached_tokens) for plan in plans)
        report(plans, prompt_tokens, cached_tokens, **fields)

    monkeypatch.setattr(planner, "report_usage", note)
    ask = framework(small_engine, planner, http, uuid4().hex)
    told: list[Plan] = []
    with KVEventSync(planner, endpoint, small_server.options.replay_endpoint) as sync:
        record = sync.record

        def count(plan: Plan, *args: Any, **fields: Any) -> None:
            record(plan, *args, **fields)
            told.append(plan)

        monkeypatch.setattr(sync, "record", count)
        for one in [*trace, *trace[::-1]]:  # the newest ones are held, the others are not
            ask(one)
            deadline = time.monotonic() + 30
            while len(told) < len(reported):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert sync.settle(30)
    alike = sum(_is_as_expected(planner, *one) for one in reported)
    print(f"{framework.__name__}: {alike} of {len(reported)} as expected")
    assert sum(prompt for _, prompt, _ in reported) > 2 * small_engine.cache_tokens
    assert sum(cached for _, _, cached in reported) > 1_000
    assert alike >= 0.95 * len(reported) > 0.9 * REQUESTS


def _is_as_expected(
    planner: ReusePlanner, plan: Plan, prompt_tokens: int, cached_tokens: int
) -> bool:
    """Return whether as many blocks were cached as expected, give or take one."""
    shares = [planner.block_tokens([block]) for block in plan.blocks]
    whole = sum(shares)
    expected = plan.expected_cached_tokens / whole
    return abs(expected - cached_tokens / prompt_tokens) <= max(shares) / whole
