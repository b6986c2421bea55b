"""Primes: calls that a client sends before a plan, so that the plan's forks can be read."""

import httpx
import pytest
from client_helpers import connected
from virtual_time import virtual_time

from ctxreuse import ContextBlock, ContextRequest, ReusePlanner, cache_profile
from ctxreuse.cache import PrefixCacheSimulator
from ctxreuse.errors import InvalidRequestError
from ctxreuse.serving import EmulatedEngine, EngineClient, dispatch
from tests.support.pool_helpers import Network, planner_of, pool_on
from tests.support.served_engines import split

RULES = cache_profile("vllm(states=junctions, prime_tokens=60)")
BLOCKS = {name: ContextBlock(id=name, text=f"{name} " * 80, tokens=80) for name in "abcdefgh"}
CONTEXTS = ("abcd", "abce", "abcf", "dg", "dh", "abdg")
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]


def primed_batch(**fields):
    planner = ReusePlanner(cache=RULES)
    requests = [ContextRequest([BLOCKS[one] for one in context], "Which?", **fields)
                for context in CONTEXTS]  # fmt: skip
    return planner, planner.plan_batch(requests, primes=True)


async def test_what_shares_a_primed_beginning_reads_it_from_its_first_sight_on():
    planner, batch = primed_batch()
    engine = EmulatedEngine(states="junctions")
    async with connected(engine, planner=planner, retries=0) as client:
        outcomes = await dispatch(client, batch, concurrency=8)
    primes, requests = split(engine)
    assert len(primes) == len(batch.primes) > 0
    assert len(requests) == len(CONTEXTS)
    # what shares a beginning waits for its primes, so the order is that of one at a time
    cache = PrefixCacheSimulator(states="junctions")
    expected, computed = {}, 0
    for plan in batch.plans:
        whole = engine.prompt_tokens(plan.messages())
        for blocks in plan.primes:
            front = engine.prompt_tokens(plan.front(blocks))
            common = next(n for n, (a, b) in enumerate(zip(whole, front, strict=False)) if a != b)
            computed += cache.serve(whole[: common // 16 * 16 + 1]).prefilled_tokens
        expected[plan.request_id] = cache.serve(whole).cached_tokens
    assert {one.plan.request_id: one.completion.cached_tokens for one in outcomes} == expected
    reported = planner.savings.reported
    assert (reported.primes, reported.prime_tokens) == (len(primes), computed)
    assert reported.answers == len(CONTEXTS)
    assert f"{len(primes)} prime" in str(planner.savings)


async def test_a_prime_has_the_tenants_salt_the_tools_and_an_id_of_its_own():
    planner, batch = primed_batch(tenant="t")
    engine = EmulatedEngine(states="junctions")
    async with connected(engine, planner=planner, retries=0, cache_salt="tenant") as client:
        await dispatch(client, batch, tools=TOOLS)
    primes, requests = split(engine)
    assert {body["cache_salt"] for body in engine.requests} == {requests[0]["cache_salt"]}
    assert len({body["request_id"] for body in primes}) == len(primes)
    assert {body["max_tokens"] for body in primes} == {1}
    whole = engine._prompt(requests[0])
    assert primes[0]["prompt"] == whole[: len(primes[0]["prompt"])]  # tools stand in front
    assert all(len(body["prompt"]) % 16 == 1 for body in primes)
    assert (planner.savings.reported.cached_tokens or 0) > 0


async def test_a_server_without_token_ids_gets_chat_calls_whose_last_message_stays_open():
    planner, batch = primed_batch()
    engine = EmulatedEngine(
        states="junctions", fail=lambda number, body: 404 if "prompt" in body else None
    )
    async with connected(engine, planner=planner, retries=0) as client:
        await dispatch(client, batch, concurrency=1)
    primes, _ = split(engine)
    refused = [body for body in primes if "prompt" in body]
    chats = [body for body in primes if "messages" in body]
    assert len(refused) == 1  # it is not asked again
    assert len(chats) == len(batch.primes) == planner.savings.reported.primes
    assert all(body["continue_final_message"] for body in chats)
    assert planner.savings.reported.hit_ratio > 0.3


async def test_a_server_that_takes_no_prime_is_not_asked_again_and_answers_all_the_same(caplog):
    planner, batch = primed_batch()
    engine = EmulatedEngine(
        states="junctions", fail=lambda number, body: 400 if "max_tokens" in body else None
    )
    async with connected(engine, planner=planner, retries=0) as client:
        outcomes = await dispatch(client, batch, concurrency=1)
        assert await client.prime(batch.plans[0]) == []
    assert all(one.error is None for one in outcomes)
    assert len(split(engine)[0]) == 2  # each way once
    assert planner.savings.reported.primes == 0
    assert [one.split(",")[0] for one in caplog.messages] == ["a prime was not answered"]
    assert "Which?" not in caplog.text


async def test_a_prime_that_fails_costs_nothing_but_itself():
    planner, batch = primed_batch()
    failed = []

    def fail(number, body):
        if "max_tokens" in body and not failed:
            failed.append(number)
            return 503
        return None

    engine = EmulatedEngine(states="junctions", fail=fail)
    async with connected(engine, planner=planner, retries=0) as client:
        outcomes = await dispatch(client, batch)
    assert all(one.error is None for one in outcomes)
    assert len(failed) == 1
    assert planner.savings.reported.primes == len(batch.primes) - 1
    assert len(split(engine)[0]) == len(batch.primes)


async def test_a_prime_that_an_engine_refuses_once_ends_no_priming(caplog):
    planner, batch = primed_batch()
    refused = []

    def fail(number, body):
        if "max_tokens" in body and number and len(refused) < 2:  # in both ways
            refused.append(number)
            return 400
        return None

    engine = EmulatedEngine(states="junctions", fail=fail)
    async with connected(engine, planner=planner, retries=0) as client:
        await dispatch(client, batch, concurrency=1)
        assert len(await client.prime(batch.primes[0].plan)) == len(batch.primes[0].plan.primes)
    assert len(refused) == 2
    assert "prompt" in split(engine)[0][-1]
    assert len(caplog.messages) == 1


async def test_a_prime_goes_where_its_request_goes():
    _, batch = primed_batch()
    seen = []

    async def note(request):
        seen.append((request.url.path, request.headers))

    engine = EmulatedEngine(states="junctions")
    async with httpx.AsyncClient(
        transport=engine.transport(), event_hooks={"request": [note]}
    ) as http:
        client = EngineClient("http://engine", "emulated", http_client=http, session_id="group")
        await dispatch(
            client, batch, extra_headers={"X-Key": "k"}, extra_body={"mine": 1}, max_tokens=1
        )
    assert {path for path, _ in seen} == {"/tokenize", "/v1/completions", "/v1/chat/completions"}
    assert {headers["x-key"] for _, headers in seen} == {"k"}
    assert all("x-session-id" in headers for _, headers in seen)
    assert all("x-request-id" in headers for path, headers in seen if "chat" in path)
    assert not any("x-request-id" in headers for path, headers in seen if "chat" not in path)
    assert {body["mine"] for body in engine.requests} == {1}


async def test_primes_need_the_protocol_that_has_them():
    planner, batch = primed_batch()
    async with connected(EmulatedEngine(), planner=planner, protocol="anthropic") as client:
        with pytest.raises(InvalidRequestError, match="plan without primes=True"):
            await client.prime(batch.primes[0].plan, max_tokens=1)


def test_the_front_of_a_plan_without_blocks_is_empty():
    plan = ReusePlanner().plan(ContextRequest([], "Which?", system="Be brief."))
    assert [one["content"] for one in plan.front(1)][-1] in ("", "Be brief.")


async def test_plans_without_primes_send_none_and_wrong_arguments_are_named():
    planner = ReusePlanner(cache=RULES)
    engine = EmulatedEngine(states="junctions")
    async with connected(engine, planner=planner, retries=0) as client:
        plan = planner.plan(ContextRequest([BLOCKS["a"]], "Which?"))
        assert await client.prime(plan) == []
        with pytest.raises(InvalidRequestError, match="a Plan"):
            await client.prime("a")
    assert engine.requests == []


async def test_a_pool_sends_a_plans_primes_where_it_sends_the_plan():
    _, batch = primed_batch()
    network = Network(one=EmulatedEngine(states="junctions"))
    async with pool_on(network) as pool:
        for plan in batch.plans[:-1]:
            await pool.complete(plan)
        async with pool.stream(batch.plans[-1]) as pieces:
            assert [piece async for piece in pieces]
        primes, requests = split(network.engines["one"])
        assert len(primes) == len(batch.primes) > 0
        assert len(requests) == len(CONTEXTS)
        assert planner_of(pool, "one").savings.reported.primes == len(primes)


@virtual_time
async def test_a_pool_goes_elsewhere_with_a_plan_whose_primes_take_too_long():
    _, batch = primed_batch()
    [plan, *_] = [one for one in batch.plans if one.primes]
    network = Network(one=EmulatedEngine(), two=EmulatedEngine())
    async with pool_on(network) as pool:
        network.silent.add("one")
        assert (await pool.complete(plan, replica="one", limit_s=0.2)).replica == "two"
        async with pool.stream(plan, replica="one", limit_s=0.2) as pieces:
            assert [piece async for piece in pieces]
