import asyncio
import itertools
import json
import logging
import subprocess
import sys
from contextlib import asynccontextmanager
from types import SimpleNamespace

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse import ContextRequest, ReusePlanner
from ctxreuse.cache import EngineMetrics, ShadowCache
from ctxreuse.errors import EngineError, InvalidRequestError, MissingExtraError
from ctxreuse.index import IndexStatistics
from ctxreuse.serving import Completion, EmulatedEngine, EngineClient, ToolCall
from ctxreuse.serving.cache_salt import conversation_session, is_cache_salt, tenant_salt
from ctxreuse.serving.transient_errors import waiting

MESSAGES = [{"role": "user", "content": "Where is Paris?"}]
NOTHING = IndexStatistics()


@asynccontextmanager
async def connected(engine, **options):
    """A client of an emulated engine that does not wait between attempts."""
    transport = engine.transport() if isinstance(engine, EmulatedEngine) else engine
    async with httpx.AsyncClient(transport=transport) as http:
        yield EngineClient("http://engine/v1", http_client=http, backoff_s=0, **options)


async def completed(engine, prompt=MESSAGES, options=None, **params):
    async with connected(engine, **(options or {})) as client:
        return await client.complete(prompt, **params)


def planned(planner, text="Paris is in France.", query="Where is Paris?", **fields):
    return planner.plan(ContextRequest([text], query, **fields))


def raw_replies(*bodies):
    """A transport that answers with these bytes in turn, as event streams."""
    remaining = list(bodies)
    headers = {"content-type": "text/event-stream"}
    return httpx.MockTransport(
        lambda request: httpx.Response(200, headers=headers, content=remaining.pop(0))
    )


async def test_a_completion_says_what_the_request_cost():
    engine = EmulatedEngine(block_size=4, answer="In France.")
    planner = ReusePlanner()
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
        total_s=4,
        attempts=1,
    )
    assert (second.request_id, second.cached_tokens) == ("request-1", 20)
    assert planner.statistics().requests == 2


async def test_the_first_token_is_timed_from_the_attempt_that_succeeded():
    ticks = itertools.count(10)
    options = {"clock": lambda: next(ticks), "model": "emulated"}
    completion = await completed(EmulatedEngine(fail=[503, "break"]), options=options)
    assert completion.attempts == 3
    # attempts begin at 10, 11 and 13; the second one broke after its first token
    assert (completion.time_to_first_token_s, completion.total_s) == (1, 6)


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


async def test_bare_messages_are_sent_as_they_are_and_get_the_engines_id():
    engine = EmulatedEngine()
    completion = await completed(engine)
    assert completion.request_id == "chatcmpl-0"
    assert engine.requests[0]["messages"] == MESSAGES


async def test_unknown_cached_tokens_are_not_zero_and_the_remedy_is_logged_once(caplog):
    async with connected(EmulatedEngine(prompt_tokens_details=False)) as client:
        counts = [(await client.complete(MESSAGES)).cached_tokens for _ in range(2)]
    assert counts == [None, None]
    warnings = [record.getMessage() for record in caplog.records if record.name == "ctxreuse"]
    assert warnings == [
        "engine does not report cached tokens, so they are unknown, not 0: "
        "start vLLM with --enable-prompt-tokens-details"
    ]


async def test_a_server_that_reports_no_usage_leaves_the_counts_unknown():
    chunk = b'data: {"id": "x", "choices": [{"index": 0, "delta": {"content": "Hi"}, '
    chunk += b'"finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
    completion = await completed(raw_replies(chunk), options={"model": "m"})
    counts = (completion.prompt_tokens, completion.cached_tokens, completion.completion_tokens)
    assert (completion.text, counts) == ("Hi", (None, None, None))


@pytest.mark.parametrize("failure", [408, 409, 429, 500, 503, "refuse", "break"])
async def test_a_failure_that_passes_is_tried_again(failure):
    engine = EmulatedEngine(answer="once only", fail=[failure, failure])
    planner = ReusePlanner()
    completion = await completed(engine, planned(planner), {"planner": planner})
    assert (completion.text, completion.attempts) == ("once only", 3)
    assert len(engine.requests) == 3
    assert planner.statistics().requests == 1


