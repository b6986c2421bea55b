"""Running what is asynchronous for callers that are not, even inside a running event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from queue import SimpleQueue
from typing import TypeVar

from anyio.from_thread import start_blocking_portal

_Result = TypeVar("_Result")
_Piece = TypeVar("_Piece")


def run(work: Callable[[], Awaitable[_Result]]) -> _Result:
    """Return what a coroutine returns, run in an event loop of its own."""
    with start_blocking_portal() as portal:
        return portal.call(work)


def iterate(work: Callable[[], AsyncIterator[_Piece]]) -> Iterator[_Piece]:
    """Yield what an async iterator yields; who stops early cancels it."""
    pieces: SimpleQueue[list[_Piece]] = SimpleQueue()

    async def pump() -> None:
        async for piece in work():
            pieces.put([piece])

    with start_blocking_portal() as portal:
        pumping = portal.start_task_soon(pump)
        pumping.add_done_callback(lambda _: pieces.put([]))
        try:
            while piece := pieces.get():
                yield piece[0]
            pumping.result()
        finally:
            pumping.cancel()
