"""Servers that answer anything: malformed, odd, endless and slow replies, and busy ones.

What is here is what `EngineClient` is tested with; everything that stands on a server is, too.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
from http_servers import Received, Script

from ctxreuse.serving import EmulatedEngine

END: dict[str, Any] = {
    "choices": [{"index": 0, "delta": {"content": "Hi"}, "finish_reason": "stop"}]
}


def event(value: Any) -> bytes:
    """Return an event of a stream that holds JSON, or a text as it is."""
    text = value if isinstance(value, str) else json.dumps(value)
    return b"data: " + text.encode() + b"\n\n"


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": "stop"}]}


def usage(**fields: Any) -> bytes:
    return event(END) + event({"choices": [], "usage": fields})


ODD: list[Any] = [5, "text", True, [1], {"a": 1}, [[]], [None], 1.5]
MALFORMED: dict[str, list[Any]] = {
    "choices": [{"choices": one} for one in ODD],
    "an event": [5, "text", [1], None, True],
    "delta": [{"choices": [{"delta": one}]} for one in (5, "text", [1], True)],
    "content": [delta(content=one) for one in (5, ["text"], {"text": "Hi"}, True, [])],
    "finish": [{"choices": [{"delta": {}, "finish_reason": one}]} for one in (5, ["stop"], {})],
    "tools": [delta(tool_calls=one) for one in (5, "text", [5], [None], [["name"]])],
    "indices": [delta(tool_calls=[{"index": one}]) for one in (-1, "0", 1.5, True, None, 10**9)],
    "functions": [delta(tool_calls=[{"index": 0, "function": one}]) for one in (5, "f", [1])],
    "names": [
        delta(tool_calls=[{"index": 0, "function": {field: one}}])
        for field in ("name", "arguments")
        for one in (5, ["f"], {"a": 1}, True)
    ],
    "errors": [{"error": one} for one in ("no", 5, {"type": 5}, {"type": "x" * 500}, [1])],
}
BROKEN: list[bytes] = [
    b"data: {\n\n",
    b"data: not JSON\n\n",
    b"data: \xff\xfe\n\n",
    b"data: " + b"[" * 100_000 + b"\n\n",
    b'data: {"choices":' * 2_000 + b"\n\n",
    b"data: " + b"9" * 5_000 + b"\n\n",
    b"<html>Bad gateway</html>",
    b"",
    b"\n" * 1_000,
    b"data:\n\n",
    b"data: [DONE]\n\n",
    b"event: message\nid: 5\n\n",
    bytes(range(256)) * 10,
    json.dumps({"choices": [{"message": {"content": "Hi"}}]}).encode(),
]
CASES = [event(one) for kinds in MALFORMED.values() for one in kinds] + BROKEN
SAMPLES = {repr(event(kinds[0])): event(kinds[0]) for kinds in MALFORMED.values()} | {
    repr(one[:50]): one for one in BROKEN
}
"""One reply of each kind, for what takes longer than a client alone."""


COUNTS = [
    "-5",
    '"ten"',
    "NaN",
    "Infinity",
    "-Infinity",
    "1e400",
    "true",
    "[5]",
    "{}",
    "1.5",
    "9" * 30,
]


def usage_of(count: str) -> bytes:
    """Return a whole reply whose usage tells this count, as JSON, wherever there is one."""
    told = f'"prompt_tokens": {count}, "completion_tokens": {count}, "total_tokens": {count}'
    told += f', "prompt_tokens_details": {{"cached_tokens": {count}}}'
    return event(END) + event(f'{{"choices": [], "usage": {{{told}}}}}')


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


def repeating(head: bytes, part: bytes, pause_s: float = 0.0) -> Script:
    """Write a part of a reply again and again, without an end."""

    async def script(received: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        while True:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause_s)

    return script


ENDLESS = {
    "events": repeating(HEAD, event({"choices": []}) * 100),
    "one line": repeating(HEAD, b"data: " + b"x" * 10_000),
    "lines without an end": repeating(HEAD, b"data: x\n" * 2_000),
    "comments": repeating(HEAD, b": x\n\n" * 2_000),
    "an error": repeating(HEAD.replace(b"200 OK", b"400 No"), b"x" * 10_000),
}

DRIPPING = {
    "events": repeating(HEAD, event({"choices": [{"delta": {"content": "x"}}]}), 0.01),
    "bytes": repeating(HEAD, b"x", 0.01),
    "a header": repeating(b"HTTP/1.1 200 OK\r\nx: ", b"x", 0.01),
    "an error": repeating(HEAD.replace(b"200 OK", b"500 No"), b"x", 0.01),
    "nothing": repeating(b"", b"", 0.01),
}


class Hosts(httpx.AsyncBaseTransport):
    """Reaches an honest engine as "good", and one that is hostile to some as "bad".

    Args:
        reply: What "bad" answers to a prompt: the bytes of a stream, or what makes a response.
        engine: What "good" is, and "bad" to others.
        hostile_to: Text of the prompts to which it is hostile; empty is to all.

    Attributes:
        asked: The hosts of all prompts, in order.
    """

    def __init__(
        self,
        reply: bytes | Callable[[httpx.Request], httpx.Response],
        engine: EmulatedEngine | None = None,
        hostile_to: str = "",
    ) -> None:
        self.asked: list[str] = []
        self._reply = reply
        self._hostile_to = hostile_to.encode()
        self._engine = (engine or EmulatedEngine(answer="Here.")).transport()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/completions"):
            self.asked.append(request.url.host)
        if request.url.host == "good" or not self._is_hostile(request):
            response: httpx.Response = await self._engine.handle_async_request(request)
            return response
        if callable(self._reply):
            return self._reply(request)
        return httpx.Response(
            200, headers={"content-type": "text/event-stream"}, content=self._reply
        )

    def _is_hostile(self, request: httpx.Request) -> bool:
        return request.url.path.endswith("/completions") and self._hostile_to in request.content


def refusing(status: int, **headers: str) -> Callable[[httpx.Request], httpx.Response]:
    """Return what answers with a status, and a server's words."""
    body = {"error": {"message": "the words of the server", "type": "odd", "code": status}}
    return lambda request: httpx.Response(status, headers=headers, json=body)


class BreakingOff(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A body that ends with an error of the connection."""

    def __init__(self, *parts: bytes) -> None:
        self._parts = parts

    def __iter__(self) -> Iterator[bytes]:
        yield from self._parts
        raise httpx.ReadError("the connection is gone")

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self._parts:
            yield part
        raise httpx.ReadError("the connection is gone")


def breaking_off(request: httpx.Request) -> httpx.Response:
    """Answer with half a reply."""
    half = BreakingOff(event({"choices": [{"delta": {"content": "Half"}}]}))
    return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=half)


REFUSALS: dict[str, Callable[[httpx.Request], httpx.Response]] = {
    **{str(status): refusing(status) for status in (401, 403, 404, 421, 429, 500, 503)},
    "429, retry after 1e9": refusing(429, **{"retry-after": "1e9"}),
    "429, retry after nan": refusing(429, **{"retry-after": "nan"}),
    "503, retry after 0": refusing(503, **{"retry-after": "0"}),
    **{
        f"a redirect, {status}": refusing(status, location="http://elsewhere/v1/chat/completions")
        for status in (302, 307, 308)
    },
    "half a reply": breaking_off,
}
"""What a server may answer instead of a reply."""
