"""What engines send: replies, headers, metrics, cache events."""

from __future__ import annotations

import asyncio
import json
import math
from random import Random
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import openai  # noqa: F401  # before the first reply, so that its import is not timed

from ctxreuse import ContextRequest, ReusePlanner
from ctxreuse.cache.kv_events.engine_blocks import EngineBlocks, HeldRequests, RecordedRequests
from ctxreuse.cache.kv_events.event_stream import decode_batch
from ctxreuse.cache.metrics import PrefixCacheMetrics
from ctxreuse.serving import EngineClient
from ctxreuse.serving.client.connection import retry_after_s
from ctxreuse.serving.client.request import Protocol
from fuzz_targets.mutation import (
    NUMBERS,
    Target,
    as_json,
    mutated,
    mutated_bytes,
    text,
)

_STORED = {
    "type": "BlockStored",
    "block_hashes": [1, 2],
    "parent_block_hash": None,
    "token_ids": list(range(8)),
    "block_size": 4,
    "lora_id": None,
    "medium": "GPU",
}
_EVENTS: list[Any] = [
    _STORED,
    {**_STORED, "block_hashes": [b"3"], "parent_block_hash": 2, "token_ids": [9, 9, 9, 9]},
    {"type": "BlockRemoved", "block_hashes": [1], "medium": None, "group_idx": 0},
    {"type": "AllBlocksCleared"},
    ["BlockStored", [4], None, [1, 2, 3, 4], 4, None],
    ["BlockRemoved", [4]],
]

_CHUNK: dict[str, Any] = {
    "id": "chatcmpl-1",
    "object": "chat.completion.chunk",
    "created": 1,
    "model": "m",
    "choices": [
        {
            "index": 0,
            "delta": {
                "role": "assistant",
                "content": "Paris",
                "tool_calls": [
                    {"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}
                ],
            },
            "finish_reason": None,
        }
    ],
}
_USAGE = {
    **_CHUNK,
    "choices": [],
    "prompt_token_ids": [1, 2, 3],
    "usage": {
        "prompt_tokens": 9,
        "completion_tokens": 2,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 4},
    },
}
_LAST = {**_CHUNK, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}

_MESSAGE_USAGE = {
    "input_tokens": 5,
    "cache_read_input_tokens": 4,
    "cache_creation_input_tokens": 3,
    "cache_creation": {"ephemeral_5m_input_tokens": 2, "ephemeral_1h_input_tokens": 1},
    "output_tokens": 2,
}
_EVENTS_OF_A_MESSAGE: list[dict[str, Any]] = [
    {
        "type": "message_start",
        "message": {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "model": "m",
            "content": [],
            "stop_reason": None,
            "usage": _MESSAGE_USAGE,
        },
    },
    {"type": "ping"},
    {
        "type": "content_block_start",
        "index": 0,
        "content_block": {"type": "text", "text": "", "citations": None},
    },
    {
        "type": "content_block_delta",
        "index": 0,
        "delta": {"type": "text_delta", "text": "Paris"},
    },
    {
        "type": "content_block_delta",
        "index": 0,
        "delta": {"type": "thinking_delta", "thinking": "Well."},
    },
    {"type": "content_block_stop", "index": 0},
    {
        "type": "content_block_start",
        "index": 1,
        "content_block": {"type": "tool_use", "id": "t", "name": "f", "input": {}},
    },
    {
        "type": "content_block_delta",
        "index": 1,
        "delta": {"type": "input_json_delta", "partial_json": "{}"},
    },
    {"type": "error", "error": {"type": "overloaded_error", "message": "busy"}},
]
_END_OF_A_MESSAGE: list[dict[str, Any]] = [
    {
        "type": "message_delta",
        "delta": {"stop_reason": "end_turn", "stop_sequence": None},
        "usage": {"output_tokens": 2},
    },
    {"type": "message_stop"},
]

_METRICS = """# HELP vllm:prefix_cache_queries_total Queries.
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 120.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 30.0
vllm:cache_config_info{block_size="16",num_gpu_blocks="100",engine="0"} 1.0
vllm:kv_cache_usage_perc{engine="0"} 0.5
"""
_RETRY_AFTER = (
    "0",
    "1",
    "5.5",
    "120",
    "Wed, 21 Oct 2015 07:28:00 GMT",
    "-1",
    "1e9",
    "nan",
    "\u0663",
)


def _message(source: Random) -> bytes:
    chosen = [source.choice(_EVENTS) for _ in range(source.randrange(5))]
    batch = mutated([1.5, chosen, 0], source)
    try:
        packed = msgspec.msgpack.encode(batch)
    except (ValueError, OverflowError, RecursionError, TypeError):
        packed = b"\x93\x01"
    return mutated_bytes(packed, source)


def _apply_message(message: bytes) -> None:
    batch = decode_batch(message)
    held = HeldRequests(RecordedRequests(ReusePlanner(), 10), EngineBlocks(), 0.0)
    for event in () if batch is None else batch.events:
        held.apply(event)
    held.settle(1.0)