@pytest.mark.parametrize("status", [400, 401, 404, 422])
async def test_a_refusal_is_not_tried_again_and_the_planner_hears_of_it(status):
    engine = EmulatedEngine(fail=[status])
    planner = ReusePlanner()
    with pytest.raises(EngineError, match=f"status {status}") as caught:
        await completed(engine, planned(planner), {"planner": planner})
    assert (caught.value.status, caught.value.attempts) == (status, 1)
    assert isinstance(caught.value.__cause__, openai.APIStatusError)
    assert planner.statistics() == NOTHING


@pytest.mark.parametrize("failure", [503, "refuse", "break"])
async def test_a_failure_that_stays_is_reported_without_the_prompt(failure):
    engine = EmulatedEngine(fail=lambda number, body: failure)
    planner = ReusePlanner()
    with pytest.raises(EngineError, match="attempts: 2; the cause says more") as caught:
        await completed(engine, planned(planner), {"planner": planner, "retries": 1})
    assert caught.value.status == (503 if failure == 503 else None)
    assert caught.value.attempts == len(engine.requests) == 2
    assert "Paris" not in str(caught.value)
    assert planner.statistics() == NOTHING


async def test_a_cancelled_request_is_told_to_the_planner():
    begun = asyncio.Event()

    async def never(body):
        begun.set()
        await asyncio.Event().wait()

    planner = ReusePlanner()
    async with connected(EmulatedEngine(answer=never), planner=planner) as client:
        task = asyncio.create_task(client.complete(planned(planner)))
        await begun.wait()
        assert planner.statistics().requests == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert planner.statistics() == NOTHING


async def test_a_stream_gives_pieces_and_then_the_completion():
    engine = EmulatedEngine(answer="In France it is.", fail=[503, "refuse"])
    planner = ReusePlanner()
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


async def test_a_stream_is_not_sent_again_once_a_piece_is_out():
    engine = EmulatedEngine(answer="In France.", fail=["break"])
    planner = ReusePlanner()
    async with connected(engine, planner=planner) as client:
        stream = client.stream(planned(planner))
        assert await anext(stream) == "In"
        with pytest.raises(EngineError):
            await anext(stream)
    assert len(engine.requests) == 1
    assert planner.statistics() == NOTHING


async def test_a_stream_that_is_left_early_is_told_to_the_planner():
    planner = ReusePlanner()
    async with connected(EmulatedEngine(answer="In France."), planner=planner) as client:
        async with client.stream(planned(planner)) as stream:
            assert await anext(stream) == "In"
            assert planner.statistics().requests == 1
        assert planner.statistics() == NOTHING


async def test_an_empty_answer_is_an_answer():
    async with connected(EmulatedEngine(answer="")) as client:
        assert (await client.complete(MESSAGES)).text == ""
        stream = client.stream(MESSAGES)
        assert [piece async for piece in stream] == []
        assert stream.completion.finish_reason == "stop"


@pytest.mark.parametrize(
    "broken",
    [
        b"",
        b"data: [DONE]\n\n",
        b'data: {"choices": [{"index": 0, "delta": {"content": "Hal"}}]}\n\n',
        b'data: {"choices": [{"index": 0, "delta": {"content": "Hal"}}]}\n\ndata: {"cho\n\n',
        b'data: {"error": {"message": "out of memory", "code": 500}}\n\n',
        b'data: {"choices": null}\n\n',
    ],
)
async def test_a_stream_that_does_not_come_to_its_end_is_a_failure(broken):
    whole = b'data: {"choices": [{"index": 0, "delta": {"content": "Whole"}, '
    whole += b'"finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
    completion = await completed(raw_replies(broken, whole), options={"model": "m"})
    assert (completion.text, completion.attempts) == ("Whole", 2)
    with pytest.raises(EngineError):
        await completed(raw_replies(broken), options={"model": "m", "retries": 0})


