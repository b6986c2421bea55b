"""One event loop at a time: whoever calls from another one is served where the work goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any, TypeVar

from ctxreuse.errors import InvalidRequestError
from ctxreuse.serving.aio import sync_bridge
from ctxreuse.workflow.errors import EngineClosedError

_Result = TypeVar("_Result")
_Loop = asyncio.AbstractEventLoop


@dataclass(slots=True, eq=False)
class _Home:
    loop: _Loop
    guests: int = 0


class SingleLoopRunner:
    """Runs coroutines in one event loop, whatever loops and threads they are asked for in.

    The first caller's loop is home, as long as anything runs there; frameworks call the same object
    from coroutines, and, for code that is not asynchronous, from threads.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._home: _Home | None = None

    async def run(self, work: Callable[[_Loop], Coroutine[Any, Any, _Result]]) -> _Result:
        """Return what a coroutine returns; it runs at home, with the caller's context variables.

        Args:
            work: Makes the coroutine, given the loop that it will run in.

        Raises:
            InvalidRequestError: If home waits for this very call.
            EngineClosedError: If home ends before the coroutine does.
        """
        here = asyncio.get_running_loop()
        with self._visiting(here) as home:
            if home.loop is here:
                return await work(here)
            if home.loop in sync_bridge.waiting_loops():
                raise InvalidRequestError(
                    "a call that is not asynchronous waits in the event loop that would have to "
                    "answer it; await the method that is: ainvoke, aretrieve, arun_batch, ..."
                )
            running = self._work_at(home, work)
            try:
                answer = asyncio.run_coroutine_threadsafe(running, home.loop)
            except RuntimeError as error:  # closed in this moment
                running.close()
                raise _gone() from error
            try:
                return await asyncio.wrap_future(answer)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and not task.cancelling():
                    raise _gone() from None
                raise

    async def _work_at(
        self, home: _Home, work: Callable[[_Loop], Coroutine[Any, Any, _Result]]
    ) -> _Result:
        with self._counted(home):  # a caller that is cancelled leaves before the work has ended
            return await work(home.loop)

    @contextmanager
    def _visiting(self, here: _Loop) -> Iterator[_Home]:
        with self._lock:
            home = self._home
            if home is None or not home.guests or home.loop.is_closed():
                home = self._home = _Home(here)
            home.guests += 1
        try:
            yield home
        finally:
            with self._lock:
                home.guests -= 1

    @contextmanager
    def _counted(self, home: _Home) -> Iterator[None]:
        with self._lock:
            home.guests += 1
        try:
            yield
        finally:
            with self._lock:
                home.guests -= 1


def _gone() -> EngineClosedError:
    return EngineClosedError(
        "the event loop that the engine was at work in has ended, and this run with it; run it "
        "again, or use the engine in one event loop only"
    )
