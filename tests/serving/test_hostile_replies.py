"""What a hostile or broken engine may answer: a reply is typed, or the documented error."""

import asyncio
import time
import zlib
from functools import partial

import httpx
import pytest
from client_helpers import MESSAGES, completed, connected, planned, raw_replies
from example_counts import slow_unless
from hostile_servers import (
    CASES,
    COUNTS,
    DRIPPING,
    END,
    ENDLESS,
    HEAD,
    delta,
    event,
    usage,
    usage_of,
)
from http_servers import listening, response
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.cache import CapacityTracker
from ctxreuse.errors import EngineError
from ctxreuse.serving import EngineClient, dispatch
from ctxreuse.serving.client.reply import BrokenReplyError, ReplyReader


@pytest.mark.parametrize("reply", CASES, ids=lambda reply: repr(reply[:50]))
async def test_a_malformed_reply_is_the_documented_error(reply, planner):
    with pytest.raises(EngineError, match="did not answer: BrokenReplyError") as caught:
        await completed(
            raw_replies(reply), planned(planner), {"planner": planner, "model": "m", "retries": 0}
        )
    assert planner.statistics().requests == 0
    assert len(str(caught.value)) < 400
    assert "Hi" not in str(caught.value)


@pytest.mark.parametrize("missing", [{}, {"choices": None}, {"choices": [{"delta": None}]}])
async def test_fields_may_be_missing(missing):
    completion = await completed(raw_replies(event(missing) + event(END)), options={"model": "m"})
    counts = (completion.prompt_tokens, completion.cached_tokens, completion.completion_tokens)
    assert (completion.text, counts) == ("Hi", (None, None, None))


@pytest.mark.parametrize("cut", range(9))
async def test_it_does_not_matter_where_a_reply_is_cut_into_packets(cut):
    whole = (event(END) + b": a comment\r\n\r\ndata: [DONE]\r\n\r\n").replace(b"}\n", b"}\r\n")
    reader = ReplyReader()
    size = 1 + cut * 7
    pieces = [whole[at : at + size] for at in range(0, len(whole), size)]
    assert "".join(text for piece in pieces for text in reader.take(piece)) == "Hi"
    reader.end()
    assert reader.has_ended


FIELDS = [
    *("choices", "delta", "content", "tool_calls", "function", "name", "arguments", "index", "id"),
    *("usage", "error", "type", "prompt_tokens", "prompt_tokens_details", "cached_tokens"),
    *("finish_reason", "prompt_token_ids", "reasoning"),
]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(st.lists(st.binary(max_size=30) | json_values.map(event), max_size=8))
def test_any_bytes_are_a_typed_reply_or_broken(parts):
    reader = ReplyReader()
    try:
        for part in parts:
            assert all(isinstance(text, str) for text in reader.take(part))
        reader.end()
    except BrokenReplyError:
        return
    assert isinstance(reader.text + reader.reply_id + reader.finish_reason, str)
    for count in reader.usage[:3]:
        assert count is None or (type(count) is int and count >= 0)
    for call in reader.tool_calls:
        assert isinstance(call.name + call.arguments + call.id, str)


@pytest.mark.parametrize("count", COUNTS)
async def test_counts_that_cannot_be_right_are_unknown_and_that_is_seen(count, caplog, planner):
    tracker = CapacityTracker(planner, 1_000)
    transport = raw_replies(usage_of(count), usage(prompt_tokens=100, prompt_tokens_details=None))
    async with connected(transport, model="m", planner=planner) as client:
        completion = await client.complete(planned(planner))
        counts = (completion.prompt_tokens, completion.cached_tokens, completion.completion_tokens)
        assert (completion.text, counts) == ("Hi", (None, None, None))
        assert client.faults == 1
        assert len(caplog.records) == 1
        await client.complete(planned(planner, "Rome is in Italy."))
    assert 0 < tracker.block_share < 1
    assert len(tracker._recent) == 1


async def test_more_cached_tokens_than_the_prompt_has_are_unknown(planner):
    replies = [usage(prompt_tokens=10, prompt_tokens_details={"cached_tokens": n}) for n in (5, 11)]
    async with connected(raw_replies(*replies), model="m", planner=planner) as client:
        counts = [await client.complete(planned(planner)) for _ in replies]
    assert [(one.prompt_tokens, one.cached_tokens) for one in counts] == [(10, 5), (10, None)]
    reported = planner.savings.reported
    assert (reported.answers, reported.unreported, reported.cached_tokens) == (1, 1, 5)


async def test_one_bad_reply_of_a_dispatch_is_one_failed_outcome(planner):
    replies = [event(END), event({"choices": 5}), event(delta(content=["Hi"])), event(END)]
    plans = [planned(planner, f"Text {number}.") for number in range(4)]
    async with connected(raw_replies(*replies), model="m", planner=planner, retries=0) as client:
        outcomes = await dispatch(client, plans, concurrency=1)
    assert [one.completion and one.completion.text for one in outcomes] == ["Hi", None, None, "Hi"]
    assert [type(one.error) for one in outcomes[1:3]] == [EngineError, EngineError]
    assert planner.statistics().requests == 2