async def test_the_first_token_is_announced_once_an_attempt():
    engine = EmulatedEngine(answer="In France it is.", fail=["break"])
    seen = []
    await completed(engine, on_first_token=lambda: seen.append(len(engine.requests)))
    assert seen == [1, 2]


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
async def test_a_thought_is_a_first_token_and_no_part_of_the_answer(field):
    chunk = '{"choices": [{"index": 0, "delta": {"%s": "Hm"}}]}' % field  # noqa: UP031
    end = '{"choices": [{"index": 0, "delta": {"content": "Yes"}, "finish_reason": "stop"}]}'
    ticks = itertools.count(10)
    completion = await completed(
        raw_replies(f"data: {chunk}\n\ndata: {end}\n\n".encode()),
        options={"model": "m", "clock": lambda: next(ticks)},
    )
    assert (completion.text, completion.time_to_first_token_s, completion.total_s) == ("Yes", 1, 3)


async def test_tool_calls_are_put_together():
    calls = [ToolCall("search", '{"q": 1}', id="a"), ToolCall("read", "{}", id="b")]
    completion = await completed(EmulatedEngine(answer=lambda body: calls))
    assert completion.tool_calls == tuple(calls)
    assert (completion.text, completion.finish_reason) == ("", "tool_calls")


async def test_tool_calls_in_pieces_are_put_together():
    def chunk(delta, finish="null"):
        return b'data: {"choices": [{"index": 0, "delta": %s, "finish_reason": %s}]}\n\n' % (
            delta.encode(),
            finish.encode(),
        )

    body = chunk('{"tool_calls": [{"index": 0, "id": "a", "function": {"name": "find"}}]}')
    for piece in ('{"q"', ": 1}"):
        arguments = json.dumps({"arguments": piece})
        body += chunk(f'{{"tool_calls": [{{"index": 0, "function": {arguments}}}]}}')
    body += chunk("{}", '"tool_calls"')
    completion = await completed(raw_replies(body), options={"model": "m"})
    assert completion.tool_calls == (ToolCall("find", '{"q": 1}', id="a"),)


async def test_the_engine_is_asked_for_its_model_once():
    engine, asked = EmulatedEngine(model="its-own"), []
    transport = engine.transport()

    async def note(request):
        asked.append(request.url.path)

    async with httpx.AsyncClient(transport=transport, event_hooks={"request": [note]}) as http:
        client = EngineClient("http://engine", http_client=http)
        await asyncio.gather(*(client.complete(MESSAGES) for _ in range(3)))
    assert asked.count("/v1/models") == 1
    assert {body["model"] for body in engine.requests} == {"its-own"}


async def test_a_model_that_is_given_is_not_asked_for():
    with pytest.raises(EngineError, match=r"status 404 \(NotFoundError\)"):
        await completed(EmulatedEngine(), options={"model": "another"})


async def test_an_engine_without_a_model_is_said_so():
    page = httpx.MockTransport(lambda request: httpx.Response(200, json={"data": []}))
    with pytest.raises(EngineError, match="the engine at engine names no model; pass model="):
        await completed(page)


async def test_tenants_get_their_own_salt_and_the_default_tenant_none():
    engine = EmulatedEngine(block_size=4)
    planner = ReusePlanner()
    async with connected(engine, cache_salt="tenant", salt_key="secret") as client:
        for tenant in ("a@b/c\\\0", "", "b", "b"):
            await client.complete(planned(planner, tenant=tenant))
        await client.complete(planned(planner, tenant="b"), cache_salt="this one")
    salts = [body.get("cache_salt") for body in engine.requests]
    assert salts == [
        tenant_salt("a@b/c\\\0", "secret"),
        None,
        tenant_salt("b", "secret"),
        tenant_salt("b", "secret"),
        "this one",
    ]
    assert engine.usage.cached_tokens == 20  # only the second one of tenant "b"


@pytest.mark.parametrize("salt", ["", "a" * 129, "a@b", "a/b", "a\\b", "a\0b", 3])
async def test_a_salt_that_vllm_would_refuse_is_refused(salt):
    with pytest.raises(InvalidRequestError, match="cache_salt must be a string of 1 to 128"):
        await completed(EmulatedEngine(), cache_salt=salt)


