"""Requests that are sent on as they are, and answers that are given back byte for byte."""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, NamedTuple

from ctxreuse.context.reported_usage import ReportedTokens, reported_field, usage_in
from ctxreuse.errors import EngineError
from ctxreuse.serving.aio.concurrency import AsyncClosing
from ctxreuse.serving.client.completion import Completion
from ctxreuse.serving.client.connection import client_library_errors, retry_after_s
from ctxreuse.serving.client.engine_client import EngineClient
from ctxreuse.serving.client.guarded_http import guarded

HOP_BY_HOP = frozenset(
    (
        "connection",
        "keep-alive",
        "transfer-encoding",
        "upgrade",
        "te",
        "trailer",
        "proxy-connection",
    )
)
_SERVERS = HOP_BY_HOP | {"date", "server", "set-cookie"}
_USAGE, _MOST_READ, _LONGEST_REPLY = b'"usage"', 16 << 20, 256 << 20
_EVENT, _CLOSING = re.compile(rb"^data: ?\{", re.MULTILINE), re.compile(rb"\}")


class ForwardedRequest(NamedTuple):
    """A request to send on."""

    path: str
    content: bytes
    headers: Mapping[str, str]


class AnswerPiece(NamedTuple):
    """What has come of an answer: first its status and headers, then bytes, with the usage told."""

    data: bytes = b""
    status: int = 0
    headers: Mapping[str, str] = {}
    usage: ReportedTokens | None = None
    is_events: bool = False


class RefusedError(EngineError):
    """An engine's answer of another status than 200."""

    def __init__(self, host: str, response: Any, body: bytes) -> None:
        self.response, self.body = response, body
        self.headers = _end_to_end(response.headers)
        status, asked_s = response.status_code, retry_after_s(self)
        super().__init__(f"the engine at {host} answers {status}", status, 1, asked_s)


class ForwardingClient(EngineClient):
    """An engine that requests are sent on to."""

    def __init__(self, http: Any, base_url: str, **options: Any) -> None:
        super().__init__(base_url, http_client=http, retries=0, **options)
        self.again = partial(ForwardingClient, http, base_url, **options)
        self._http, self._root = guarded(http, _LONGEST_REPLY), self._connection.root
        self.host = self._connection.host

    def stream(  # type: ignore[override]
        self, prompt: object, *, session_id: str | None = None, forward: ForwardedRequest
    ) -> ForwardedAnswer:
        """Return the answer to a request, piece by piece."""
        return ForwardedAnswer(partial(self._answer, forward))

    async def _answer(
        self, forward: ForwardedRequest, answer: ForwardedAnswer
    ) -> AsyncGenerator[AnswerPiece]:
        began, url = time.perf_counter(), self._root + forward.path
        headers = {**self._connection.basic, **forward.headers}
        try:
            request = self._http.build_request(
                "POST", url, content=forward.content, headers=headers
            )
            response = await self._http.send(request, stream=True)
            first_s = time.perf_counter() - began
            async with aclosing(response):
                if response.status_code >= 300:
                    raise RefusedError(self.host, response, await response.aread())
                kept = _end_to_end(response.headers)
                is_events = kept.get("content-type", "").startswith("text/event-stream")
                reader = UsageReader(is_events=is_events)
                yield AnswerPiece(b"", response.status_code, kept, is_events=is_events)
                async for data in response.aiter_raw():
                    reader.take(data)
                    yield AnswerPiece(data)
                usage = reader.end()
                yield AnswerPiece(usage=None if usage.prompt_tokens is None else usage)
        except client_library_errors() as error:
            raise self._connection.error(error, 1) from error
        answer.completion = Completion(
            text="",
            request_id="",
            finish_reason="",
            time_to_first_token_s=first_s,
            total_s=time.perf_counter() - began,
            attempts=1,
            **usage._asdict(),
        )

    async def models(self, headers: Mapping[str, str], limit_s: float) -> list[dict[str, Any]]:
        """Return what the engine says of its models; nothing if that cannot be read."""
        try:
            url = f"{self._root}/v1/models"
            answer = await self._http.get(url, headers=headers, timeout=limit_s)
            return [{**one} for one in answer.json()["data"]]
        except client_library_errors():
            return []
        except (ValueError, TypeError, LookupError, RecursionError):
            return []


class ForwardedAnswer(AsyncClosing):
    """An answer in progress: an async iterator of its pieces; what it cost is known at the end."""

    completion: Completion

    def __init__(self, start: Callable[[ForwardedAnswer], AsyncGenerator[AnswerPiece]]) -> None:
        self._pieces = start(self)

    async def __anext__(self) -> AnswerPiece:
        return await anext(self._pieces)

    async def aclose(self) -> None:
        """Close the connection, unless the answer has ended."""
        await self._pieces.aclose()


class UsageReader:
    """Reads what an answer, a JSON object or events, says of its usage."""

    def __init__(self, *, is_events: bool) -> None:
        self._is_events, self._left = is_events, _MOST_READ
        self._rest, self._said = bytearray(), list[bytes]()

    def take(self, data: bytes) -> None:
        """Read bytes as they come."""
        self._left -= len(data)
        if self._left >= 0:
            self._rest += data
            if self._is_events and b"\n" in data:
                *lines, rest = bytes(self._rest).split(b"\n")
                self._rest = bytearray(rest)
                self._said += [one[5:] for one in lines if one[:5] == b"data:" and _USAGE in one]

    def end(self) -> ReportedTokens:
        """Return what it has said."""
        usage = ReportedTokens()
        for text in self._said if self._is_events else (self._rest,):
            with suppress(ValueError, RecursionError):
                told = reported_field(json.loads(text), "message") or json.loads(text)
                usage = usage.with_more(usage_in(told) or usage, adds_up=False)
        return usage


class LastObject:
    """Adds a field to an answer's object, or to the object of its last event before `[DONE]`."""

    def __init__(self, name: str, value: object, *, is_events: bool) -> None:
        self._field = f'"{name}":{json.dumps(value)}'.encode()
        self._begin, self._held = _EVENT if is_events else _CLOSING, bytearray()
        self._before = b""  # the last sign that was returned

    def take(self, data: bytes) -> bytes:
        """Return what cannot belong to the end of the last object."""
        looked_at = max(0, len(self._held) - 8)
        self._held += data
        begin = max((at.start() for at in self._begin.finditer(self._held, looked_at)), default=0)
        sure = bytes(self._held[:begin])
        del self._held[:begin]
        self._before = sure.rstrip()[-1:] or self._before
        return sure

    def end(self) -> bytes:
        """Return the rest, with the field in it."""
        line, newline, behind = self._held.partition(b"\n")
        before, closing, end = line.rpartition(b"}")
        if not closing or not self._begin.match(self._held):
            return bytes(self._held)
        comma = b"" if (self._before + before.rstrip()).endswith(b"{") else b","
        return bytes(before + comma + self._field + closing + end + newline + behind)


def _end_to_end(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: one for name, one in headers.items() if name.lower() not in _SERVERS}
