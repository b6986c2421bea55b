"""Requests that are sent on as they are, and answers that are given back byte for byte."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any, NamedTuple

from ctxreuse.context.reported_usage import ReportedTokens, usage_in
from ctxreuse.errors import EngineError
from ctxreuse.serving.aio.concurrency import AsyncClosing
from ctxreuse.serving.client.completion import Completion
from ctxreuse.serving.client.connection import client_library_errors
from ctxreuse.serving.client.engine_client import EngineClient
from ctxreuse.serving.client.guarded_http import guarded

_LONGEST_REFUSAL = 1 << 20
_HOP_BY_HOP = frozenset(
    ("connection", "keep-alive", "transfer-encoding", "upgrade", "date", "server", "te", "trailer")
)


class Forward(NamedTuple):
    """A request to send on."""

    path: str
    content: bytes
    headers: Mapping[str, str]


class Head(NamedTuple):
    """How an answer begins."""

    status: int
    headers: dict[str, str]


class Piece(NamedTuple):
    """What has come of an answer: its head first, then bytes, with the usage that they tell."""

    data: bytes = b""
    head: Head | None = None
    usage: ReportedTokens | None = None


class RefusedError(EngineError):
    """An engine's answer of another status than 200."""

    head: Head
    body: bytes


class ForwardingClient(EngineClient):
    """An engine that requests are sent on to."""

    def __init__(self, base_url: str, http: Any, max_reply_bytes: int, **options: Any) -> None:
        super().__init__(
            base_url, http_client=http, max_reply_bytes=max_reply_bytes, retries=0, **options
        )
        self._http, self._root = guarded(http, max_reply_bytes), self._connection.root

    def stream(  # type: ignore[override]
        self, prompt: object, *, session_id: str | None = None, forward: Forward
    ) -> ForwardedAnswer:
        """Return the answer to a request, piece by piece."""
        headers = dict(forward.headers)
        if session_id is not None:
            headers[self._session_header] = session_id
        return ForwardedAnswer(self, forward._replace(headers=headers))

    async def pieces(self, forward: Forward) -> AsyncGenerator[Piece]:
        """Yield an answer's pieces."""
        url, reader = f"{self._root}{forward.path}", UsageReader()
        try:
            request = self._http.build_request(
                "POST", url, content=forward.content, headers=forward.headers
            )
            response = await self._http.send(request, stream=True)
            try:
                head = Head(response.status_code, _end_to_end(response.headers))
                if head.status >= 300:
                    raise await self._refused(response, head)
                yield Piece(head=head)
                async for data in response.aiter_raw():
                    yield Piece(data, usage=reader.take(data))
                yield Piece(usage=reader.end())
            finally:
                await response.aclose()
        except client_library_errors() as error:
            raise self._connection.error(error, 1) from error

    async def _refused(self, response: Any, head: Head) -> EngineError:
        body = b""
        async for data in response.aiter_raw():
            body += data
            if len(body) > _LONGEST_REFUSAL:
                break
        error = RefusedError(f"the engine at {self._connection.host} refuses: {head.status}", head.status)
        error.head, error.body = head, body
        return error


class ForwardedAnswer(AsyncClosing):
    """An answer in progress: an async iterator of its pieces."""

    def __init__(self, client: ForwardingClient, forward: Forward) -> None:
        self._pieces, self._began = client.pieces(forward), time.perf_counter()
        self._first_s = 0.0
        self._usage = ReportedTokens()

    @property
    def completion(self) -> Completion:
        """What the answer cost."""
        usage = self._usage
        return Completion(
            text="",
            request_id="",
            finish_reason="",
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            written_tokens=usage.written_tokens,
            time_to_first_token_s=self._first_s,
            total_s=time.perf_counter() - self._began,
            attempts=1,
        )

    def __aiter__(self) -> ForwardedAnswer:
        return self

    async def __anext__(self) -> Piece:
        piece = await anext(self._pieces)
        self._first_s = self._first_s or time.perf_counter() - self._began
        if piece.usage is not None:
            self._usage = self._usage.with_more(piece.usage, adds_up=False)
        return piece

    async def aclose(self) -> None:
        """Close the connection, unless the answer has ended."""
        await self._pieces.aclose()


class UsageReader:
    """Reads what an answer says of its usage: a JSON object, or events; anything else says none."""

    def __init__(self, max_bytes: int = 16 << 20) -> None:
        self._rest, self._left = bytearray(), max_bytes
        self._is_events: bool | None = None

    def take(self, data: bytes) -> ReportedTokens | None:
        """Read bytes as they come; return what whole events of them say."""
        self._left -= len(data)
        if self._left < 0:
            return None
        self._rest += data
        if self._is_events is None:
            self._is_events = not self._rest.lstrip().startswith(b"{")
        if not self._is_events or b"\n" not in data:
            return None
        *lines, self._rest = self._rest.split(b"\n")
        told = None
        for line in lines:
            if line.startswith(b"data:") and b'"usage"' in line:
                told = _usage(line[5:]) or told
        return told

    def end(self) -> ReportedTokens | None:
        """Return what a JSON object says."""
        return None if self._is_events or self._left < 0 else _usage(self._rest)


def _usage(text: bytes) -> ReportedTokens | None:
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(told, dict):
        return None
    message = told.get("message")  # of Anthropic's first event
    return usage_in(message if isinstance(message, dict) and "usage" not in told else told)


def _end_to_end(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: one for name, one in headers.items() if name.lower() not in _HOP_BY_HOP}
