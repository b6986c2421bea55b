"""Requests that are sent on as they are, and answers that are given back byte for byte."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from typing import Any, NamedTuple

from ctxreuse.context.reported_usage import ReportedTokens, reported_field, usage_in
from ctxreuse.errors import EngineError
from ctxreuse.serving.client.connection import guarded, retry_after_s
from ctxreuse.serving.client.engine_client import EngineClient
from ctxreuse.serving.client.request import CompletionStream, EngineCall

HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "upgrade", "te", "trailer"}
HOP_BY_HOP |= {"proxy-connection"}
_SERVERS = HOP_BY_HOP | {"date", "server", "set-cookie"}
_USAGE, _MOST_READ, _LONGEST_REPLY = b'"usage"', 16 << 20, 256 << 20
_EVENT = re.compile(rb"(?m)^data: ?\{")


class ForwardedRequest(NamedTuple):
    """A request to send on."""

    method: str
    path: str
    content: bytes
    headers: Mapping[str, str]
    limit: asyncio.Timeout | None  # until a stream has begun; other answers begin when whole
    told: object = None  # what its answer is to say of the plan


class AnswerPiece(NamedTuple):
    """What has come of an answer: first its status and headers, then bytes, with the usage told."""

    data: bytes = b""
    status: int = 0
    headers: Mapping[str, str] = {}
    usage: ReportedTokens | None = None


class RefusedError(EngineError):
    """An engine's answer that is no success."""

    def __init__(self, host: str, response: Any, body: bytes) -> None:
        self.response, self.body = response, body
        self.headers = _end_to_end(response.headers)
        status, asked_s = response.status_code, retry_after_s(self)
        super().__init__(f"the engine at {host} answers {status}", status, 1, asked_s)


class ForwardingClient(EngineClient):
    """An engine that requests are sent on to; the pieces of its streams are `AnswerPiece`s."""

    def __init__(self, http: Any, base_url: str, **options: Any) -> None:
        super().__init__(base_url, http_client=http, retries=0, **options)
        self._http = guarded(http, _LONGEST_REPLY)

    def stream(  # type: ignore[override]
        self, prompt: object, *, session_id: str | None = None, forward: ForwardedRequest
    ) -> CompletionStream:
        """Return the answer to a request."""
        stream = CompletionStream()
        stream.pieces = self._answer(forward, stream)  # type: ignore[assignment]
        return stream

    async def _answer(
        self, forward: ForwardedRequest, stream: CompletionStream
    ) -> AsyncGenerator[AnswerPiece]:
        connection, call = self._connection, EngineCall(None, {})
        url, headers = connection.root + forward.path, {**connection.basic, **forward.headers}
        call.begin(self._clock())
        try:
            with self._reporting(call):
                request = self._http.build_request(
                    forward.method, url, content=forward.content, headers=headers
                )
                response = await self._http.send(request, stream=True)
                call.first_token_at = self._clock()
                async with aclosing(response):
                    if response.status_code >= 300:
                        raise RefusedError(connection.host, response, await response.aread())
                    kept = _end_to_end(response.headers)
                    is_events = kept.get("content-type", "").startswith("text/event-stream")
                    reader = AnswerReader(forward.told, is_events=is_events)
                    if forward.told:
                        kept.pop("content-length", None)
                    yield AnswerPiece(b"", response.status_code, kept)
                    async for data in response.aiter_raw():
                        yield AnswerPiece(reader.take(data))
                    call.reader.usage = usage = reader.usage()
                    is_told = usage.prompt_tokens is not None
                    yield AnswerPiece(reader.end(), usage=usage if is_told else None)
        except asyncio.CancelledError:
            limit, had_s = forward.limit, self._clock() - call.began_at
            # unlike a caller's leaving; other engines may have had most of the time
            if limit and limit.expired() and 2 * had_s > (connection._timeout_s or 0):
                raise TimeoutError("it has not begun to answer in time") from None
            raise
        stream.answer = self._completed(call)


class AnswerReader:
    """Reads the usage of an answer, a JSON object or events, and adds what is to be told.

    That stands in the object, or in that of the last event before `[DONE]`, which is held back.
    """

    def __init__(self, told: object, *, is_events: bool) -> None:
        self._is_events = is_events
        self._field = f'"ctxreuse":{json.dumps(told)}'.encode() if told else b""
        self._held, self._said = bytearray(), list[bytes]()

    def take(self, data: bytes) -> bytes:
        """Return what can be given back once these bytes have come."""
        looked_at, before = max(0, len(self._held) - 8), b""
        self._held += data
        events = _EVENT.finditer(self._held, looked_at) if self._is_events else ()
        if begin := max((at.start() for at in events), default=0):
            before = bytes(self._held[:begin])
            del self._held[:begin]
            self._said += [before] if _USAGE in before else []
        if self._field:
            return before
        if len(self._held) > _MOST_READ:
            self._held.clear()
        return data

    def end(self) -> bytes:
        """Return the rest, with what is to be told in it."""
        held = bytes(self._held)
        if not self._field or (self._is_events and not _EVENT.match(held)):
            return held if self._field else b""
        line, newline, behind = held.partition(b"\n") if self._is_events else (held, b"", b"")
        before, closing, end = line.rpartition(b"}")
        if not closing:
            return held
        comma = b"" if before.rstrip().endswith(b"{") else b","
        return before + comma + self._field + closing + end + newline + behind

    def usage(self) -> ReportedTokens:
        """Return what the answer has said of its usage."""
        usage, texts = ReportedTokens(), [bytes(self._held)]
        if self._is_events:
            texts = b"".join([*self._said, *texts]).splitlines()
        for text in texts:
            if _USAGE in text:
                with suppress(ValueError, RecursionError):
                    told = json.loads(text.removeprefix(b"data:"))
                    told = usage_in(reported_field(told, "message") or told)
                    usage = usage.with_more(told or usage, adds_up=False)
        return usage


def _end_to_end(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: one for name, one in headers.items() if name.lower() not in _SERVERS}