def _metrics(source: Random) -> str:
    lines = _METRICS.splitlines(keepends=True)
    source.shuffle(lines)
    page = "".join(lines) + source.choice(("", "vllm:prefix_cache_hits_total{" * 500))
    page = page.replace("30.0", str(source.choice(("30", "1e308", "NaN", "-5", "+Inf", "x"))))
    page = page.replace('"m"', f'"{text(source)}"')
    return mutated_bytes(page.encode("utf-8", "surrogatepass"), source).decode("utf-8", "replace")


def _read_metrics(page: str) -> None:
    found = PrefixCacheMetrics.parse(page)
    assert found.capacity_tokens is None or found.capacity_tokens >= 0


def _stream(source: Random) -> tuple[bytes, int]:
    chunks = [_CHUNK] * source.randrange(4) + [_LAST, _USAGE]
    parts = []
    for chunk in chunks:
        one: Any = mutated(chunk, source, 2)
        if source.random() < 0.1:
            one = {**chunk, "usage": {name: source.choice(NUMBERS) for name in _USAGE["usage"]}}
        parts.append(b"data: " + as_json(one, source) + b"\n\n")
    parts.append(b"data: [DONE]\n\n")
    return mutated_bytes(b"".join(parts), source), source.choice((200, 200, 200, 200, 429, 500))


def _message_stream(source: Random) -> tuple[bytes, int]:
    start, *others = _EVENTS_OF_A_MESSAGE
    said = [source.choice(others[:-1]) for _ in range(source.randrange(6))]
    if source.random() < 0.1:
        said.insert(source.randrange(len(said) + 1), others[-1])
    parts = []
    for event in [start, *said, *_END_OF_A_MESSAGE]:
        one: Any = mutated(event, source, 2) if source.random() < 0.4 else event
        if "usage" in event and source.random() < 0.1:
            one = {**event, "usage": {name: source.choice(NUMBERS) for name in _MESSAGE_USAGE}}
        name = event["type"] if source.random() < 0.95 else text(source)
        line = b"event: " + name.encode("utf-8", "surrogatepass") + b"\n"
        parts.append(line + b"data: " + as_json(one, source) + b"\n\n")
    whole = b"".join(parts)
    is_whole = source.random() < 0.3
    return whole if is_whole else mutated_bytes(whole, source), source.choice((200, 200, 200, 529))


def _complete_message(reply: tuple[bytes, int]) -> None:
    _complete(reply, "anthropic")


def _complete(reply: tuple[bytes, int], protocol: Protocol = "openai") -> None:
    body, status = reply

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(status, headers={"content-type": "text/event-stream"}, content=body)

    async def asked() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
            planner = ReusePlanner()
            client = EngineClient(
                "http://engine/v1",
                "m",
                planner=planner,
                http_client=http,
                backoff_s=0,
                retries=1,
                protocol=protocol,
            )
            plan = planner.plan(ContextRequest(["Paris is in France."], "Where is Paris?"))
            done = await client.complete(plan, max_tokens=9)
            assert isinstance(done.text, str)
            counts = (done.prompt_tokens, done.cached_tokens, done.completion_tokens)
            for tokens in (*counts, *(done.written_tokens or {}).values()):
                assert tokens is None or (type(tokens) is int and tokens >= 0), tokens
            for call in done.tool_calls:
                assert isinstance(call.name, str)
                assert isinstance(call.arguments, str)

    asyncio.run(asked())


def _retry_after(source: Random) -> str:
    number = repr(source.choice((0, 1.5, 2**70, 1e308, float("inf"))))
    return source.choice((source.choice(_RETRY_AFTER), text(source), number))


def _wait(header: str) -> None:
    try:
        sent = header.encode("utf-8", "surrogatepass").decode("latin-1")
        headers = httpx.Headers({"retry-after": sent})
    except (UnicodeEncodeError, ValueError):
        return
    error = RuntimeError("busy")
    error.response = SimpleNamespace(headers=headers, status_code=429)  # type: ignore[attr-defined]
    seconds = retry_after_s(error) or 0.0
    assert 0 <= seconds < math.inf, seconds


def _model_list(source: Random) -> bytes:
    listed = {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "x"}]}
    return as_json(mutated(listed, source), source)


def _first_model(body: bytes) -> None:
    stream = b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in (_CHUNK, _LAST))

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/models"):
            return httpx.Response(200, headers={"content-type": "application/json"}, content=body)
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, content=stream)

    async def asked() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
            client = EngineClient("http://engine/v1", http_client=http, backoff_s=0, retries=0)
            await client.complete([{"role": "user", "content": "?"}])

    asyncio.run(asked())


TARGETS = {
    "kv events": Target(_message, _apply_message),
    "metrics": Target(_metrics, _read_metrics),
    "engine replies": Target(_stream, _complete),
    "messages of engines": Target(_message_stream, _complete_message),
    "model lists": Target(_model_list, _first_model),
    "retry-after": Target(_retry_after, _wait),
}
