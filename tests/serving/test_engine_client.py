"""The engine client: completions, streams, failures and retries, the server's own routes."""

import asyncio
import itertools
import sys
from types import SimpleNamespace

import httpx
import openai
import pytest
from client_helpers import MESSAGES, NOTHING, completed, connected, planned, raw_replies
from hostile_servers import END, delta, event
from python_processes import python

from ctxreuse import ReusePlanner
from ctxreuse.cache import PrefixCacheMetrics
from ctxreuse.errors import EngineError, InvalidRequestError, MissingExtraError
from ctxreuse.serving import Completion, EmulatedEngine, EngineClient, ToolCall
from ctxreuse.serving.client.connection import EngineConnection

pytestmark = pytest.mark.usefixtures("paper_words")


async def test_a_completion_says_what_the_request_cost(planner):
    engine = EmulatedEngine(block_size=4, answer="In France.")
    ticks = itertools.count(10)
    async with connected(engine, clock=lambda: next(ticks), planner=planner) as client:
        first = await client.complete(planned(planner))
        second = await client.complete(planned(planner), max_tokens=3)
    assert first == Completion(
        text="In France.",
        request_id="request-0",
        finish_reason="stop",
        prompt_tokens=22,
        cached_tokens=0,
        completion_tokens=3,
        time_to_first_token_s=1,
        total_s=2,
        attempts=1,
    )
    assert (second.request_id, second.cached_tokens) == ("request-1", 20)
    assert planner.statistics().requests == 2


async def test_nothing_is_sent_but_the_prompt_and_what_was_asked_for():
    engine = EmulatedEngine()
    plan = planned(ReusePlanner(), tenant="t", conversation_id="c")
    await completed(engine, plan, max_tokens=5, stream_options={"x": 1}, extra_body={"seed": 3})
    assert engine.requests == [
        {
            "model": "emulated",
            "messages": plan.messages(),
            "max_tokens": 5,
            "seed": 3,
            "stream": True,
            "stream_options": {"x": 1, "include_usage": True},
        }
    ]


async def test_bare_messages_are_sent_as_they_are_and_first_tokens_announced_once_an_attempt():
    engine = EmulatedEngine()
    completion = await completed(engine)
    assert completion.request_id == "chatcmpl-0"
    assert engine.requests[0]["messages"] == MESSAGES
    engine = EmulatedEngine(answer="In France it is.", fail=["break"])
    seen = []
    await completed(engine, on_first_token=lambda: seen.append(len(engine.requests)))
    assert seen == [1, 2]


LONG_TEXT = "Paris is in France, and Rome is in Italy. " * 200


async def test_cached_tokens_left_out_where_there_are_none_are_0_once_any_were_reported():
    engine = EmulatedEngine(block_size=4, prompt_tokens_details="if cached")
    planner = ReusePlanner()
    counts = []
    async with connected(engine) as client:
        for text in (LONG_TEXT, "something else", LONG_TEXT, "new", "other " * 5_000):
            plan = planned(planner, text, system=text)
            counts.append((await client.complete(plan)).cached_tokens)
    prompt_tokens = len(engine.prompt_tokens(plan.messages()))
    assert counts[:2] == [None, None]  # none was cached, but that cannot be known yet
    assert counts[2] > 1_000
    assert counts[3:] == [0, 0]
    assert prompt_tokens > 1_000


@pytest.mark.parametrize("failure", [408, 409, 429, 500, 503, "refuse", "break"])
async def test_a_failure_that_passes_is_tried_again(failure, planner):
    engine = EmulatedEngine(answer="once only", fail=[failure, failure])
    completion = await completed(engine, planned(planner), {"planner": planner})
    assert (completion.text, completion.attempts) == ("once only", 3)
    assert len(engine.requests) == 3
    assert planner.statistics().requests == 1


@pytest.mark.parametrize("status", [400, 401, 404, 422])
async def test_a_refusal_is_not_tried_again_and_the_planner_hears_of_it(status, planner):
    engine = EmulatedEngine(fail=[status])
    with pytest.raises(EngineError, match=f"status {status}") as caught:
        await completed(engine, planned(planner), {"planner": planner})
    assert (caught.value.status, caught.value.attempts) == (status, 1)
    assert isinstance(caught.value.__cause__, openai.APIStatusError)
    assert planner.statistics() == NOTHING


@pytest.mark.parametrize("failure", [503, "refuse", "break"])
async def test_a_failure_that_stays_is_reported_without_the_prompt(failure, planner):
    engine = EmulatedEngine(fail=lambda number, body: failure)
    with pytest.raises(EngineError, match=r" \(attempts: 2\); the cause") as caught:
        await completed(engine, planned(planner), {"planner": planner, "retries": 1})
    assert caught.value.status == (503 if failure == 503 else None)
    assert caught.value.attempts == len(engine.requests) == 2
    assert "Paris" not in str(caught.value)
    assert planner.statistics() == NOTHING


