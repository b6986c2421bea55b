"""Too much, too long, too many, gone away, and bodies that are none: refused in known words."""

import asyncio
import json
import time
from contextlib import suppress

import httpx
import pytest
from door_helpers import CHAT, MESSAGES, answering, asking, documents, served
from http_servers import response

from ctxreuse.serving import EmulatedEngine, EnginePool


def error_of(answer):
    body = answer.json()
    assert body["type"] == "error"
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


class Holding:
    """An engine that holds its answer back, before its head or behind it, and sees who leaves."""

    def __init__(self, behind_head=False):
        self.behind_head = behind_head
        self.came, self.left, self.goes_on = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def __call__(self, received, writer):
        if received.method == "GET":
            return writer.write(response(200))
        if self.behind_head:
            writer.write(b"HTTP/1.1 200 X\r\ncontent-type: text/event-stream\r\n\r\ndata: {}\n\n")
            await writer.drain()
        self.came.set()
        while not (self.goes_on.is_set() or writer.transport.is_closing()):
            await asyncio.sleep(0.01)
            # an interim answer, before the head: who has gone away breaks the connection
            writer.write(b": beat\n\n" if self.behind_head else b"HTTP/1.1 102 X\r\n\r\n")
        if not self.goes_on.is_set():
            self.left.set()
        elif not self.behind_head:
            writer.write(response(200, b"{}"))
        return None


@pytest.mark.parametrize("behind_head", [False, True])
@pytest.mark.parametrize("given", ["", "abc"])
async def test_a_caller_that_goes_away_cancels_the_engines_request(behind_head, given):
    holding = Holding(behind_head)
    async with served(holding) as door:

        async def asks():
            async with door.stream("POST", CHAT, json=asking(given, stream=True)) as answer:
                async for _ in answer.aiter_raw():
                    pass

        caller = asyncio.create_task(asks())
        await asyncio.wait_for(holding.came.wait(), 5)
        await asyncio.sleep(0.05)
        caller.cancel()
        await asyncio.gather(caller, return_exceptions=True)
        await asyncio.wait_for(holding.left.wait(), 5)
        status = door.planner.savings
        assert (await door.get("/healthz")).status_code == 200
    # what the engine never began to answer is not in its cache
    assert status.requests == (1 if given and behind_head else 0)


@pytest.mark.parametrize("path", [CHAT, MESSAGES, "/v1/plan"])
async def test_a_request_that_is_too_large_is_refused(path):
    async with served(EmulatedEngine(), max_body_bytes=10_000) as door:
        refused = await door.post(path, content=b"x" * 15_000)
        fits = await door.post(CHAT, json=asking("ab"))
        assert len(door.bodies()) == 1
    assert (refused.status_code, fits.status_code) == (413, 200)
    assert "10,000 bytes" in error_of(refused)["message"]


@pytest.mark.parametrize("path", [CHAT, "/v1/forget"])
async def test_a_body_that_a_page_of_another_origin_could_send_is_refused(path):
    async with served(EmulatedEngine()) as door:
        refused = await door.post(path, content=chat(), headers={"content-type": "text/plain"})
        assert door.bodies() == []
    assert refused.status_code == 400
    assert "content-type of the body must be application/json" in error_of(refused)["message"]


async def test_headers_are_bounded():
    async with served(EmulatedEngine()) as door:
        asked = door.get("/healthz", headers={"x": "x" * 3_000_000})
        (refused,) = await asyncio.gather(asked, return_exceptions=True)
        assert (await door.get("/healthz")).status_code == 200
    # the connection may break before all is sent
    assert isinstance(refused, httpx.TransportError) or refused.status_code == 400


@pytest.mark.parametrize(
    ("stream", "state", "others_s"), [(True, "resting", 0), (False, "up", 0), (True, "up", 0.25)]
)
async def test_an_engine_that_does_not_begin_a_stream_in_time_has_failed(
    stream, state, others_s, caplog, monkeypatch
):
    async def choose(*given):
        await asyncio.sleep(others_s)  # as where another engine has failed
        return await chosen(*given)

    chosen, holding = EnginePool._choose, Holding()
    monkeypatch.setattr(EnginePool, "_choose", choose)
    async with served(holding, timeout_s=0.3) as door:
        host = door.engines[0].url.removeprefix("http://")
        asked = [door.post(CHAT, json=asking("ab", stream=stream)) for _ in range(4)]
        late = await asyncio.gather(*asked)
        await asyncio.wait_for(holding.left.wait(), 5)
        assert (await door.get("/readyz")).json()["engines"][host] == state
        failed = 4.0 * (state == "resting")
        assert f'replica="{host}"}} {failed}' in (await door.get("/metrics")).text
    assert {one.status_code for one in late} == {504}
    assert "in time" in error_of(late[0])["message"]
    assert (f"{host} rests for 10 s: it has not begun to answer" in caplog.text) is bool(failed)


