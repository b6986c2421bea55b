"""A pool of one honest engine and one that answers anything: every request is answered."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import httpx
import pytest
from example_counts import slow_unless
from hostile_servers import CASES, DRIPPING, ENDLESS, REFUSALS, Hosts, breaking_off
from http_servers import engine_script, listening
from pool_helpers import IDLE, asking, planner_of, queues

from ctxreuse.errors import EngineError
from ctxreuse.serving import EmulatedEngine, EngineClient, EnginePool

BAD, GOOD = "http://bad/v1", "http://good/v1"


@asynccontextmanager
async def pool_of(hosts: Hosts, *engines: str, **options: Any) -> AsyncIterator[EnginePool]:
    settings: dict[str, Any] = {"model": "emulated", "window_s": 0, "backoff_s": 0, "open_s": 60}
    async with (
        httpx.AsyncClient(transport=hosts) as http,
        EnginePool(engines or (BAD, GOOD), http_client=http, **{**settings, **options}) as pool,
    ):
        yield pool


def requests_at(pool: EnginePool) -> dict[str, int]:
    return {name: planner_of(pool, name).statistics().requests for name in pool.names}


async def streamed(pool: EnginePool, request: Any, **options: Any) -> str:
    async with pool.stream(request, **options) as pieces:
        return "".join([piece async for piece in pieces])


REPLIES: dict[str, Any] = {repr(one[:50]): one for one in CASES} | REFUSALS


@pytest.mark.parametrize("kind", REPLIES)
async def test_the_honest_engine_answers_and_the_index_has_it_there(kind):
    hosts = Hosts(REPLIES[kind])
    async with pool_of(hosts) as pool:
        bad, good = pool.names
        served = await pool.complete(asking("ab"), replica=bad)
        assert (served.completion.text, served.replica) == ("Here.", good)
        assert served.tried == (bad,)
        assert requests_at(pool) == {bad: 0, good: 1}
        if REPLIES[kind] is not breaking_off:  # of which a piece has been shown
            assert await streamed(pool, asking("cd"), replica=bad) == "Here."
            assert requests_at(pool) == {bad: 0, good: 2}
        assert queues(pool) == IDLE
        assert pool.faults == 0
    assert hosts.asked[0] == "bad"


@pytest.mark.parametrize("kind", REPLIES)
@pytest.mark.parametrize("streams", [False, True])
async def test_alone_it_is_an_error_that_names_it_and_nothing_is_in_the_index(kind, streams):
    async with pool_of(Hosts(REPLIES[kind]), BAD, timeout_s=1.0) as pool:
        ask = streamed(pool, asking("ab")) if streams else pool.complete(asking("ab"))
        async with asyncio.timeout(20):
            with pytest.raises(EngineError, match=r"the engine at bad|bad is busy") as caught:
                await ask
        assert len(str(caught.value)) < 500
        if kind[:3].isdigit():
            assert caught.value.status == int(kind[:3])
            assert f"status {kind[:3]} (odd)" in str(caught.value)
            assert "the words of the server" in str(caught.value.__cause__)
        assert requests_at(pool) == {"bad": 0}
        assert queues(pool) == IDLE
        assert pool.faults == 0


@pytest.mark.parametrize("kind", ["half a reply", "500", "503", "429", "404", "a redirect, 307"])
async def test_many_at_a_time_are_all_answered(kind):
    hosts = Hosts(REPLIES[kind])
    async with pool_of(hosts, window_s=0.01) as pool:
        asked = [asking("abcdef"[n % 6 :] + "x", f"{n}?") for n in range(20)]
        served = await asyncio.gather(*map(pool.complete, asked))
        assert {one.completion.text for one in served} == {"Here."}
        assert requests_at(pool) == dict(zip(pool.names, (0, 20), strict=True))
        assert queues(pool) == IDLE


@pytest.mark.parametrize("kind", slow_unless({**DRIPPING, **ENDLESS}, "events", "nothing"))
async def test_what_has_no_end_is_ended_and_another_engine_asked(kind):
    script = {**DRIPPING, **ENDLESS}[kind]
    honest = engine_script(EmulatedEngine(answer="Here."))
    async with (
        listening(script, honest) as servers,
        EnginePool(
            {
                one.url: partial(EngineClient, one.url, timeout_s=limit_s, max_reply_bytes=300_000)
                for one, limit_s in zip(servers, (0.5, 20), strict=True)
            },
            window_s=0,
        ) as pool,
    ):
        bad, good = pool.names
        began = time.monotonic()
        served = await pool.complete(asking("ab"), replica=bad)
        assert (served.completion.text, served.replica) == ("Here.", good)
        assert time.monotonic() - began < 20
        assert requests_at(pool) == {bad: 0, good: 1}
        assert queues(pool) == IDLE
