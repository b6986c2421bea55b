"""How an emulated engine's answers go over the wire: as an HTTP library's transport, no socket."""

from __future__ import annotations

import asyncio
import importlib
import re
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple, Protocol, TypeAlias

from ctxreuse.errors import InvalidRequestError, MissingExtraError, describe
from ctxreuse.serving.client.completion import ToolCall

Answer: TypeAlias = str | ToolCall | Sequence[ToolCall]
"""What the model says: a text, or tools that it wants to be called."""

Said: TypeAlias = Answer | Awaitable[Answer] | AsyncIterator[str]
"""An answer as a function gives it; an async iterator gives it piece by piece."""

_HTTP_LIBRARIES = ("httpx", "httpx2")
_PIECE = re.compile(r"\s*\S+|\s+")


class Page(NamedTuple):
    """An answer that is known at once; status 0 refuses the connection."""

    status: int
    content: bytes
    media_type: str = "text/plain"


class Turn(Protocol):
    """The model's turn, part by part.

    Attributes:
        streams: Whether the client wants the answer as a stream.
        breaks: Whether the connection breaks after the first part.
        is_full: Whether the answer is as long as it may be.
    """

    streams: bool
    breaks: bool
    is_full: bool

    def say(self) -> Said:
        """Return what the model says."""

    def take(self, part: str | ToolCall) -> bytes:
        """Take a part of the answer; return what a stream sends for it."""

    def end(self) -> bytes:
        """End the answer; return what a stream sends then."""

    def page(self) -> Page:
        """Return the complete answer as one message."""


def transport_of(
    receive: Callable[[str, str, bytes], Page | Turn], module: ModuleType | None
) -> Any:
    """Return a transport, sync and async, of an HTTP library's own class.

    Args:
        receive: Takes a request's method, path and body.
        module: The library, `httpx` or `httpx2`; None takes the one that is installed.

    Raises:
        MissingExtraError: If neither is installed.
    """
    library: Any = _http_library() if module is None else module

    def respond(request: Any, page: Page) -> Any:
        if page.status == 0:
            raise library.ConnectError("connection refused", request=request)
        headers = {"content-type": page.media_type}
        return library.Response(page.status, headers=headers, content=page.content)

    def stream(turn: Turn, request: Any) -> Iterator[bytes]:
        for part in _parts(turn.say()):
            yield turn.take(part)
            if turn.breaks or turn.is_full:
                break
        if turn.breaks:
            raise library.ReadError("connection broken", request=request)
        yield turn.end()

    async def stream_async(turn: Turn, request: Any) -> AsyncIterator[bytes]:
        async for part in _parts_async(turn.say()):
            yield turn.take(part)
            if turn.breaks or turn.is_full:
                break
        if turn.breaks:
            raise library.ReadError("connection broken", request=request)
        yield turn.end()

    events = {"content-type": "text/event-stream"}

    class EmulatedTransport(library.AsyncBaseTransport, library.BaseTransport):  # type: ignore[misc]
        def handle_request(self, request: Any) -> Any:
            taken = receive(request.method, request.url.path, request.read())
            if isinstance(taken, Page):
                return respond(request, taken)
            content = stream(taken, request)
            if taken.streams:
                return library.Response(200, headers=events, content=content)
            deque(content, maxlen=0)
            return respond(request, taken.page())

        async def handle_async_request(self, request: Any) -> Any:
            taken = receive(request.method, request.url.path, await request.aread())
            if isinstance(taken, Page):
                return respond(request, taken)
            content = stream_async(taken, request)
            if taken.streams:
                return library.Response(200, headers=events, content=content)
            async for _ in content:
                pass
            return respond(request, taken.page())

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
