"""A model with sliding windows: what a real engine reports is what is planned and simulated."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from uuid import uuid4

import pytest
from conftest import running
from engine import Engine
from vllm_process import Server, ServerOptions, free_port

from ctxreuse import ContextRequest, ReusePlanner, cache_profile
from ctxreuse.cache import PrefixCacheSimulator
from ctxreuse.measure.traces.trace_files import read_corpus, read_trace
from ctxreuse.serving import EngineClient, dispatch

RULES = cache_profile("vllm(states=junctions, block_tokens=32)")
REQUESTS = 100
CACHE_TOKENS = 800_000


@pytest.fixture(scope="module")
def windows() -> Iterator[Server]:
    options = ServerOptions(model="windows", port=free_port(), kv_cache_tokens=CACHE_TOKENS)
    with running(options) as server:
        yield server


@pytest.fixture(scope="module")
def requests(data_folder: Path) -> list[ContextRequest]:
    corpus = read_corpus(str(data_folder / "mtrag" / "corpus.jsonl"))
    trace = read_trace(str(data_folder / "mtrag" / "trace_k10.jsonl"), corpus)
    return [ContextRequest(one.blocks, one.query) for one in trace[:REQUESTS]]


def test_a_common_beginning_is_read_from_its_third_sight_on(windows: Server) -> None:
    engine, salt = Engine(windows.base_url), uuid4().hex
    common = "The river runs through the old town and many people walk there. " * 60
    cached = [
        engine.chat(
            [{"role": "user", "content": f"{common} Question {n}: " + f"word{n} " * 60}], salt=salt
        ).usage.cached_tokens
        for n in range(4)
    ]
    assert cached[:2] == [0, 0]
    assert cached[2] == cached[3] > 600


@pytest.mark.parametrize("primes", [False, True])
async def test_reported_tokens_are_those_of_the_simulator(
    windows: Server, requests: list[ContextRequest], primes: bool
) -> None:
    planner = ReusePlanner(cache=RULES)
    batch = planner.plan_batch(requests, primes=primes)
    cache, alike = PrefixCacheSimulator(None, 32, states="junctions"), 0
    async with EngineClient(windows.base_url, planner=planner) as client:
        outcomes = await dispatch(client, batch, max_tokens=1, cache_salt=uuid4().hex)
        cached = {
            one.plan.request_id: one.completion.cached_tokens or 0
            for one in outcomes
            if one.completion is not None
        }
        for plan in batch.plans:
            whole = await client.tokenize(plan)
            for blocks in plan.primes:
                pairs = zip(whole, await client.tokenize(plan.front(blocks)), strict=False)
                common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
                cache.serve(whole[: RULES.readable(common) + 1])
            found = cache.serve(whole).cached_tokens
            alike += abs(found - cached[plan.request_id]) <= 32
    assert alike >= 0.95 * len(requests)
    reported = planner.savings.reported
    assert reported.primes == len(batch.primes)
    net = (reported.cached_tokens - reported.prime_tokens) / reported.prompt_tokens
    assert net > (0.4 if primes else 0.1)