async def test_a_cancelled_request_is_told_to_the_planner(planner):
    begun = asyncio.Event()

    async def never(body):
        begun.set()
        await asyncio.Event().wait()

    async with connected(EmulatedEngine(answer=never), planner=planner) as client:
        task = asyncio.create_task(client.complete(planned(planner)))
        await begun.wait()
        assert planner.statistics().requests == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert planner.statistics() == NOTHING


async def test_a_stream_gives_pieces_and_then_the_completion(planner):
    engine = EmulatedEngine(answer="In France it is.", fail=[503, "refuse"])
    async with (
        connected(engine, planner=planner) as client,
        client.stream(planned(planner), max_tokens=9) as stream,
    ):
        with pytest.raises(EngineError, match="has not ended"):
            _ = stream.completion
        pieces = [piece async for piece in stream]
    assert pieces == ["In", " France", " it", " is."]
    completion = stream.completion
    assert (completion.text, completion.attempts) == ("In France it is.", 3)
    assert planner.statistics().requests == 1


async def test_a_stream_is_not_sent_again_once_a_piece_is_out(planner):
    engine = EmulatedEngine(answer="In France.", fail=["break"])
    async with connected(engine, planner=planner) as client:
        stream = client.stream(planned(planner))
        assert await anext(stream) == "In"
        with pytest.raises(EngineError):
            await anext(stream)
    assert len(engine.requests) == 1
    assert planner.statistics() == NOTHING


async def test_a_stream_that_is_left_early_is_told_to_the_planner(planner):
    async with connected(EmulatedEngine(answer="In France."), planner=planner) as client:
        async with client.stream(planned(planner)) as stream:
            assert await anext(stream) == "In"
            assert planner.statistics().requests == 1
        assert planner.statistics() == NOTHING


async def test_a_stream_of_which_nothing_was_asked_is_told_to_the_planner_and_not_sent():
    engine, planner = EmulatedEngine(), ReusePlanner()
    async with connected(engine, planner=planner) as client:
        async with client.stream(planned(planner)) as stream:
            assert planner.statistics().requests == 1
        assert planner.statistics() == NOTHING
        with pytest.raises(LookupError):
            async with client.stream(planned(planner)):
                raise LookupError
        assert planner.statistics() == NOTHING
        kept = planned(planner)
        await stream.aclose()
        await client.stream(MESSAGES).aclose()
        assert [piece async for piece in stream] == []
        assert planner.evict([kept.request_id]).unknown == ()
    assert engine.requests == []


@pytest.mark.parametrize(
    "broken",
    [
        b'data: {"choices": [{"index": 0, "delta": {"content": "Hal"}}]}\n\n',
        b'data: {"choices": [{"index": 0, "delta": {"content": "Hal"}}]}\n\ndata: {"cho\n\n',
    ],
)
async def test_a_stream_that_does_not_come_to_its_end_is_a_failure(broken):
    completion = await completed(raw_replies(broken, event(END)), options={"model": "m"})
    assert (completion.text, completion.attempts) == ("Hi", 2)
    with pytest.raises(EngineError):
        await completed(raw_replies(broken), options={"model": "m", "retries": 0})


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
async def test_a_thought_is_a_first_token_and_no_part_of_the_answer(field):
    thought = event({"choices": [{"index": 0, "delta": {field: "Hm"}}]})
    ticks = itertools.count(10)
    options = {"model": "m", "clock": lambda: next(ticks)}
    completion = await completed(raw_replies(thought + event(END)), options=options)
    assert (completion.text, completion.time_to_first_token_s, completion.total_s) == ("Hi", 1, 2)


async def test_tool_calls_are_put_together_and_an_empty_answer_is_an_answer():
    calls = [ToolCall("search", '{"q": 1}', id="a"), ToolCall("read", "{}", id="b")]
    completion = await completed(EmulatedEngine(answer=lambda body: calls))
    assert completion.tool_calls == tuple(calls)
    assert (completion.text, completion.finish_reason) == ("", "tool_calls")

    async with connected(EmulatedEngine(answer="")) as client:
        assert (await client.complete(MESSAGES)).text == ""
        stream = client.stream(MESSAGES)
        assert [piece async for piece in stream] == []
        assert stream.completion.finish_reason == "stop"


async def test_tool_calls_in_pieces_are_put_together():
    calls = [{"index": 0, "id": "a", "function": {"name": "find"}}]
    calls += [{"index": 0, "function": {"arguments": piece}} for piece in ('{"q"', ": 1}")]
    body = b"".join(event(delta(tool_calls=[call])) for call in calls)
    completion = await completed(raw_replies(body), options={"model": "m"})
    assert completion.tool_calls == (ToolCall("find", '{"q": 1}', id="a"),)


