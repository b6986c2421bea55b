"""Threads for blocking work: started when they are first needed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

_Result = TypeVar("_Result")


class Execute(Protocol):
    """Runs blocking work somewhere else."""

    def __call__(self, work: Callable[[], _Result], /) -> Awaitable[_Result]:
        """Return what will hold the work's result."""


class Threads:
    """Runs blocking work in threads, in the order in which it comes.

    Args:
        most: How many threads there are at most.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._pool: ThreadPoolExecutor | None = None

    async def __call__(self, work: Callable[[], _Result]) -> _Result:
        """Return the work's result; a coroutine, so that it is cancelled with its event loop."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._most, "ctxreuse-workflow")
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        """Wait for what runs, and let the threads go; they start again if they are needed."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
