"""One event loop at a time: calls from other loops and threads are answered in the first one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from ctxreuse.context.fork_safety import ForkSafeLock, renew_after_fork
from ctxreuse.errors import InvalidRequestError
from ctxreuse.serving.aio import sync_bridge
from ctxreuse.workflow.errors import EngineClosedError

_Result = TypeVar("_Result")
_LOOP_ENDED = (
    "the event loop that the engine was at work in has ended, and this run with it; run it again, "
    "or use the engine in one event loop only"
)


@dataclass(slots=True, eq=False)
class _OwnerLoop:
    loop: asyncio.AbstractEventLoop
    users: int = 0


class SingleLoopRunner:
    """Runs coroutines of all callers in the first caller's loop, while anything runs there."""

    def __init__(self) -> None:
        self._lock = ForkSafeLock()
        self._start_anew()
        renew_after_fork(self._start_anew)

    def _start_anew(self) -> None:
        """Have no owner loop: in a child, the parent's does not run."""
        self._owner: _OwnerLoop | None = None

    async def run(self, work: Callable[[], Coroutine[Any, Any, _Result]]) -> _Result:
        """Return what a coroutine returns; it has the caller's context variables."""
        here = asyncio.get_running_loop()
        with self._used(None) as owner:
            if owner.loop is here:
                return await work()
            if owner.loop in sync_bridge.waiting_loops.get():
                raise InvalidRequestError(
                    "a call that is not asynchronous waits in the event loop that would have to "
                    "answer it; await the method that is: ainvoke, aretrieve, arun_batch, ..."
                )
            running = self._run_in(owner, work)
            try:
                answer = asyncio.run_coroutine_threadsafe(running, owner.loop)
            except RuntimeError as error:  # closed at this moment
                running.close()
                raise EngineClosedError(_LOOP_ENDED) from error
            try:
                return await asyncio.wrap_future(answer)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and not task.cancelling():
                    raise EngineClosedError(_LOOP_ENDED) from None
                raise

    async def _run_in(
        self, owner: _OwnerLoop, work: Callable[[], Coroutine[Any, Any, _Result]]
    ) -> _Result:
        with self._used(owner):  # a caller that is cancelled leaves before the work has ended
            return await work()

    @contextmanager
    def _used(self, owner: _OwnerLoop | None) -> Iterator[_OwnerLoop]:
        """Count a user of the owner loop; None takes the present one, or makes this loop it."""
        with self._lock:
            if owner is None:
                owner = self._owner
                if owner is None or not owner.users or owner.loop.is_closed():
                    owner = self._owner = _OwnerLoop(asyncio.get_running_loop())
            owner.users += 1
        try:
            yield owner
        finally:
            with self._lock:
                owner.users -= 1
