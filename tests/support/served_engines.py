"""An emulated engine at every address."""

import asyncio

import httpx
import pytest

from ctxreuse.serving import EmulatedEngine

URL = "http://engine.invalid/v1"


def split(engine):
    """The bodies of the primes, and of the requests."""
    is_prime = [str(body.get("request_id", "")).startswith("prime-") for body in engine.requests]
    pairs = list(zip(engine.requests, is_prime, strict=True))
    return [body for body, prime in pairs if prime], [body for body, prime in pairs if not prime]


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
