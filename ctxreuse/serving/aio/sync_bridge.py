"""Runs coroutines for sync callers in one lasting event loop, since connections belong to one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from queue import SimpleQueue
from threading import Thread, current_thread
from typing import Any, TypeVar

from ctxreuse.context.fork_safety import (
    ForkSafeLock,
    importing_late,
    leave_to_parent,
    renew_after_fork,
)

_Result = TypeVar("_Result")
_Piece = TypeVar("_Piece")
waiting_loops: ContextVar[frozenset[asyncio.AbstractEventLoop]] = ContextVar(
    "ctxreuse_waiting_loops", default=frozenset()
)
"""The event loops that are blocked until the running code has ended."""


def run(work: Callable[[], Coroutine[Any, Any, _Result]], *, lasting: bool) -> _Result:
    """Return what a coroutine returns, run in the event loop that lasts or in a new one."""
    with _starting(lasting) as start:
        running: Future[_Result] = start(work)
        try:
            return running.result()
        finally:
            running.cancel()  # the caller may have been interrupted


def started(work: Callable[[], Coroutine[Any, Any, _Result]]) -> Future[_Result]:
    """Start a coroutine in the event loop that lasts."""
    return asyncio.run_coroutine_threadsafe(work(), _LASTING.loop())


def iterate(work: Callable[[], AsyncIterator[_Piece]], *, lasting: bool) -> Iterator[_Piece]:
    """Yield what an async iterator yields; a caller that stops early cancels it."""
    pieces: SimpleQueue[list[_Piece]] = SimpleQueue()

    async def pump() -> None:
        async for piece in work():
            pieces.put([piece])

    with _starting(lasting) as start:
        pumping = start(pump)
        pumping.add_done_callback(lambda _: pieces.put([]))
        try:
            while piece := pieces.get():
                yield piece[0]
            pumping.result()
        finally:
            pumping.cancel()


@contextmanager
def _starting(lasting: bool) -> Iterator[Callable[[Callable[[], Any]], Future[Any]]]:
    """Yield what starts a coroutine in an event loop, with the caller's context variables."""
    context = copy_context()  # a generator's caller goes on between the pieces
    with suppress(RuntimeError):  # no event loop runs here
        here = asyncio.get_running_loop()
        context.run(lambda: waiting_loops.set(waiting_loops.get() | {here}))
    # a caller that waited inside the lasting event loop would keep its own call from running
    if lasting and current_thread() is not _LASTING.thread:
        yield lambda work: context.run(started, work)
    else:
        with importing_late:
            from anyio.from_thread import start_blocking_portal

        with start_blocking_portal() as portal:
            yield lambda work: context.run(portal.start_task_soon, work)


class _LastingLoop:
    """An event loop in a thread that starts when it is first needed, and ends with the process."""

    def __init__(self) -> None:
        self._lock = ForkSafeLock()
        self.thread: Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        renew_after_fork(self._start_anew)

    def _start_anew(self) -> None:
        leave_to_parent(self._loop)
        self.thread = self._loop = None

    def loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop; a process that was forked gets its own."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self.thread = Thread(
                    target=self._loop.run_forever, name="ctxreuse-sync", daemon=True
                )
                self.thread.start()
            return self._loop


_LASTING = _LastingLoop()