async def test_a_caller_does_not_wait_for_an_engine_that_is_busy_for_longer():
    async with served(answering(429, b"{}", retry_after="60"), timeout_s=5) as door:
        for status in (429, 503):
            refused = await asyncio.wait_for(door.post(CHAT, json=asking("ab")), 3)
            assert (refused.status_code, refused.headers["retry-after"]) == (status, "60")


async def test_a_body_that_does_not_come_is_given_up():
    async def slowly():
        yield b"{"
        await asyncio.sleep(1)

    async with served(EmulatedEngine(), timeout_s=0.3) as door:
        late = await door.post(CHAT, content=slowly())
    assert late.status_code == 504


async def test_an_answer_that_breaks_off_breaks_off():
    async def script(received, writer):
        if received.method == "GET":
            return writer.write(response(200))
        writer.write(b"HTTP/1.1 200 X\r\ncontent-length: 100\r\n\r\nsome")
        return None

    async with served(script) as door:
        with pytest.raises(httpx.RemoteProtocolError):
            await door.post(CHAT, json=asking("ab"))
        with pytest.raises(httpx.RemoteProtocolError):
            await door.post(CHAT, json=asking("ab", ctxreuse=True))


async def test_an_answer_that_breaks_off_behind_its_end_has_come_whole():
    end = b'data: {"choices": []}\n\ndata: [DONE]\n\n'

    async def script(received, writer):
        if received.method == "GET":
            return writer.write(response(200))
        kind = b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        writer.write(b"HTTP/1.1 200 X\r\n" + kind + b"%x\r\n%b\r\n" % (len(end), end))
        return None

    came = b""
    async with (
        served(script) as door,
        door.stream("POST", CHAT, json=asking("ab", stream=True)) as answer,
    ):
        with suppress(httpx.RemoteProtocolError):
            async for data in answer.aiter_raw():
                came += data
    assert came == end


async def test_an_engine_that_dies_is_the_pools_matter():
    async with served(EmulatedEngine(), EmulatedEngine()) as door:
        await door.engines[0].die()
        for _ in range(6):
            await door.chat("abc")
        assert len(door.bodies(1)) == 6
        await door.engines[1].die()
        down = await door.post(CHAT, json=asking("abc"))
    assert down.status_code == 502
    assert error_of(down)["message"].endswith("connection refused (attempts: 3)")


async def test_a_redirect_takes_no_prompt_elsewhere():
    elsewhere = EmulatedEngine()
    async with served(elsewhere) as other:
        there = other.engines[0].url
        script = answering(307, b"", location=f"{there}{CHAT}")
        async with served(script) as door:
            answer = await door.post(CHAT, json=asking("ab"))
        assert other.bodies() == []
    assert answer.status_code == 502
    assert "location" not in answer.headers


def nested(depth, inner="1"):
    return "[" * depth + inner + "]" * depth


def chat(**fields):
    return json.dumps(asking("ab", **fields)).encode()


def message(content, role="user"):
    return chat(messages=[{"role": role, "content": content}])


def raw_field(name, value):
    return chat(**{name: "@"}).replace(b'"@"', value)