def test_the_longest_salt_that_vllm_takes_is_taken():
    assert [is_cache_salt("a" * length) for length in (0, 1, 128, 129)] == [
        False,
        True,
        True,
        False,
    ]


@given(st.text(min_size=1), st.text(min_size=1), st.text())
def test_tenants_salts_are_valid_and_differ(tenant, other, key):
    salt = tenant_salt(tenant, key)
    assert is_cache_salt(salt)
    assert (salt == tenant_salt(other, key)) == (tenant == other)
    assert (salt == tenant_salt(tenant, "another")) == (key == "another")


def test_a_conversations_session_is_its_own():
    identities = [("t", "1"), ("t", 1), ("u", "1"), ("", "t1"), ("t", 10**5000)]
    assert len({conversation_session(*one) for one in identities}) == len(identities)


async def test_sessions_are_sent_as_a_header_if_asked_for():
    sessions = []

    async def note(request):
        sessions.append(request.headers.get("X-Session-ID"))

    planner = ReusePlanner()
    hooks = {"request": [note]}
    transport = EmulatedEngine().transport()
    async with httpx.AsyncClient(transport=transport, event_hooks=hooks) as http:
        client = EngineClient("http://engine", "emulated", http_client=http)
        await client.complete(planned(planner, conversation_id="c"))
        client = EngineClient(
            "http://engine", "emulated", http_client=http, session_id="conversation"
        )
        await client.complete(planned(planner, conversation_id="c", tenant="t"))
        await client.complete(planned(planner))
        await client.complete(planned(planner), session_id="mine")
    assert sessions == [None, conversation_session("t", "c"), None, "mine"]


async def test_the_shadow_hears_of_answers_and_failures():
    planner = ReusePlanner()
    shadow = ShadowCache(planner, capacity_tokens=25)
    engine = EmulatedEngine(fail=[None, None, 400])
    async with connected(engine, shadow=shadow) as client:
        await client.complete(planned(planner, text="one " * 4))
        assert (planner.statistics().tokens, shadow.block_share) == (4, 4 / 23)
        await client.complete(planned(planner, text="two " * 4))
        assert planner.statistics().tokens == 4
        with pytest.raises(EngineError):
            await client.complete(planned(planner, text="three " * 4))
    assert planner.statistics().tokens == 4


class Records:
    """What a KVEventSync is told."""

    def __init__(self):
        self.told = []

    def record(self, plan, prompt_token_ids, *, cache_salt=None):
        self.told.append((plan.request_id, prompt_token_ids, cache_salt))


async def test_the_event_sync_hears_the_prompts_tokens_and_salt():
    events, engine, planner = Records(), EmulatedEngine(), ReusePlanner()
    plan = planned(planner)
    async with connected(engine, events=events) as client:
        completion = await client.complete(plan, cache_salt="s")
        await client.complete(MESSAGES)
    tokens = tuple(engine.prompt_tokens(plan.messages()))
    assert events.told == [("request-0", tokens, "s")]
    assert completion.prompt_token_ids == tokens
    assert [body.get("return_token_ids") for body in engine.requests] == [True, None]


async def test_an_engine_that_returns_no_tokens_leaves_the_event_sync_alone(caplog):
    chunk = b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], '
    chunk += b'"usage": {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 0}}}\n\n'
    events = Records()
    options = {"model": "m", "events": events}
    await completed(raw_replies(chunk), planned(ReusePlanner()), options)
    assert events.told == []
    assert caplog.records == []


async def test_a_fault_in_the_bookkeeping_does_not_fail_the_call(caplog):
    planner = ReusePlanner()
    shadow = ShadowCache(planner, capacity_tokens=100)
    shadow.observe = None
    completion = await completed(EmulatedEngine(), planned(planner), {"shadow": shadow})
    assert completion.text == "OK."
    assert [record.levelno for record in caplog.records if record.name == "ctxreuse"] == [
        logging.WARNING
    ]


