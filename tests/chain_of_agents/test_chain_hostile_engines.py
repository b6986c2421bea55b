"""Chain-of-Agents on servers that answer anything: it answers, or says why, and ends in time."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from chain_helpers import question
from example_counts import slow_unless
from hostile_servers import (
    COUNTS,
    DRIPPING,
    ENDLESS,
    REFUSALS,
    SAMPLES,
    Hosts,
    breaking_off,
    usage_of,
)
from http_servers import engine_script, listening
from openai_models import chat_openai, clients_of, openai_like

from chain_of_agents import ChainOfAgents
from chain_of_agents.trace.answer import UnreadError
from ctxreuse.serving import EmulatedEngine

BAD, GOOD = "http://bad/v1", "http://good/v1"
REPLIES: dict[str, Any] = SAMPLES | REFUSALS


@asynccontextmanager
async def chain_on(
    hosts: Hosts, *engines: str, workers: int = 4, **options: Any
) -> AsyncIterator[ChainOfAgents]:
    settings = {"model": "emulated", "window_s": 0, "backoff_s": 0, "packing": "single"}
    async with httpx.AsyncClient(transport=hosts) as http:
        chain = ChainOfAgents(list(engines), workers, http_client=http, **{**settings, **options})
        async with chain:
            yield chain


async def streamed(chain: ChainOfAgents, given: Any) -> str:
    return "".join([piece async for piece in chain.astream(given)])


def planners(chain: ChainOfAgents) -> dict[str, int]:
    engines: Any = chain._model.engines
    return {name: one.planner.statistics().requests for name, one in engines._replicas.items()}


@pytest.mark.parametrize("mode", ["sequential", "parallel"])
@pytest.mark.parametrize("kind", REPLIES)
async def test_what_a_hostile_engine_does_not_answer_an_honest_one_does(kind, mode):
    hosts = Hosts(REPLIES[kind])
    async with chain_on(hosts, BAD, GOOD, mode=mode, timeout_s=30) as chain:
        async with asyncio.timeout(60):
            answer = await chain.ainvoke(question(6))
        assert answer == "Here."
        assert not answer.trace.unread
        assert {step.replica for step in answer.trace.steps} == {"good"}
        assert planners(chain)["bad"] == 0
        if REPLIES[kind] is not breaking_off:  # of which a piece may have been shown
            assert await streamed(chain, question(6)) == "Here."
    assert "bad" in hosts.asked


@pytest.mark.parametrize("kind", REPLIES)
async def test_alone_it_is_an_error_with_the_reason_and_a_trace(kind):
    async with chain_on(Hosts(REPLIES[kind]), BAD, timeout_s=1.0, attempts=1) as chain:
        async with asyncio.timeout(60):
            with pytest.raises(UnreadError) as caught:
                await chain.ainvoke(question(3))
    error = caught.value
    assert "none of the documents was read" in str(error)
    assert "the engine at bad" in str(error) or "bad is busy" in str(error)
    assert [step.outcome for step in error.trace.workers] == ["failed"] * 3
    assert error.__cause__ is not None
    assert error.trace.to_html()


@pytest.mark.parametrize("count", COUNTS)
async def test_counts_that_cannot_be_right_reach_no_trace_and_no_length(count):
    async with chain_on(Hosts(usage_of(count)), BAD) as chain:
        for _ in range(2):
            answer = await chain.ainvoke(question(3, conversation_id="c"))
            assert answer == "Hi"
            for step in answer.trace.steps:
                told = (step.prompt_tokens, step.cached_tokens, step.completion_tokens)
                assert told == (None, None, None)
            assert answer.trace.to_html()


MODELS: dict[str, Callable[[Any, str], Any]] = {
    "LangChain's": lambda transport, url: chat_openai(
        *clients_of(transport), base_url=url, stream_usage=True
    ),
    "LlamaIndex's": lambda transport, url: openai_like(*clients_of(transport), api_base=url),
}


@pytest.mark.parametrize("kind", REPLIES)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("streams", [False, True])
async def test_a_models_own_errors_are_reasons_too(model, kind, streams):
    llm = MODELS[model](Hosts(REPLIES[kind], hostile_to="Document 1 says"), BAD)
    chain = ChainOfAgents(llm, 3, packing="single")
    async with chain, asyncio.timeout(60):
        ask = streamed(chain, question(3)) if streams else chain.ainvoke(question(3))
        answer = await ask
    assert answer == "Here."


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("model", MODELS)
async def test_counts_of_a_model_object_are_looked_at_too(model, count):
    chain = ChainOfAgents(MODELS[model](Hosts(usage_of(count)), BAD), 3)
    async with chain:
        try:
            answer = await chain.ainvoke(question(3))
        except UnreadError as error:  # their library refuses the usage itself
            trace = error.trace
        else:
            trace = answer.trace
    for step in trace.steps:
        for told in (step.prompt_tokens, step.cached_tokens, step.completion_tokens):
            assert told is None or (type(told) is int and 0 <= told < 100)


@pytest.mark.parametrize("kind", slow_unless({**DRIPPING, **ENDLESS}, "events", "nothing"))
async def test_what_has_no_end_is_ended_at_the_limit(kind):
    script = {**DRIPPING, **ENDLESS}[kind]
    honest = engine_script(EmulatedEngine(answer="Here."))
    async with listening(script, honest) as servers:
        began = time.monotonic()
        chain = ChainOfAgents(
            [one.url for one in servers],
            4,
            mode="parallel",
            model="emulated",
            window_s=0,
            backoff_s=0,
            timeout_s=2.0,
            max_reply_bytes=300_000,
            context_window=8_192,  # else the engines would be asked for it, for five seconds
        )
        async with chain:
            answer = await chain.ainvoke(question(6))
        assert answer == "Here."
        assert time.monotonic() - began < 30


@pytest.mark.parametrize("kind", slow_unless(["events", "bytes", "nothing"], "events", "nothing"))
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("streams", [False, True])
async def test_a_model_object_is_left_at_the_limit(model, kind, streams):
    async with listening(DRIPPING[kind]) as [server]:
        llm = MODELS[model](httpx.AsyncHTTPTransport(), f"{server.url}/v1")
        chain = ChainOfAgents(llm, 3, mode="parallel", timeout_s=0.5)
        began = time.monotonic()
        async with chain:
            ask = streamed(chain, question(3)) if streams else chain.ainvoke(question(3))
            with pytest.raises(UnreadError, match="none of the documents was read") as caught:
                await ask
        assert {step.outcome for step in caught.value.trace.workers} == {"timed out"}
        assert time.monotonic() - began < 30
