"""What a client tells its planner of what it sent, and what engines report of it."""

import asyncio
import json
import logging

import httpx
import pytest
from client_helpers import MESSAGES, completed, connected, overheard, planned, raw_replies
from hostile_servers import END, event, usage
from pool_helpers import Network, asking, pool_on

from ctxreuse import ContextRequest, ReusePlanner
from ctxreuse.cache import CapacityTracker
from ctxreuse.errors import EngineError
from ctxreuse.planning.savings import ReportedUsage
from ctxreuse.serving import EmulatedEngine, EngineClient, EnginePool

pytestmark = pytest.mark.usefixtures("paper_words")


async def test_the_tracker_hears_of_answers_and_failures(planner):
    tracker = CapacityTracker(planner, capacity_tokens=25)
    engine = EmulatedEngine(fail=[None, None, 400])
    async with connected(engine, planner=planner) as client:
        await client.complete(planned(planner, text="one " * 4))
        assert (planner.statistics().tokens, tracker.block_share) == (4, 4 / 23)
        await client.complete(planned(planner, text="two " * 4))
        assert planner.statistics().tokens == 4
        with pytest.raises(EngineError):
            await client.complete(planned(planner, text="three " * 4))
    assert planner.statistics().tokens == 4


async def test_a_failed_call_of_one_tenant_leaves_anothers_request_of_the_same_id_alone(planner):
    ours = planned(planner, tenant="a")
    engine = EmulatedEngine(fail=[400])
    async with connected(engine, planner=planner) as client:
        with pytest.raises(EngineError):
            await client.complete(planned(planner, tenant="b", request_id=ours.request_id))
    assert planner.evict([ours.request_id], "a").requests == 1


class Records:
    def __init__(self):
        self.told = []

    def expect(self):
        """It knows what is told."""

    def record(self, plan, prompt_token_ids, *, cache_salt=None, lora=None):
        self.told.append((plan.request_id, prompt_token_ids, cache_salt, lora))


async def test_the_event_sync_hears_the_prompts_tokens_and_salt():
    events, engine, planner = Records(), EmulatedEngine(), ReusePlanner()
    plan = planned(planner)
    async with connected(engine, events=events) as client:
        completion = await client.complete(plan, cache_salt="s")
        await client.complete(MESSAGES)
    tokens = tuple(engine.prompt_tokens(plan.messages()))
    assert events.told == [("request-0", tokens, "s", None)]
    assert completion.prompt_token_ids == tokens
    assert [body.get("return_token_ids") for body in engine.requests] == [True, None]


@pytest.mark.parametrize("options", [{}, {"model": "my-lora"}])
async def test_the_event_sync_hears_of_the_adapter_which_is_also_the_model(options):
    events, engine = Records(), EmulatedEngine(model="my-lora")
    await completed(
        engine, planned(ReusePlanner()), {"events": events, "lora": "my-lora", **options}
    )
    assert [told[3] for told in events.told] == ["my-lora"]
    assert [body["model"] for body in engine.requests] == ["my-lora"]


async def test_a_call_to_the_adapters_base_model_is_one_without_an_adapter():
    events, planner = Records(), ReusePlanner()
    end = event({**END, "prompt_token_ids": [1]})
    transport = raw_replies(end, end, end)
    async with connected(transport, events=events, lora="my-lora") as client:
        for params in ({}, {"model": "my-lora"}, {"model": "base"}):
            await client.complete(planned(planner), **params)
    assert [told[3] for told in events.told] == ["my-lora", "my-lora", None]


async def test_an_engine_that_returns_no_tokens_is_named_once_and_no_request_is_followed(caplog):
    chunk = usage(prompt_tokens=3, prompt_tokens_details={"cached_tokens": 0})
    events = Records()
    options = {"model": "m", "events": events}
    for _ in range(2):
        await completed(raw_replies(chunk), planned(ReusePlanner()), options)
    async with connected(EmulatedEngine(), events=events) as client:
        await client.complete(planned(ReusePlanner()))
    assert len(events.told) == 1
    told = [record.getMessage() for record in caplog.records if record.name == "ctxreuse"]
    assert len(told) == 2  # by each client
    assert all("engine returns no token ids (vLLM does since 0.11)" in one for one in told)


async def test_a_field_of_ours_that_an_engine_refuses_is_dropped_once_and_logged_once(caplog):
    engine, refused = EmulatedEngine(), []

    class Strict(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request):
            if b"return_token_ids" in await request.aread():
                refused.append(request)
                message = "return_token_ids is not supported with streaming"
                return httpx.Response(400, json={"error": {"message": message}})
            return await engine.transport().handle_async_request(request)

    async with connected(Strict(), model="emulated", events=Records()) as client:
        for _ in range(3):
            assert (await client.complete(planned(ReusePlanner()))).text == "OK."
    assert (len(refused), len(engine.requests)) == (1, 3)
    told = [record.getMessage() for record in caplog.records if "refuses" in record.getMessage()]
    assert told == ["engine refuses the field return_token_ids, which is not sent to it any more"]


