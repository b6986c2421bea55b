"""An emulated engine at every address."""

import asyncio

import httpx
import pytest

from ctxreuse.serving import EmulatedEngine

URL = "http://engine.invalid/v1"


@pytest.fixture
def served(monkeypatch):
    """Return a function that has an emulated engine answer at every address."""

    def serve(**options):
        emulated = EmulatedEngine(**options)
        transport = emulated.transport()

        async def handle(_, request):
            return await transport.handle_async_request(request)

        async def read(request):
            given = httpx.Request(
                request.method, request.url, headers=request.headers, content=request.read()
            )
            answer = await transport.handle_async_request(given)
            return httpx.Response(
                answer.status_code, headers=answer.headers, content=await answer.aread()
            )

        monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", handle)
        monkeypatch.setattr(
            httpx.HTTPTransport, "handle_request", lambda _, request: asyncio.run(read(request))
        )
        return emulated

    return serve
