"""What the tests of the engine client share: a client on an emulated engine."""

from contextlib import asynccontextmanager
from functools import partial

import httpx

from ctxreuse import ContextBlock, ContextRequest
from ctxreuse.memory.prefix_index import IndexStatistics
from ctxreuse.serving import EmulatedEngine, EngineClient

MESSAGES = [{"role": "user", "content": "Where is Paris?"}]
NOTHING = IndexStatistics()


@asynccontextmanager
async def connected(engine, **options):
    """A client of an emulated engine that does not wait between attempts."""
    transport = engine.transport() if isinstance(engine, EmulatedEngine) else engine
    async with httpx.AsyncClient(transport=transport) as http:
        yield EngineClient("http://engine/v1", http_client=http, backoff_s=0, **options)


@asynccontextmanager
async def overheard(header, engine=None):
    """What makes clients of an emulated engine, and what their requests have in a header."""
    heard = []

    async def hear(request):
        heard.append(request.headers.get(header))

    hooks, transport = {"request": [hear]}, (engine or EmulatedEngine()).transport()
    async with httpx.AsyncClient(transport=transport, event_hooks=hooks) as http:
        yield partial(EngineClient, "http://engine", "emulated", http_client=http), heard


async def completed(engine, prompt=MESSAGES, options=None, **params):
    async with connected(engine, **(options or {})) as client:
        return await client.complete(prompt, **params)


def planned(planner, text="Paris is in France.", query="Where is Paris?", **fields):
    return planner.plan(ContextRequest([ContextBlock(id=1, text=text)], query, **fields))


def raw_replies(*bodies):
    """A transport that answers with these bytes in turn, as event streams."""
    remaining = list(bodies)
    headers = {"content-type": "text/event-stream"}
    return httpx.MockTransport(
        lambda request: httpx.Response(200, headers=headers, content=remaining.pop(0))
    )
