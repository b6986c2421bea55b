"""Workflows on servers that answer anything: a run fails by its node's name, and no other does."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from example_counts import slow_unless
from hostile_servers import COUNTS, DRIPPING, ENDLESS, REFUSALS, SAMPLES, Hosts, usage_of
from http_servers import listening
from openai_models import chat_openai, clients_of, openai_like

from ctxreuse import ReusePlanner
from ctxreuse.errors import EngineError
from ctxreuse.serving import EngineClient
from ctxreuse.workflow import (
    CallableRetriever,
    OpenAILLM,
    Piece,
    WorkflowEngine,
    WorkflowOptions,
    hyde,
    irg,
    one_shot,
)
from ctxreuse.workflow.errors import DeadlineError, StageError
from langchain_ctxreuse import LangChainLLM
from llamaindex_ctxreuse import LlamaIndexLLM

HOSTILE = "a hostile question"
DOCUMENTS = [f"{name} says: {name * 400}" for name in "abc"]
REPLIES: dict[str, Any] = SAMPLES | REFUSALS


def ours(hosts: Hosts, url: str = "http://bad/v1", **options: Any) -> OpenAILLM:
    http = httpx.AsyncClient(transport=hosts)
    settings = {"retries": 0, "backoff_s": 0, **options}
    return OpenAILLM(EngineClient(url, "emulated", http_client=http, **settings))


def of_langchain(hosts: Hosts, url: str = "http://bad/v1", **options: Any) -> LangChainLLM:
    return LangChainLLM(chat_openai(*clients_of(hosts), base_url=url, stream_usage=True, **options))


def of_llamaindex(hosts: Hosts, url: str = "http://bad/v1", **options: Any) -> LlamaIndexLLM:
    return LlamaIndexLLM(openai_like(*clients_of(hosts), api_base=url, **options))


MODELS: dict[str, Callable[..., Any]] = {
    "ours": ours,
    "LangChain's": of_langchain,
    "LlamaIndex's": of_llamaindex,
}


def engine_of(llm: Any, planner: ReusePlanner | None = None, **options: Any) -> WorkflowEngine:
    finder = CallableRetriever(lambda query, k: DOCUMENTS[:k])
    return WorkflowEngine(llm, finder, planner, options=WorkflowOptions(**options))


@pytest.mark.parametrize("kind", REPLIES)
@pytest.mark.parametrize("model", MODELS)
async def test_a_reply_fails_its_own_run_alone_and_the_planner_forgets_it(model, kind, planner):
    hosts = Hosts(REPLIES[kind], hostile_to=HOSTILE)
    jobs = [(graph(), text) for graph in (one_shot, hyde, irg) for text in ("Which?", HOSTILE)]
    async with engine_of(MODELS[model](hosts), planner) as engine:
        async with asyncio.timeout(60):
            results = await engine.arun_batch(jobs, return_exceptions=True)
        metrics = engine.metrics()
    assert [one.answer for one in results[::2]] == ["Here."] * 3
    for one in results[1::2]:
        if model == "ours" or isinstance(one, Exception):
            assert isinstance(one, StageError)
            assert one.node in str(one)
            assert len(str(one)) < 800
            if model == "ours":
                assert isinstance(one.__cause__, EngineError)
        else:  # these take for an answer what we do not
            assert isinstance(one.answer, str)
    failed = sum(isinstance(one, Exception) for one in results)
    assert (metrics.finished, metrics.failed) == (6 - failed, failed)
    assert metrics.planning_failures == 0
    if failed == 3 and kind != "half a reply":  # of that, the engine has the prompt
        honest = engine_of(MODELS[model](hosts), other := ReusePlanner())
        async with honest as engine:
            await engine.arun_batch(jobs[::2])
        assert planner.savings.requests == other.savings.requests


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("model", MODELS)
async def test_counts_that_cannot_be_right_reach_no_statistics(model, count, planner):
    hosts = Hosts(usage_of(count))
    async with engine_of(MODELS[model](hosts), planner) as engine:
        results = await engine.arun_batch([(one_shot(), "Which?")] * 3, return_exceptions=True)
        metrics = engine.metrics()
        usual = list(engine._services.generation_statistics.values())
    for one in results:
        if isinstance(one, Exception):  # their library refuses the usage itself
            assert model != "ours"
            assert isinstance(one, StageError)
        else:
            assert one.answer == "Hi"
    assert type(metrics.speculation.generated_tokens) is int
    assert 0 <= metrics.speculation.generated_tokens < 100
    assert all(0 <= one.tokens.value < 100 for one in usual)
    assert all(0 <= one.seconds.value < 60 for one in usual)


@pytest.mark.parametrize("kind", slow_unless({**DRIPPING, **ENDLESS}, "events", "nothing"))
async def test_what_has_no_end_fails_its_run_in_time(kind):
    script = {**DRIPPING, **ENDLESS}[kind]
    async with listening(script) as [server]:
        client = EngineClient(server.url, "m", timeout_s=0.3, max_reply_bytes=300_000)
        async with client, engine_of(OpenAILLM(client)) as engine:
            began = time.monotonic()
            with pytest.raises(StageError) as caught:
                await engine.run(one_shot(), "Which?")
            assert isinstance(caught.value.__cause__, EngineError)
            assert time.monotonic() - began < 20


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", slow_unless(["events", "bytes", "nothing"], "events", "nothing"))
async def test_a_deadline_ends_a_run_whatever_the_server_does(model, kind):
    async with listening(DRIPPING[kind]) as [server]:
        hosts: Any = httpx.AsyncHTTPTransport()
        async with engine_of(MODELS[model](hosts, server.url)) as engine:
            began = time.monotonic()
            with pytest.raises(DeadlineError):
                await engine.run(one_shot(), "Which?", deadline_s=0.5)
            assert time.monotonic() - began < 20
            assert engine.metrics().in_flight == 0


async def test_a_deadline_ends_a_run_whose_model_loses_a_cancellation():
    lost = []

    class Losing:
        """As streams with `asyncio.wait_for` may do on Python 3.11."""

        async def stream(self, prompt, params):
            while True:
                try:
                    await asyncio.sleep(0.01)
                except asyncio.CancelledError:
                    lost.append(prompt)
                    if len(lost) > 1:
                        raise
                yield Piece("on", 1)

    async with engine_of(Losing()) as engine, asyncio.timeout(20):
        with pytest.raises(DeadlineError):
            await engine.run(one_shot(), "Which?", deadline_s=0.1)
    assert len(lost) == 2
