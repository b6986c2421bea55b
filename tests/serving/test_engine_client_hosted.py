"""The client in front of hosted caches: both protocols, marks, keys, headers and usage."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
from caching_provider import count_tokens
from caching_server import CachingServer, caching_server
from client_helpers import completed, raw_replies
from hostile_servers import END, event

from ctxreuse import ContextBlock, ContextRequest, Plan, ReusePlanner
from ctxreuse.errors import EngineError, InvalidRequestError
from ctxreuse.serving import EngineClient, dispatch
from ctxreuse.serving.client.reply import AnthropicReplyReader, BrokenReplyError, ToolCall


@pytest.fixture(params=["openai", "anthropic"])
def server(request: pytest.FixtureRequest) -> Iterator[CachingServer]:
    with caching_server(request.param) as server:
        yield server


def request(*names: str, **fields: Any) -> ContextRequest:
    blocks = [ContextBlock(id=name, text=f"{name} " * 1_200) for name in names]
    return ContextRequest(blocks, "Which?", system="Be brief.", **fields)


@asynccontextmanager
async def client_of(
    server: CachingServer, cache: str | None = None, **options: Any
) -> AsyncIterator[tuple[EngineClient, ReusePlanner]]:
    protocol = server.provider.protocol
    planner = ReusePlanner(cache=cache or protocol, token_counter=count_tokens)
    options = {"protocol": protocol, "retries": 0, **options}
    async with EngineClient(server.url, "m", planner=planner, **options) as client:
        yield client, planner


async def test_answers_say_what_was_read_and_written(server):
    async with client_of(server) as (client, planner):
        for names in (("a", "b"), ("a", "c"), ("a", "d")):
            answer = await client.complete(planner.plan(request(*names)), max_tokens=9)
            assert answer.text == server.answer
            assert answer.finish_reason == "stop"
            usage = server.usages[-1]
            assert answer.prompt_tokens == usage.total
            assert answer.cached_tokens == usage.read
            assert sum((answer.written_tokens or {}).values()) == sum(usage.written.values())
    reported = planner.savings.reported
    assert reported.cached_tokens == sum(one.read for one in server.usages) > 0
    assert reported.prompt_tokens == sum(one.total for one in server.usages)
    life = "30m" if server.provider.protocol == "openai" else "5m"
    assert reported.written == {life: sum(one.written.get(life, 0) for one in server.usages)}
    assert not server.refusals


async def test_streams_read_both_protocols(server):
    async with client_of(server) as (client, planner):
        async with client.stream(planner.plan(request("a")), max_tokens=9) as stream:
            assert "".join([piece async for piece in stream]) == server.answer
        assert stream.completion.prompt_tokens == server.usages[-1].total


async def test_what_the_default_profile_sends_has_no_parts_and_no_key(server):
    async with client_of(server, cache="vllm") as (client, planner):
        plan = planner.plan(request("a", "b"))
        await client.complete(plan, max_tokens=9)
        await client.complete([{"role": "user", "content": "Hello?"}], max_tokens=9)
    body, bare = server.bodies
    assert body["messages"][-1] == {"role": "user", "content": plan.content}
    assert bare["messages"] == [{"role": "user", "content": "Hello?"}]
    assert not any(name.startswith("prompt_cache") for name in body)


async def test_marks_of_tools_count_and_a_literal_key_stays():
    with caching_server("anthropic") as server:
        tools = [
            {"name": f"t{n}", "input_schema": {}, "cache_control": {"type": "ephemeral"}}
            for n in range(5)
        ]
        async with client_of(server) as (client, planner):
            for _ in range(3):
                plan = planner.plan(request("a", "b"))
                await client.complete(plan, max_tokens=9, tools=tools)
        assert not server.refusals
        assert ["cache_control" in tool for tool in server.bodies[-1]["tools"]] == [
            False, True, True, True, True,
        ]  # fmt: skip
    with caching_server("openai") as server:
        async with client_of(server, salt_key="secret") as (client, planner):
            plan = planner.plan(request("a"))
            await client.complete(plan)
            await client.complete(plan, prompt_cache_key="mine")
        keys = [body["prompt_cache_key"] for body in server.bodies]
        assert keys[1] == "mine"
        plain = ReusePlanner(cache="openai").plan(request("a"))
        assert keys[0] == plain.affinity_id("secret") != plain.prompt_cache_key


async def test_the_group_is_named_in_the_header_that_a_router_reads(server):
    options = {"session_id": "group", "session_header": "x-smg-routing-key"}
    async with client_of(server, "vllm", **options) as (client, planner):
        for names in (("a", "b"), ("a", "c"), ("d",)):
            await client.complete(planner.plan(request(*names)), max_tokens=9)
    ids = [headers["x-smg-routing-key"] for headers in server.headers]
    assert ids[0] == ids[1] != ids[2]


async def test_followers_wait_for_their_leader_where_the_cache_needs_it(server):
    running, most = 0, 0

    def meanwhile() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        # what was sent beside it would be here by now
        asyncio.run(asyncio.sleep(0.05))
        running -= 1

    async with client_of(server) as (client, planner):
        requests = [request("a", f"{n}") for n in range(4)]
        batch = planner.plan_batch(requests)
        server.before_first_token = meanwhile
        await dispatch(client, batch, concurrency=4, max_tokens=9)
    assert most > 1, "followers run beside each other"
    first = server.usages[0]
    assert first.read == 0
    if first.written:  # the batch knows its readers
        assert all(usage.read for usage in server.usages[1:])


async def test_anthropics_protocol_needs_the_longest_answer_and_refusals_are_engine_errors():
    with caching_server("anthropic") as server:
        async with client_of(server) as (client, planner):
            with pytest.raises(InvalidRequestError, match="max_tokens=1024"):
                await client.complete(planner.plan(request("a")))
            with pytest.raises(EngineError) as caught:
                await client.complete([{"role": "user", "content": " "}], max_tokens=9)
        assert caught.value.status == 400


def described(field: str) -> dict[str, Any]:
    return {"components": {"schemas": {"AnthropicMessagesRequest": {"properties": {field: {}}}}}}


PAGES: dict[str, Any] = {
    "reads it": (200, described("cache_salt")),
    "older": (200, described("system")),
    "hosted": (404, {}),
    "hostile": (200, {"components": ["cache_salt"]}),
    "down": (503, {}),
}


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("streams", [False, True])
async def test_a_salt_goes_by_anthropics_protocol_only_where_it_is_read(page, streams):
    sent: list[Any] = []
    end = b'data: {"type": "message_delta", "delta": {"stop_reason": "end_turn"}}\n\n'

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/openapi.json":
            return httpx.Response(PAGES[page][0], json=PAGES[page][1])
        sent.append(json.loads(request.content).get("cache_salt"))
        return httpx.Response(200, content=end + b'data: {"type": "message_stop"}\n\n')

    async def ask(tenant: str) -> None:
        plan = planner.plan(request("a", tenant=tenant))
        if streams:
            assert "".join([one async for one in client.stream(plan, max_tokens=9)]) == ""
        else:
            await client.complete(plan, max_tokens=9)

    planner, http = ReusePlanner(), httpx.AsyncClient(transport=httpx.MockTransport(answer))
    options: dict[str, Any] = {"protocol": "anthropic", "cache_salt": "tenant", "retries": 0}
    async with http, EngineClient("http://e", "m", http_client=http, **options) as client:
        await ask("")  # the default tenant has no salt
        if page == "reads it":
            await ask("one")
            await ask("two")
            assert len({*sent}) == 3
            return
        for _ in range(2):
            words = "status 503" if page == "down" else "use protocol='openai', or vLLM"
            with pytest.raises(EngineError, match=words):
                await ask("one")
        assert sent == [None]


@pytest.mark.parametrize("wrong", [{"protocol": "gemini"}, {"session_id": "user"},
                                   {"session_header": "a\nb"}])  # fmt: skip
def test_wrong_options_are_refused(wrong):
    with pytest.raises(InvalidRequestError):
        EngineClient("http://engine", **wrong)


def read(*events: str) -> AnthropicReplyReader:
    reader = AnthropicReplyReader()
    for one in events:
        list(reader.take(event(one)))
    return reader


@pytest.mark.parametrize(
    ("told", "read_at_end", "prompt"),
    [(8_849, 8_831, 8_849), (8_849, None, 8_849), (18, 8_831, 8_849)],
)
def test_a_server_that_counts_what_was_read_as_input_is_not_added_up(told, read_at_end, prompt):
    usage = {"input_tokens": told, "output_tokens": 4}
    if read_at_end is not None:
        usage["cache_read_input_tokens"] = read_at_end
    begin = {"id": "m", "usage": {"input_tokens": told, "output_tokens": 0}}
    end = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": usage}
    reader = read(json.dumps({"type": "message_start", "message": begin}), json.dumps(end))
    assert reader.usage[:2] == (prompt, read_at_end)


@pytest.mark.parametrize(
    "usage",
    [
        {"prompt_cache_hit_tokens": 600, "prompt_cache_miss_tokens": 400},
        {"cache_read_input_tokens": 600, "cache_creation_input_tokens": 300},
    ],
)
async def test_what_was_cached_is_read_in_the_words_of_any_provider(usage):
    told = {"prompt_tokens": 1_000, "completion_tokens": 5, **usage}
    completion = await completed(raw_replies(event({**END, "usage": told})), options={"model": "m"})
    assert (completion.prompt_tokens, completion.cached_tokens) == (1_000, 600)
    written = {"": 300} if "cache_creation_input_tokens" in usage else None
    assert completion.written_tokens == written


def test_tool_calls_and_thoughts_are_read():
    reader = read(
        '{"type": "message_start", "message": {"id": "m1", "usage": {"input_tokens": 3,'
        ' "cache_read_input_tokens": 5, "output_tokens": 1}}}',
        '{"type": "ping"}',
        '{"type": "content_block_start", "index": 0,'
        ' "content_block": {"type": "tool_use", "id": "t1", "name": "find"}}',
        '{"type": "content_block_delta", "index": 0,'
        ' "delta": {"type": "input_json_delta", "partial_json": "{\\"x\\""}}',
        '{"type": "content_block_delta", "index": 0,'
        ' "delta": {"type": "input_json_delta", "partial_json": ": 1}"}}',
        '{"type": "message_delta", "delta": {"stop_reason": "tool_use"},'
        ' "usage": {"output_tokens": 7}}',
        '{"type": "message_stop"}',
    )
    reader.end()
    assert reader.has_ended
    assert reader.tool_calls == (ToolCall("find", '{"x": 1}', "t1"),)
    assert reader.usage[:3] == (8, 5, 7)
    assert (reader.finish_reason, reader.reply_id) == ("tool_calls", "m1")


@pytest.mark.parametrize(
    "event",
    ["[]", '{"type": "error", "error": {"type": "overloaded_error"}}',
     '{"type": "message_start"}', '{"type": "content_block_delta", "delta": 3}',
     '{"type": "content_block_start", "index": -1, "content_block": {"type": "tool_use"}}',
     '{"type": "content_block_delta", "delta": {"type": "text_delta", "text": 3}}'],
)  # fmt: skip
def test_broken_replies_are_refused(event):
    with pytest.raises(BrokenReplyError):
        read(event)


def test_counts_that_cannot_be_right_are_unknown():
    reader = read(
        '{"type": "message_start", "message": {"usage": {"input_tokens": -3,'
        ' "cache_read_input_tokens": "many"}}}'
    )
    assert reader.usage.prompt_tokens is None
    assert reader.has_odd_counts


def shared(planner: ReusePlanner, number: int = 4) -> list[Plan]:
    """Return plans of the same documents and other questions, of which the first writes them."""
    requests = [replace(request("a", "b"), query=f"Which {n}?") for n in range(number)]
    return list(planner.plan_batch(requests).plans)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_calls_at_the_same_time_wait_for_the_one_that_writes(server, is_streamed):
    async def ask(plan: Plan) -> None:
        if is_streamed:
            async with client.stream(plan, max_tokens=9) as pieces:
                assert "".join([piece async for piece in pieces]) == server.answer
        else:
            await client.complete(plan, max_tokens=9)

    server.let_all_come()
    async with client_of(server) as (client, planner):
        await asyncio.gather(*map(ask, shared(planner)))
    assert [usage.read > 0 for usage in server.usages] == [False, True, True, True]


async def test_calls_do_not_wait_if_told_so(server):
    everybody = threading.Barrier(4)
    server.before_first_token = lambda: everybody.wait(60)
    async with client_of(server) as (client, planner):
        calls = [client.complete(one, leader_first=False, max_tokens=9) for one in shared(planner)]
        await asyncio.gather(*calls)
        plans = shared(planner)
        for name in ("c", "d"):
            planner.plan(request(name))
        await dispatch(client, plans, leader_first=False, max_tokens=9)
        with pytest.raises(InvalidRequestError, match="leader_first"):
            await client.complete(plans[0], leader_first="yes", max_tokens=9)


async def test_a_leader_that_fails_lets_its_followers_go(server):
    fails = [True]

    def fail() -> None:
        if fails.pop() if fails else False:
            raise ConnectionError

    server.before_first_token = fail
    async with client_of(server) as (client, planner):
        calls = [client.complete(one, max_tokens=9) for one in shared(planner)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
    assert [isinstance(one, EngineError) for one in answers] == [True, False, False, False]


async def test_what_the_provider_says_of_a_miss_stands_beside_the_plans_own_reason():
    said = []
    with caching_server("anthropic") as server:
        async with client_of(server) as (client, planner):
            for system in ("Be brief.", "Be long."):
                plan = planner.plan(replace(request("a", "b"), system=system))
                answer = await client.complete(plan, max_tokens=9)
                said.append(plan.explain(answer).comparison)
                reason = {"type": "system_changed", "cache_missed_input_tokens": 2_400}
                server.diagnostics = {"cache_miss_reason": reason}
    assert said == ["", "The provider says: system (system_changed); the planner: system."]
