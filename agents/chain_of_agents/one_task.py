"""An async generator in a task of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

_Piece = TypeVar("_Piece")


async def in_one_task(pieces: AsyncGenerator[_Piece]) -> AsyncGenerator[_Piece]:
    """Yield what an async generator yields; who stops early cancels it.

    Timeouts bind to the task that they begin in, and frameworks take each piece in another task:
    there a stalled answer would never time out.
    """
    queue: asyncio.Queue[list[_Piece]] = asyncio.Queue()

    async def pump() -> None:
        try:
            async with aclosing(pieces):
                async for piece in pieces:
                    queue.put_nowait([piece])
        finally:
            queue.put_nowait([])

    pumping = asyncio.create_task(pump())
    try:
        while piece := await queue.get():
            yield piece[0]
        await pumping
    finally:
        pumping.cancel()
        await asyncio.wait([pumping])
