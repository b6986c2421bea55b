"""Emulated engines for the cases: clients that need no socket, and what they were sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx

from ctxreuse.serving import EmulatedEngine, EngineClient, EnginePool


def client_of(engine: EmulatedEngine, **options: Any) -> EngineClient:
    """Return a client of an emulated engine."""
    http = httpx.AsyncClient(transport=engine.transport(httpx))
    return EngineClient("http://engine", http_client=http, backoff_s=0, **options)


def pool_of(*engines: EmulatedEngine, **options: Any) -> EnginePool:
    """Return a pool of emulated engines, called e0, e1, ..."""

    def connector(engine: EmulatedEngine) -> Callable[[], EngineClient]:
        return lambda: client_of(engine, retries=0)

    return EnginePool(
        {f"e{number}": connector(engine) for number, engine in enumerate(engines)},
        **{"window_s": 0, "backoff_s": 0, **options},
    )


def sent_to(engine: EmulatedEngine) -> list[Any]:
    """Return the messages of the requests that an engine has got, in the order of arrival."""
    return [body["messages"] for body in engine.requests]