class SGLang(httpx.AsyncBaseTransport):
    """Answers chats as SGLang does: tokens in whole answers, none in those of older versions."""

    def __init__(self, *, tells_ids):
        self.engine, self._tells_ids = EmulatedEngine(), tells_ids

    async def handle_async_request(self, request):
        if request.method == "GET":
            return await self.engine.transport().handle_async_request(request)
        body = json.loads(await request.aread())
        asks = [body.pop(name, False) for name in ("return_token_ids", "return_prompt_token_ids")]
        if body.get("stream") and any(asks) and self._tells_ids:
            message = "return_token_ids is not supported with streaming"
            return httpx.Response(400, json={"error": {"message": message}})
        sent = httpx.Request("POST", request.url, json={**body, "return_token_ids": any(asks)})
        answer = await self.engine.transport().handle_async_request(sent)
        if body.get("stream"):
            return answer
        reply = json.loads(await answer.aread())
        ids = reply.pop("prompt_token_ids", None)
        if self._tells_ids:
            reply["choices"][0]["prompt_token_ids"] = ids
        return httpx.Response(200, json=reply)


@pytest.mark.parametrize("tells_ids", [True, False])
async def test_an_sglang_is_asked_for_tokens_behind_an_answer_or_named_once(tells_ids, caplog):
    events, server, planner = Records(), SGLang(tells_ids=tells_ids), ReusePlanner(cache="sglang")
    plans = [planned(planner, text=text) for text in ("one " * 9, "two " * 9)]
    async with connected(server, events=events) as client:
        for plan in plans:
            assert (await client.complete(plan, cache_salt="s")).text == "OK."
            await asyncio.gather(*client._token_ids.running)
    told = [record.getMessage() for record in caplog.records if record.name == "ctxreuse"]
    if tells_ids:
        expected = [tuple(server.engine.prompt_tokens(plan.messages())) for plan in plans]
        assert [(tuple(ids), salt) for _, ids, salt, _ in events.told] == [
            (ids, "s") for ids in expected
        ]
        assert told == []
        assert [body["max_tokens"] for body in server.engine.requests[1::2]] == [1, 1]
    else:
        assert (events.told, len(told), len(server.engine.requests)) == ([], 1, 3)


@pytest.mark.parametrize(
    ("request_id", "sent"), [("mine-1", "mine-1"), (7, "7"), ("zwölf", None), ("a\nb", None)]
)
async def test_the_request_id_goes_out_as_a_header_and_to_sglang_as_a_field(request_id, sent):
    engine = EmulatedEngine()
    async with overheard("x-request-id", engine) as (connect, seen):
        for cache in ("vllm", "sglang"):
            planner = ReusePlanner(cache=cache)
            plan = planner.plan(ContextRequest(["a text"], "Which?", request_id=request_id))
            assert (await connect().complete(plan)).request_id == request_id
    assert seen == [sent, sent]
    assert [body.get("rid") for body in engine.requests] == [None, sent]


async def test_a_fault_in_the_bookkeeping_does_not_fail_the_call(caplog, monkeypatch, planner):
    monkeypatch.setattr(planner, "report_usage", None)
    async with connected(EmulatedEngine(), planner=planner) as client:
        assert client.faults == 0
        for faults in (1, 2):
            assert (await client.complete(planned(planner))).text == "OK."
            assert client.faults == faults
    assert "EngineClient: bookkeeping failed with TypeError at engine_client.py:" in caplog.text
    assert [record.levelno for record in caplog.records if record.name == "ctxreuse"] == [
        logging.WARNING
    ]


TEXT = "Paris is in France. " * 40


def reported(engine, planner):
    found = planner.savings.reported
    usage = engine.usage
    assert (found.prompt_tokens, found.cached_tokens) == (usage.prompt_tokens, usage.cached_tokens)
    return found


async def test_a_client_tells_its_planner_what_answers_report():
    engine, planner = EmulatedEngine(block_size=4), ReusePlanner()
    async with connected(engine, planner=planner) as client:
        for _ in range(2):
            await client.complete(planned(planner, TEXT))
        async with client.stream(planned(planner, TEXT)) as stream:
            _ = [piece async for piece in stream]
        await client.complete(MESSAGES)
    found = reported(engine, planner)
    assert found.answers == 4
    assert found.cached_tokens > found.expected_cached_tokens > 0


async def test_a_pool_counts_for_each_engine_once_and_not_what_fails():
    network = Network(a=EmulatedEngine(block_size=4), b=EmulatedEngine(block_size=4))
    async with pool_on(network) as pool:
        for names in ("xyz", "zyx", "pqr", "rqp"):
            await pool.complete(asking(names))
        planners = pool.planners
    assert list(planners) == list(pool.names)
    for name, engine in network.engines.items():
        found = reported(engine, planners[f"{name}"])
        assert found.answers == len(engine.requests)

    engine, planner = EmulatedEngine(fail=[400]), ReusePlanner()
    async with connected(engine, planner=planner) as client:
        with pytest.raises(Exception, match="400"):
            await client.complete(planned(planner, TEXT))
    assert planner.savings.reported == ReportedUsage()


async def test_a_pool_counts_for_clients_of_the_users_own():
    engine = EmulatedEngine(block_size=4)

    def connect():
        return EngineClient("http://a", http_client=httpx.AsyncClient(transport=engine.transport()))

    async with EnginePool({"a": connect}, window_s=0) as pool:
        for names in ("xyz", "zyx"):
            await pool.complete(asking(names))
    assert reported(engine, pool.planners["a"]).answers == 2
    assert pool.planners["a"].savings.requests == 2
