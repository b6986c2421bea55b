"""What the tests of the engine pool share: emulated engines by host name, and a clock by hand."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx

from ctxreuse import ContextBlock, ContextRequest, ReusePlanner
from ctxreuse.serving import EmulatedEngine, EnginePool


class Network(httpx.AsyncBaseTransport):
    """Reaches emulated engines by their names.

    Attributes:
        down: Names of those that refuse connections.
        silent: Names of those that take requests and never answer.
        statuses: HTTP statuses by (name, path), instead of the engine's answer.
        sent: All requests, in order.
    """

    def __init__(self, **engines: EmulatedEngine) -> None:
        self.engines = engines
        self.down: set[str] = set()
        self.silent: set[str] = set()
        self.statuses: dict[tuple[str, str], int] = {}
        self.sent: list[httpx.Request] = []
        self._transports = {name: engine.transport() for name, engine in engines.items()}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        name, path = request.url.host, request.url.path
        self.sent.append(request)
        if name in self.down:
            raise httpx.ConnectError("connection refused", request=request)
        if name in self.silent:
            await asyncio.Event().wait()
        if (name, path) in self.statuses:
            return httpx.Response(self.statuses[name, path])
        response: httpx.Response = await self._transports[name].handle_async_request(request)
        return response

    def paths(self, name: str) -> list[str]:
        """Return what an engine was asked, in order."""
        return [one.url.path for one in self.sent if one.url.host == name]


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Gate:
    """A model that answers when a test says so; only questions with "slow" in them wait."""

    def __init__(self, text: str = "OK.") -> None:
        self.opened = asyncio.Event()
        self.waiting = 0
        self._text = text

    async def __call__(self, body: dict[str, Any]) -> str:
        if "slow" in body["messages"][-1]["content"]:
            self.waiting += 1
            await self.opened.wait()
        return self._text


def pool_on(network: Network, **options: Any) -> EnginePool:
    """Return a pool of all engines of a network; nobody waits for others, or between attempts."""
    defaults: dict[str, Any] = {"model": "emulated", "window_s": 0, "backoff_s": 0}
    return EnginePool(
        [f"http://{name}/v1" for name in network.engines],
        http_client=httpx.AsyncClient(transport=network),
        **{**defaults, **options},
    )


def long_block(name: str) -> ContextBlock:
    """Return a block of some 80 tokens, as the engine counts and as it says itself."""
    return ContextBlock(id=name, text=f"{name} " * 80, tokens=80)


def asking(names: str, query: str = "Why?", **fields: Any) -> ContextRequest:
    return ContextRequest([long_block(name) for name in names], query, **fields)


def planner_of(pool: EnginePool, name: str) -> ReusePlanner:
    return pool._replicas[name].planner


def index_tokens(pool: EnginePool) -> dict[str, int]:
    return {name: planner_of(pool, name).statistics().tokens for name in pool.names}


def state_of(pool: EnginePool, name: str) -> str:
    return next(one.state for one in pool.statistics() if one.name == name)


def queues(pool: EnginePool) -> set[tuple[int, int, int]]:
    """Return running, waiting and queued tokens of all replicas, each combination once."""
    return {(one.running, one.waiting, one.queued_tokens) for one in pool.statistics()}


IDLE = {(0, 0, 0)}


async def until(condition: Callable[[], bool]) -> None:
    """Let other tasks go on until something is so."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)
