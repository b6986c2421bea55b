"""The server `ctxreuse serve` in a test's own event loop, before emulated engines."""

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import patch

import httpx
import uvicorn
from http_servers import HttpServer, Received, Script, engine_script, listening, response

from ctxreuse import ReusePlanner
from ctxreuse.cli.serve_command import ServeCommand
from ctxreuse.serving import EmulatedEngine
from ctxreuse.serving.door.app import make_app

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"


def documents(names: str, length: int = 60) -> list[dict[str, Any]]:
    """Documents of some length that are told apart by their names."""
    return [
        {"id": one, "title": one.upper(), "text": f"{one} says: " + f"{one}w " * length}
        for one in names
    ]


def asking(names: str = "", question: str = "Which?", **fields: Any) -> dict[str, Any]:
    given = {"documents": documents(names)} if names else {}
    return {
        "model": "emulated",
        "messages": [{"role": "user", "content": question}],
        **given,
        **fields,
    }


class Served(httpx.AsyncClient):
    """A client of a server that is up, with what stands behind it.

    Attributes:
        engines: The engines' servers.
        planner: The server's.
    """

    engines: list[HttpServer]
    planner: ReusePlanner

    async def chat(self, names: str = "", question: str = "Which?", **fields: Any) -> Any:
        answer = await self.post(CHAT, json=asking(names, question, **fields))
        assert answer.status_code == 200, answer.text
        return answer.json()

    def bodies(self, engine: int = 0) -> list[dict[str, Any]]:
        received = self.engines[engine].received
        return [json.loads(one.body) for one in received if one.method == "POST"]


@asynccontextmanager
async def served(
    *scripts: Script | EmulatedEngine,
    environment: dict[str, str] | None = None,
    cache: str = "vllm",
    engines: tuple[str, ...] = (),
    **settings: Any,
) -> AsyncIterator[Served]:
    made = [engine_script(one) if isinstance(one, EmulatedEngine) else one for one in scripts]
    async with listening(*made) as servers:
        addresses = tuple(one.url for one in servers) + engines
        planner = ReusePlanner(cache=cache)
        with patch.dict(os.environ, environment or {}):
            app = make_app(planner, ServeCommand(engines=addresses, **settings))
        at = socket.create_server(("127.0.0.1", 0))
        at.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        config = uvicorn.Config(app, log_level="critical", http="h11", ws="none")
        server = uvicorn.Server(config)
        running = asyncio.create_task(server.serve([at]))
        while not server.started:
            await asyncio.sleep(0.01)
        base = f"http://127.0.0.1:{at.getsockname()[1]}"
        async with Served(base_url=base, timeout=20, trust_env=False) as client:
            client.engines, client.planner = servers, planner
            try:
                yield client
            finally:
                server.should_exit = True
                await running


def answering(status: int, body: bytes, **headers: str) -> Script:
    """An engine that answers every request with the same bytes."""

    async def script(received: Received, writer: asyncio.StreamWriter) -> None:
        is_health = received.method == "GET"
        writer.write(response(200) if is_health else response(status, body, **headers))

    return script