async def test_metrics_and_tokens_are_the_engines(planner):
    engine = EmulatedEngine(block_size=4, capacity_tokens=400)
    plan = planned(planner)
    async with connected(engine) as client:
        await client.complete(MESSAGES)
        metrics = await client.metrics()
        assert await client.tokenize(plan) == tuple(engine.prompt_tokens(plan.messages()))
    assert metrics == PrefixCacheMetrics.parse(engine.metrics())
    assert (metrics.prefix_cache_queries, metrics.capacity_tokens) == (13, 396)


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
async def test_an_address_is_taken_with_and_without_v1(url):
    paths = []

    def answer(request):
        paths.append(str(request.url))
        return httpx.Response(404)

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        client = EngineClient(url, http_client=http)
        for ask in (client.model, client.metrics):
            with pytest.raises(EngineError, match="the engine at h:1 did not answer: status 404"):
                await ask()
    assert paths == ["http://h:1/v1/models", "http://h:1/metrics"]


async def test_only_its_own_connections_are_closed():
    async with httpx.AsyncClient(transport=EmulatedEngine().transport()) as http:
        async with EngineClient("http://engine", http_client=http) as client:
            await client.complete(MESSAGES)
        assert not http.is_closed
        async with EngineClient("http://engine") as client:
            assert not client._connection.openai.is_closed()
        assert client._connection.openai.is_closed()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base_url": "engine:8000"}, "base_url must be the engine's address"),
        ({"planner": "p"}, "planner must be a ReusePlanner, not 'p'"),
        *(
            ({"max_reply_bytes": size}, "max_reply_bytes must be an integer from 1, not ")
            for size in (0, -1, "1", 1.5, True, None)
        ),
        ({"retries": -1}, "retries must be an integer from 0, not -1"),
        ({"timeout_s": ()}, "timeout_s must be a number from 0, not "),
        ({"timeout_s": -1}, "timeout_s must be a number from 0, not "),
        ({"lora": 3}, "lora must be an adapter's name, not 3"),
        ({"cache_salt": "mine"}, r"cache_salt must be 'tenant' or None, not 'mine' \(str\); a lit"),
        ({"session_id": 3}, "session_id must be 'conversation' or 'group' or None, not 3"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    with pytest.raises(InvalidRequestError, match=message):
        EngineClient(**{"base_url": "http://engine", **options})


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ("text", {}, "a prompt must be a Plan or a list of chat messages, not 'text'"),
        (["text"], {}, "a chat message must be a dict, not 'text'"),
        (MESSAGES, {"n": 2}, "n must be 1, not 2"),
        (MESSAGES, {"stream": True}, "stream is set by the client; leave it out"),
        (MESSAGES, {"messages": []}, "messages is set by the client; leave it out"),
    ],
)
async def test_wrong_arguments_of_a_call_are_named(prompt, params, message):
    engine = EmulatedEngine()
    with pytest.raises(InvalidRequestError, match=message):
        await completed(engine, prompt, **params)
    assert engine.requests == []


@pytest.mark.parametrize("name", ["openai", "tenacity"])
def test_a_missing_package_names_the_extra(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=r"EngineClient .* pip install .*\[openai\]"):
        EngineClient("http://engine")


async def test_the_wait_between_attempts_grows_at_random_and_the_time_is_that_of_the_last():
    state = SimpleNamespace(outcome=SimpleNamespace(exception=lambda: None), attempt_number=3)
    connection = EngineConnection("http://engine", "key", None, 2, 0.5, None, 1_000)
    waits = {connection.attempts(connection.time_limit()).wait(state) for _ in range(50)}
    assert len(waits) > 1
    assert all(0 <= wait <= 2.0 for wait in waits)

    ticks = itertools.count(10)
    options = {"clock": lambda: next(ticks), "model": "emulated"}
    completion = await completed(EmulatedEngine(fail=[503, "break"]), options=options)
    assert completion.attempts == 3
    # attempts begin at 10, 11 and 13; the second one broke after its first token
    assert (completion.time_to_first_token_s, completion.total_s) == (1, 5)


def test_optional_packages_are_not_imported_before_they_are_needed():
    optional = {"openai", "httpx", "httpx2", "tenacity", "zmq", "msgspec", "rich"}
    code = (
        "import sys, ctxreuse.serving, ctxreuse.cache.kv_events.event_sync; "
        f"print(sorted({optional!r} & set(sys.modules)))"
    )
    run = python(code)
    assert (run.stdout, run.stderr) == ("[]\n", "")
