"""Back-pressure: so many runs at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class ConcurrencyLimiter:
    """Lets so many runs go on at a time; others wait in the order of arrival.

    Args:
        most: How many.

    Attributes:
        waiting: How many wait.
    """

    def __init__(self, most: int) -> None:
        self.waiting = 0
        self._most = most
        self._taken = 0
        self._free = asyncio.Semaphore(most)

    @asynccontextmanager
    async def turn(self) -> AsyncGenerator[None, None]:
        """Wait for a turn, and have it until the block ends."""
        if not self.waiting and not self._taken:
            self._free = asyncio.Semaphore(self._most)  # the last one may be of another event loop
        self.waiting += 1
        try:
            await self._free.acquire()
        finally:
            self.waiting -= 1
        self._taken += 1
        try:
            yield
        finally:
            self._taken -= 1
            self._free.release()