@pytest.mark.parametrize(
    "page",
    ["", "not JSON", "5", "null", "[]", "{}", "[" * 100_000, '{"data": 5}', '{"data": []}',
     '{"data": [5]}', '{"data": [{"max_model_len": "9"}]}',
     '{"data": [{"id": 5, "max_model_len": -5}]}',
     '{"data": [{"id": null, "max_model_len": true}], "tokens": [1, "two"]}',
     '{"data": [{"max_model_len": 1e400}], "tokens": {"a": 1}}', '{"tokens": [-1]}',
     'vllm:cache_config_info{block_size="16",num_gpu_blocks="-5"} NaN'],
)  # fmt: skip
async def test_other_routes_may_answer_anything(page):
    answer = httpx.MockTransport(lambda request: httpx.Response(200, text=page))
    async with connected(answer) as client, connected(answer, model="m") as named:
        with pytest.raises(EngineError, match="the engine at engine names no model; pass model="):
            await client.model()
        assert await client.context_window() is None
        assert (await client.metrics()).capacity_tokens is None
        await client.check_health()
        with pytest.raises(EngineError, match="returned no tokens"):
            await named.tokenize(MESSAGES)


@pytest.mark.parametrize("kind", slow_unless(ENDLESS, "events", "nothing"))
@pytest.mark.parametrize("streamed", [False, True])
async def test_an_endless_reply_ends_at_its_bound(kind, streamed):
    async with (
        listening(ENDLESS[kind]) as [server],
        EngineClient(server.url, "m", retries=0, max_reply_bytes=500_000) as client,
    ):
        ask = read_stream if streamed else EngineClient.complete
        with pytest.raises(EngineError, match="the reply has more than 500,000 bytes"):
            await ask(client, MESSAGES)
        if kind == "an error":
            with pytest.raises(EngineError, match="the reply has more than 500,000 bytes"):
                await client.metrics()


async def read_stream(client, prompt):
    return [piece async for piece in client.stream(prompt)]


@pytest.mark.parametrize("kind", slow_unless(DRIPPING, "events", "nothing"))
async def test_a_dripping_reply_ends_when_its_time_is_over(kind, planner):
    async with (
        listening(DRIPPING[kind]) as [server],
        EngineClient(server.url, "m", planner=planner, timeout_s=0.3) as client,
    ):
        message = r"did not answer within 0\.3 s; give a larger timeout_s"
        began = time.monotonic()
        with pytest.raises(EngineError, match=message):
            await client.complete(planned(planner))
        with pytest.raises(EngineError, match=message):
            await read_stream(client, planned(planner))
        if kind != "events":
            with pytest.raises(EngineError, match=message):
                await client.metrics()
        assert time.monotonic() - began < 20  # and not as long as it drips, which is for ever
    assert planner.statistics().requests == 0


async def test_what_the_caller_does_between_two_pieces_does_not_count():
    async def script(received, writer):
        for _ in range(3):
            writer.write(event({"choices": [{"delta": {"content": "x"}}]}))
            await writer.drain()
        writer.write(event(END))

    async def whole(received, writer):
        writer.write(HEAD)
        await script(received, writer)

    async with (
        listening(whole) as [server],
        EngineClient(server.url, "m", retries=0, timeout_s=2) as client,
        client.stream(MESSAGES) as pieces,
    ):
        read = []
        async for piece in pieces:
            read.append(piece)
            await asyncio.sleep(0.6)
    assert "".join(read) == "xxxHi"


async def test_a_body_that_is_cut_off_is_an_error():
    chunked = HEAD.replace(b"connection: close", b"transfer-encoding: chunked")

    async def script(received, writer):
        writer.write(chunked + b"400\r\n" + event({"choices": []}))

    async with listening(script) as [server], EngineClient(server.url, "m", retries=0) as client:
        with pytest.raises(EngineError, match="did not answer"):
            await client.complete(MESSAGES)


async def test_a_reply_that_is_compressed_though_nobody_asked_is_broken():
    async def script(received, writer):
        assert received.headers["accept-encoding"] == "identity"
        writer.write(response(200, b"\x1f\x8b" + b"x" * 50, content_encoding="gzip"))

    async with listening(script) as [server], EngineClient(server.url, "m", retries=0) as client:
        for ask in (client.complete(MESSAGES), client.metrics()):
            with pytest.raises(EngineError, match="did not answer"):
                await ask


# Python knows these as encodings; what they "decode" may be bytes, an error, or much larger
CODECS = ["hex", "zlib_codec", "bz2_codec", "base64", "rot13", "idna", "undefined", "utf-16", "x"]


@pytest.mark.parametrize("codec", CODECS)
async def test_the_encoding_that_a_reply_claims_does_not_matter(codec):
    async def script(received, writer):
        status = 200 if received.path == "/v1/models" else 500
        body = b'{"data": [{"id": "m", "max_model_len": 9}], "no": "\xff"}'
        body = zlib.compress(b" " * 10_000_000) if received.path == "/metrics" else body
        writer.write(response(status, body, content_type=f"text/plain; charset={codec}"))

    async with listening(script) as [server], EngineClient(server.url, retries=0) as client:
        assert (await client.model(), await client.context_window()) == ("m", 9)
        for ask in (client.complete, partial(read_stream, client), client.tokenize):
            with pytest.raises(EngineError, match="status 500"):
                await ask(MESSAGES)
        with pytest.raises(EngineError, match="status 500"):
            await client.metrics()


async def test_cookies_are_not_kept():
    """They could be many, and the requests of all tenants would carry them."""

    async def script(received, writer):
        writer.write(response(200, b"{}", set_cookie=f"seen{len(server.received)}=1; path=/"))

    async with listening(script) as [server], EngineClient(server.url, "m") as client:
        for _ in range(3):
            await client.metrics()
        assert not any("cookie" in one.headers for one in server.received)


def test_reading_takes_linear_time_in_steps_not_in_packets():
    """Many packets of one line: each is looked at once, not once a packet that follows."""
    reader = ReplyReader()
    for _ in range(20_000):
        assert list(reader.take(b"x" * 100)) == []
    assert len(reader._line) == 20_000
