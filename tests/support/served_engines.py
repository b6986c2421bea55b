"""An emulated engine at every address."""

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

        monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", handle)
        return emulated

    return serve