async def test_metrics_and_tokens_are_the_engines():
    engine = EmulatedEngine(block_size=4, capacity_tokens=400)
    planner = ReusePlanner()
    plan = planned(planner)
    async with connected(engine) as client:
        await client.complete(MESSAGES)
        metrics = await client.metrics()
        assert await client.tokenize(plan) == tuple(engine.prompt_tokens(plan.messages()))
    assert metrics == EngineMetrics.parse(engine.metrics())
    assert (metrics.prefix_cache_queries, metrics.capacity_tokens) == (13, 396)


async def test_routes_that_an_engine_lacks_are_said_so():
    lacking = httpx.MockTransport(lambda request: httpx.Response(404))
    nonsense = httpx.MockTransport(lambda request: httpx.Response(200, json=[]))
    async with connected(lacking, model="m") as client:
        with pytest.raises(EngineError, match="status 404"):
            await client.metrics()
    async with connected(nonsense, model="m") as client:
        with pytest.raises(EngineError, match="returned no tokens"):
            await client.tokenize(MESSAGES)


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
async def test_an_address_is_taken_with_and_without_v1(url):
    paths = []

    def answer(request):
        paths.append(str(request.url))
        return httpx.Response(404)

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        client = EngineClient(url, http_client=http)
        for ask in (client.model, client.metrics):
            with pytest.raises(EngineError, match="the engine at h:1 did not answer"):
                await ask()
    assert paths == ["http://h:1/v1/models", "http://h:1/metrics"]


async def test_a_password_in_the_address_stays_out_of_messages():
    async with httpx.AsyncClient(transport=EmulatedEngine(fail=[400]).transport()) as http:
        client = EngineClient("http://user:secret@engine/v1", http_client=http)
        with pytest.raises(EngineError) as caught:
            await client.complete(MESSAGES)
    assert "secret" not in str(caught.value)


async def test_only_its_own_connections_are_closed():
    async with httpx.AsyncClient(transport=EmulatedEngine().transport()) as http:
        async with EngineClient("http://engine", http_client=http) as client:
            await client.complete(MESSAGES)
        assert not http.is_closed
        async with EngineClient("http://engine") as client:
            assert not client._openai.is_closed()
        assert client._openai.is_closed()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base_url": "engine:8000"}, "base_url must be the engine's address"),
        ({"base_url": None}, "base_url must be the engine's address"),
        ({"planner": "p"}, "planner must be a ReusePlanner, not 'p'"),
        ({"retries": -1}, "retries must be an integer from 0, not -1"),
        ({"cache_salt": "mine"}, r"cache_salt must be 'tenant' or None, not 'mine' \(str\); a lit"),
        ({"session_id": 3}, "session_id must be 'conversation' or None, not 3"),
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
    with pytest.raises(
        MissingExtraError, match=r"EngineClient .* pip install 'ctxreuse\[openai\]'"
    ):
        EngineClient("http://engine")


@pytest.mark.parametrize(
    ("header", "seconds"), [("7", 7.0), ("0.5", 0.5), ("9999", 60.0), ("soon", 0.0), ("-1", 0.0)]
)
def test_the_wait_between_attempts_is_what_the_server_asks_for(header, seconds):
    response = httpx.Response(429, headers={"retry-after": header})
    error = SimpleNamespace(response=response)
    outcome = SimpleNamespace(exception=lambda: error)
    assert waiting(0)(SimpleNamespace(outcome=outcome, attempt_number=1)) == seconds


def test_the_wait_between_attempts_grows_at_random():
    state = SimpleNamespace(outcome=SimpleNamespace(exception=lambda: None), attempt_number=3)
    waits = {waiting(0.5)(state) for _ in range(50)}
    assert len(waits) > 1
    assert all(0 <= wait <= 2.0 for wait in waits)


def test_optional_packages_are_not_imported_before_they_are_needed():
    optional = {"openai", "httpx", "httpx2", "tenacity", "zmq", "msgspec", "rich"}
    code = (
        "import sys, ctxreuse.serving, ctxreuse.cache.events; "
        f"print(sorted({optional!r} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (run.stdout, run.stderr) == ("[]\n", "")
