"""Servers on real sockets: emulated engines that die and come back, and scripts of raw bytes."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple, TypeAlias

import httpx

from ctxreuse.serving import EmulatedEngine


class Received(NamedTuple):
    """A request as it came over the wire; header names are lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


Script: TypeAlias = Callable[[Received, asyncio.StreamWriter], Awaitable[None]]
"""Writes a whole HTTP response, or a part of one; the connection is closed behind it."""


class HttpServer:
    """A server on a port of this machine.

    Attributes:
        received: All requests, in order.
        port: Its port; the same after `come_back`.
    """

    def __init__(self, script: Script) -> None:
        self._script = script
        self.received: list[Received] = []
        self.port = 0
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def come_back(self) -> None:
        """Listen; do nothing if it does."""
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
            self.port = self._server.sockets[0].getsockname()[1]

    async def die(self) -> None:
        """Break all connections and refuse new ones, as a killed process does."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for writer in tuple(self._connections):
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                received = await _request(reader)
                self.received.append(received)
                await self._script(received, writer)
                await writer.drain()
        finally:
            self._connections.discard(writer)
            writer.close()


async def _request(reader: asyncio.StreamReader) -> Received:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.strip().split("\r\n")
    method, path, _ = first.split(" ")
    headers = {
        name.lower(): value.strip() for name, _, value in (one.partition(":") for one in lines)
    }
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Received(method, path, headers, body)


def response(status: int, body: bytes = b"", **headers: str) -> bytes:
    """Return a whole response; underscores in names of headers become hyphens."""
    lines = {"content-type": "application/json", "content-length": str(len(body))}
    lines |= {name.replace("_", "-"): value for name, value in headers.items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"HTTP/1.1 {status} X\r\n{head}connection: close\r\n\r\n".encode() + body


def engine_script(engine: EmulatedEngine) -> Script:
    transport = engine.transport(httpx)

    async def serve(received: Received, writer: asyncio.StreamWriter) -> None:
        request = httpx.Request(
            received.method, f"http://engine{received.path}", content=received.body
        )
        try:
            answer = await transport.handle_async_request(request)
            kind = answer.headers["content-type"]
            head = f"HTTP/1.1 {answer.status_code} X\r\ncontent-type: {kind}\r\n"
            writer.write(f"{head}connection: close\r\n\r\n".encode())
            async for part in answer.aiter_bytes():
                writer.write(part)
                await writer.drain()
        except httpx.TransportError:
            writer.transport.abort()

    return serve


@asynccontextmanager
async def listening(*scripts: Script) -> AsyncIterator[list[HttpServer]]:
    """Servers that listen; they end with the block."""
    servers = [HttpServer(script) for script in scripts]
    try:
        for server in servers:
            await server.come_back()
        yield servers
    finally:
        for server in servers:
            await server.die()
