"""An event loop whose clock is virtual: it jumps to the next timer instead of waiting for it."""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple

_Result = TypeVar("_Result")
_Arguments = TypeVarTuple("_Arguments")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop with a virtual clock from 0, for timers and tasks; it starts no threads."""

    _clock_resolution: float  # asyncio's

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_JumpingSelector(self._jump))

    def time(self) -> float:
        """Return the virtual time, in seconds."""
        return self._now

    def run_in_executor(
        self,
        executor: Executor | None,
        func: Callable[[*_Arguments], _Result],
        *args: *_Arguments,
    ) -> asyncio.Future[_Result]:
        """Do the work at once."""
        future: asyncio.Future[_Result] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def _jump(self, seconds: float) -> None:
        self._now += seconds
        # asyncio runs timers that are due within this; in late years a float has no smaller step
        self._clock_resolution = max(self._clock_resolution, math.ulp(self._now))


def run_in_virtual_time(main: Coroutine[Any, Any, _Result]) -> _Result:
    """Return what a coroutine returns, run in an event loop with a virtual clock."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


class _JumpingSelector(selectors.DefaultSelector):
    """Never waits for anything: lets the clock jump instead."""

    def __init__(self, jump: Callable[[float], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("all tasks wait, and no timer will wake one")
            self._jump(max(0.0, timeout))
        return ready