JSON = {"content-type": "application/json"}
HUGE = b"9" * 5_000
WRONG = [None, True, 0, -1, 1.5, "x", "", [], [1], [[]], [None], {}, {"a": 1}, ["x"], [{}]]
HOSTILE = {
    "empty": b"",
    "no JSON": b"nope",
    "half": b'{"messages": [',
    "bad UTF-8": b'{"messages": "\xff\xfe"}',
    "UTF-16": '{"messages": []}'.encode("utf-16"),
    "BOM": b"\xef\xbb\xbf{}",
    "nulls": b"\0" * 100,
    "null bytes in texts": message("\0\0"),
    "deep": nested(100_000).encode(),
    "deep field": raw_field("metadata", nested(5_000).encode()),
    "rather deep field": raw_field("metadata", nested(900).encode()),
    "deep content": raw_field(
        "messages", b'[{"role": "user", "content": ' + nested(900).encode() + b"}]"
    ),
    "NaN": raw_field("temperature", b"NaN"),
    "infinite": raw_field("temperature", b"-Infinity"),
    "1e999": raw_field("temperature", b"1e999"),
    "huge integer": raw_field("seed", HUGE),
    "large integer": raw_field("conversation", HUGE[:4_000]),
    "id that is huge": raw_field("documents", b'[{"id": %s, "text": "a"}]' % HUGE[:4_000]),
    "surrogates": chat(messages=[{"role": "user", "content": "\ud800 {documents} \udfff"}]),
    "surrogate document": chat(documents=[{"text": "\ud800"}, {"text": "\udfff b"}]),
    "surrogate conversation": chat(conversation="\ud800"),
    "surrogate role": message("x", role="\ud800"),
    "duplicate keys": b'{"messages": 1, "messages": [], "documents": [], "documents": [{}]}',
    "list": b"[]",
    "number": b"1",
    "string": b'"x"',
    "null": b"null",
    "10,000 documents": chat(documents=[{"text": f"text {n}\n" * 3} for n in range(10_000)]),
    "equal documents": chat(documents=[{"text": "equal"}] * 500),
    "blank documents": chat(documents=[{"text": ""}, {"text": " \n"}]),
    "placeholders": message("{documents}" * 1_000),
    "placeholder in a document": chat(documents=[{"text": "{documents} a"}, {"text": "b"}]),
    "no user": message("x", role="assistant"),
    "long role": message("x", role="r" * 100_000),
    "messages that ask": chat(messages=[{"role": "system", "content": "{documents}"}] * 40_000),
    "long template": json.dumps({"documents": documents("a"), "template": "{" * 50_000}).encode(),
    "template of numbers": b'{"documents": [{"text": "a", "n": %s}], "template": "{n}"}'
    % HUGE[:4_000],
    "long id": chat(documents=[{"id": "x" * 500_000, "text": "a"}, {"id": "y", "text": "b"}]),
    "long conversation": chat(conversation="c" * 500_000),
    "URLs": chat(documents=[{"text": "http://127.0.0.1:9/a", "url": "file:///etc/passwd"}] * 2),
    **{f"documents {one!r}": chat(documents=one) for one in WRONG},
    **{f"messages {one!r}": chat(messages=one) for one in WRONG},
    **{f"conversation {one!r}": chat(conversation=one) for one in WRONG},
    **{f"ctxreuse {one!r}": chat(ctxreuse=one) for one in WRONG},
    **{f"content {one!r}": message(one) for one in WRONG},
    **{f"role {one!r}": message("x", role=one) for one in WRONG},
    **{f"text {one!r}": chat(documents=[{"text": one}]) for one in WRONG},
    **{f"id {one!r}": chat(documents=[{"id": one, "text": "a"}]) for one in WRONG},
    **{f"title {one!r}": chat(documents=[{"title": one, "text": "a"}]) for one in WRONG},
    **{f"system {one!r}": chat(system=one) for one in WRONG},
    **{f"tools {one!r}": chat(tools=one) for one in WRONG},
    **{
        f"{name} {one!r}": json.dumps({"documents": documents("ab"), name: one}).encode()
        for one in WRONG
        for name in ("query", "history", "template", "labels", "requests", "primes", "plan_id")
    },
    **{f"requests of {one!r}": json.dumps({"requests": [one]}).encode() for one in WRONG},
    **{f"usage {one!r}": json.dumps({"plan_id": "x", "usage": one}).encode() for one in WRONG},
}
PATHS = (CHAT, MESSAGES, "/v1/plan", "/v1/plans", "/v1/usage", "/v1/forget")


@pytest.mark.parametrize("cache", ["vllm", "anthropic"])
@pytest.mark.parametrize("path", PATHS)
async def test_no_body_makes_the_server_fail_or_stick(path, cache):
    async with served(answering(200, b"{}"), cache=cache) as door:
        statuses = {}
        for name, body in HOSTILE.items():
            began = time.perf_counter()
            answer = await door.post(path, content=body, headers=JSON)
            statuses[name] = answer.status_code
            if answer.status_code != 200:
                assert error_of(answer)["message"], name
            assert time.perf_counter() - began < 10, name
        sent = [one for one in door.engines[0].received if one.method == "POST"]
        for one in sent:
            json.loads(one.body)
        assert door.planner.savings.planning_failures <= 4  # what is too deep to be written
        assert (await door.post("/v1/plan", json={"documents": documents("ab")})).status_code == 200
    assert {name: one for name, one in statuses.items() if one not in (200, 400)} == {}
    assert statuses["documents ['x']"] == 400


async def test_many_hostile_bodies_at_once_hold_nothing_up():
    async with served(answering(200, b"{}")) as door:
        bodies = [one for one in HOSTILE.values() if len(one) < 10_000]
        asked = (door.post(CHAT, content=one, headers=JSON) for one in bodies)
        answers = await asyncio.gather(*asked)
        assert {one.status_code for one in answers} <= {200, 400}
        assert (await door.post(CHAT, json=asking("ab"))).status_code == 200


async def test_a_burst_gets_no_more_places_than_there_are():
    holding = Holding()
    async with served(holding, concurrency=2) as door:
        asked = [asyncio.create_task(door.post(CHAT, json=asking("abc"))) for _ in range(20)]
        while sum(one.done() for one in asked) < 18:
            await asyncio.sleep(0.01)
        refused = next(one.result() for one in asked if one.done())
        assert (await door.get("/healthz")).status_code == 200
        holding.goes_on.set()
        found = sorted([(await one).status_code for one in asked])
        assert door.planner.savings.requests == 2
        assert (await door.post(CHAT, json=asking())).status_code == 200
    assert found == [200] * 2 + [503] * 18
    assert refused.headers["retry-after"] == "1"
    assert error_of(refused)["type"] == "overloaded_error"
