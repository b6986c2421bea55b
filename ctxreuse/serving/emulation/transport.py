"""The HTTP door of an emulated engine: an HTTP library's transport without a socket."""

from __future__ import annotations

import asyncio
import importlib
import re
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, TypeAlias

from ctxreuse.errors import InvalidRequestError, MissingExtraError, describe
from ctxreuse.serving.client.completion import ToolCall
from ctxreuse.serving.emulation.openai_replies import EmulatedReply, HttpPage, Json

Answer: TypeAlias = str | ToolCall | Sequence[ToolCall]
"""What the model says: a text, or tools that it wants to be called."""

Answering: TypeAlias = Callable[[Json], Answer | Awaitable[Answer] | AsyncIterator[str]]
"""From a request's body to the answer; an async iterator gives it piece by piece."""

_HTTP_LIBRARIES = ("httpx", "httpx2")
_PIECE = re.compile(r"\s*\S+|\s+")


def transport_of(
    receive: Callable[[str, str, bytes], HttpPage | EmulatedReply],
    answer: Answering,
    module: ModuleType | None,
) -> Any:
    """Return a transport, sync and async, of an HTTP library's own class.

    Args:
        receive: Takes a request's method, path and body.
        answer: What the model says to a request.
        module: The library, `httpx` or `httpx2`; None takes the one that is installed.

    Raises:
        MissingExtraError: Neither is installed.
    """
    library: Any = _http_library() if module is None else module

    def respond(request: Any, page: HttpPage) -> Any:
        if page.status == 0:
            raise library.ConnectError("connection refused", request=request)
        headers = {"content-type": page.media_type}
        return library.Response(page.status, headers=headers, content=page.content)

    def stream(reply: EmulatedReply, request: Any) -> Iterator[bytes]:
        for part in _parts(answer(reply.body)):
            yield reply.take(part)
            if reply.breaks or reply.is_full:
                break
        if reply.breaks:
            raise library.ReadError("connection broken", request=request)
        yield reply.end()

    async def stream_async(reply: EmulatedReply, request: Any) -> AsyncIterator[bytes]:
        async for part in _parts_async(answer(reply.body)):
            yield reply.take(part)
            if reply.breaks or reply.is_full:
                break
        if reply.breaks:
            raise library.ReadError("connection broken", request=request)
        yield reply.end()

    events = {"content-type": "text/event-stream"}

    class EmulatedTransport(library.AsyncBaseTransport, library.BaseTransport):  # type: ignore[misc]
        def handle_request(self, request: Any) -> Any:
            reply = receive(request.method, request.url.path, request.read())
            if isinstance(reply, HttpPage):
                return respond(request, reply)
            content = stream(reply, request)
            if reply.streams:
                return library.Response(200, headers=events, content=content)
            deque(content, maxlen=0)
            return respond(request, reply.page())

        async def handle_async_request(self, request: Any) -> Any:
            reply = receive(request.method, request.url.path, await request.aread())
            if isinstance(reply, HttpPage):
                return respond(request, reply)
            content = stream_async(reply, request)
            if reply.streams:
                return library.Response(200, headers=events, content=content)
            async for _ in content:
                pass
            return respond(request, reply.page())

    return EmulatedTransport()


def _http_library() -> ModuleType:
    for name in _HTTP_LIBRARIES:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise MissingExtraError("EmulatedEngine.transport", "openai")


def _parts(answer: object) -> Iterator[str | ToolCall]:
    if isinstance(answer, str):
        yield from _PIECE.findall(answer)
    elif isinstance(answer, ToolCall):
        yield answer
    elif isinstance(answer, (list, tuple)) and all(isinstance(one, ToolCall) for one in answer):
        yield from answer
    else:
        raise InvalidRequestError(
            f"the emulated engine's answer must be a text or ToolCalls, not {describe(answer)}; "
            "awaitables and async iterators need an async client"
        )


async def _parts_async(answer: object) -> AsyncIterator[str | ToolCall]:
    if isinstance(answer, AsyncIterator):
        async for part in answer:
            yield part
        return
    for part in _parts(await answer if isinstance(answer, Awaitable) else answer):
        yield part
        await asyncio.sleep(0)  # other requests go on between two tokens, as on a server
