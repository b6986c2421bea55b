"""Work beside other work: in threads, in background tasks, n at a time, all or none."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, Self, TypeAlias, TypeVar

from ctxreuse.context.fail_open import FailOpen
from ctxreuse.context.fork_safety import ForkSafeLock, leave_to_parent, renew_after_fork
from ctxreuse.errors import EngineError

_CANCELLED_AGAIN_S = 3.0  # what closes in order has ended by then

_Result = TypeVar("_Result")


Execute: TypeAlias = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs blocking work in another thread."""


class Threads:
    """Runs blocking work in threads, in the order in which it comes; starts them when needed."""

    def __init__(self, max_threads: int) -> None:
        self._max_threads = max_threads
        self._pool: ThreadPoolExecutor | None = None
        self._lock = ForkSafeLock()
        renew_after_fork(self._start_anew)

    def _start_anew(self) -> None:
        leave_to_parent(self._pool)
        self._pool = None

    async def __call__(self, work: Callable[[], _Result]) -> _Result:
        """Return the work's result; a coroutine, so that it is cancelled with its event loop."""
        return await asyncio.wrap_future(self.start(work))

    def start(self, work: Callable[[], _Result]) -> Future[_Result]:
        """Start some work, from any thread."""
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._max_threads, "ctxreuse-workflow")
            return self._pool.submit(work)

    def close(self) -> None:
        """Wait for what runs, and end the threads; they start again if they are needed."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()


class TimeLimit:
    """Bounds how long the parts of one answer take together; between two no limit is in force."""

    def __init__(self, seconds: float | None, who: str, setting: str) -> None:
        self._left_s = seconds
        self._too_late = (
            f"{who} did not answer within {seconds} s; give a larger {setting} if it needs longer"
        )
        self._began: float | None = None

    @property
    def left_s(self) -> float | None:
        """Seconds that are left, from 0; None is no limit."""
        if self._left_s is None or self._began is None:
            return self._left_s
        return max(0.0, self._left_s - (asyncio.get_running_loop().time() - self._began))

    async def wait_for(self, part: Awaitable[_Result]) -> _Result:
        """Wait for one part."""
        self._began = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(self._left_s) as limit:
                return await part
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise EngineError(self._too_late) from error
        finally:
            self._left_s, self._began = self.left_s, None


class BackgroundTasks:
    """Tasks that no caller waits for, but that end before their owner does."""

    def __init__(self, failing: FailOpen) -> None:
        self._failing = failing
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Start some work."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def wait(self) -> None:
        """Wait until all of it has ended, even if the caller is cancelled meanwhile."""
        cancelled: asyncio.CancelledError | None = None
        while self._tasks:
            try:
                await asyncio.wait(self._tasks)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self._failing.note(error)


class ConcurrencyLimiter:
    """Lets a number of runs go on at a time; others wait in the order of arrival."""

    def __init__(self, max_running: int) -> None:
        self.waiting = 0
        self._max_running = max_running
        self._running = 0
        self._free = asyncio.Semaphore(max_running)

    @asynccontextmanager
    async def slot(self) -> AsyncGenerator[None, None]:
        """Wait for a slot, and hold it until the block ends."""
        if not self.waiting and not self._running:
            self._free = asyncio.Semaphore(self._max_running)  # the last may be another loop's
        self.waiting += 1
        try:
            await self._free.acquire()
        finally:
            self.waiting -= 1
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            self._free.release()


class AsyncClosing(ABC):
    """Enters an `async with` block as itself, and closes at its end."""

    @abstractmethod
    async def aclose(self) -> None:
        """Close it."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()


async def all_of(works: Iterable[Coroutine[Any, Any, _Result]]) -> list[_Result]:
    """Return what coroutines return, in order, side by side; one's failure cancels the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        # alone it would leave the others running; `asyncio.TaskGroup` raises a group of errors
        return await asyncio.gather(*tasks)
    finally:
        await end_tasks(*tasks)


async def end_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks, and wait until they have ended; what they raise is not raised."""
    running = set(tasks)
    while running:
        for task in running:
            task.cancel()  # of one that has ended, nothing is logged then
        # `asyncio.wait_for`, which LangChain streams with, may lose one before Python 3.12
        running = (await asyncio.wait(running, timeout=_CANCELLED_AGAIN_S))[1]
