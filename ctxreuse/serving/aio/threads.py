"""Threads for blocking work: started when they are first needed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
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
        self._lock = Lock()

    async def __call__(self, work: Callable[[], _Result]) -> _Result:
        """Return the work's result; a coroutine, so that it is cancelled with its event loop."""
        return await asyncio.wrap_future(self.start(work))

    def start(self, work: Callable[[], _Result]) -> Future[_Result]:
        """Start some work, from any thread."""
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._most, "ctxreuse-workflow")
            return self._pool.submit(work)

    def close(self) -> None:
        """Wait for what runs, and let the threads go; they start again if they are needed."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()
