"""An HTTP client that keeps prompts at their host, and replies within a bound.

What the engine's host answers is not trusted. A redirect would take the prompt and the key
elsewhere; a reply without an end would take the memory. So redirects are not followed, and a reply
that is too long, or compressed unasked, breaks.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from typing import Any

from ctxreuse.serving.client.reply import BrokenReplyError


def http_libraries() -> list[Any]:
    """Return the HTTP libraries that are loaded; `openai` takes clients of either."""
    return [sys.modules[name] for name in ("httpx", "httpx2") if name in sys.modules]


def guarded(http: Any, max_reply_bytes: int) -> Any:
    """Return an HTTP client that sends as another one does, on the same connections."""
    library: Any = next(
        (one for one in http_libraries() if isinstance(http, one.AsyncClient)), None
    )
    if library is None:
        return http

    class Bounded(library.AsyncByteStream):  # type: ignore[misc]
        def __init__(self, stream: Any) -> None:
            self._stream = stream

        async def __aiter__(self) -> AsyncIterator[bytes]:
            left = max_reply_bytes
            async for part in self._stream:
                left -= len(part)
                if left < 0:
                    raise BrokenReplyError(f"the reply has more than {max_reply_bytes:,} bytes")
                yield part

        async def aclose(self) -> None:
            await self._stream.aclose()

    class Guarded(library.AsyncClient):  # type: ignore[misc]
        def __init__(self) -> None:
            """Own nothing: settings, cookies and connections are those of the other client."""

        def __getattr__(self, name: str) -> Any:
            return getattr(http, name)

        async def send(self, request: Any, *, stream: bool = False, **options: Any) -> Any:
            request.headers["accept-encoding"] = "identity"
            options["follow_redirects"] = False
            response = await http.send(request, stream=True, **options)
            response.stream = Bounded(response.stream)
            response.encoding = "utf-8"  # Python has codecs that decompress, or decode to bytes
            try:
                if response.headers.get("content-encoding", "identity") != "identity":
                    raise BrokenReplyError(
                        "the reply is compressed although that was not asked for"
                    )
                if not stream:
                    await response.aread()
            except BaseException:
                await response.aclose()
                raise
            return response

        async def aclose(self) -> None:
            await http.aclose()

    return Guarded()
