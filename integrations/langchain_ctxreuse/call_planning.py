"""Calls of a chat model, planned alone or together; a fault of ours sends them as given."""

from __future__ import annotations

from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Generator,
    Iterator,
    Sequence,
)
from contextlib import contextmanager
from typing import TypeVar

from ctxreuse.calls import Call, CallPlanner, PlannedCall, as_given
from ctxreuse.fail_open import FailOpen
from ctxreuse.planner import ReusePlanner, Strategy
from ctxreuse.serving.window import MicroBatchWindow, Scheduled

_Result = TypeVar("_Result")
_Step = TypeVar("_Step")


class CallPlanning:
    """Plans calls and keeps the planner informed. Threads and tasks may share it.

    Args:
        planner: Plans the contexts.
        strategy: "reuse", "paper" or "none".
        window_s: Seconds for which a single call waits for others; 0 plans each on its own.
        component: Whose calls these are, for the log.
    """

    def __init__(
        self, planner: ReusePlanner, strategy: Strategy, window_s: float, component: str
    ) -> None:
        self._planner = CallPlanner(planner, strategy)
        self._fail_open = FailOpen(component, "prompts are sent as given")
        self._window = MicroBatchWindow(self._scheduled, window_s, dropped=self.forget)

    @property
    def faults(self) -> int:
        """How often planning has failed and prompts were sent as given."""
        return self._fail_open.faults

    def attempt(self, work: Callable[[], _Result], instead: Callable[[], _Result]) -> _Result:
        """Return what `work` returns or, if that has a fault, what `instead` does."""
        return self._fail_open.attempt(work, instead)

    def single(self, call: Call) -> PlannedCall:
        """Return the planned call, in this thread, when its turn in the window has come."""
        return self._window.submit(call)

    async def asingle(self, call: Call) -> PlannedCall:
        """Return the planned call, in this task, when its turn in the window has come."""
        return await self._window.asubmit(call)

    def together(self, calls: Sequence[Call]) -> list[PlannedCall]:
        """Return calls that are known together in the order in which to send them, each once."""
        return self._fail_open.attempt(lambda: self._planner.plan(calls), lambda: as_given(calls))

    def forget(self, planned: PlannedCall) -> None:
        """Tell the planner that a call was not sent, or failed."""
        if planned.plans:
            self._fail_open.attempt(lambda: self._planner.forget(planned.plans), lambda: None)

    @contextmanager
    def forgotten_if_it_fails(self, planned: PlannedCall | None) -> Iterator[None]:
        """Run what sends a call; if that raises or is cancelled, the planner forgets the call."""
        try:
            yield
        except BaseException:
            if planned is not None:
                self.forget(planned)
            raise

    def streamed(
        self, planned: PlannedCall | None, start: Callable[[], Iterator[_Step]]
    ) -> Iterator[_Step]:
        """Yield what a model streams.

        If that fails or is cancelled before anything came, the planner forgets the call. Later on,
        the engine has read the prompt and probably keeps it, whoever stops listening.

        Args:
            planned: The call; None if it was not planned.
            start: Makes the model stream.
        """
        came = False
        steps = None
        try:
            steps = start()
            for step in steps:
                came = True
                yield step
        except BaseException:
            if planned is not None and not came:
                self.forget(planned)
            raise
        finally:
            if isinstance(steps, Generator):
                steps.close()

    async def astreamed(
        self, planned: PlannedCall | None, start: Callable[[], AsyncIterator[_Step]]
    ) -> AsyncGenerator[_Step]:
        """Yield what a model streams, as `streamed` does."""
        came = False
        steps = None
        try:
            steps = start()
            async for step in steps:
                came = True
                yield step
        except BaseException:
            if planned is not None and not came:
                self.forget(planned)
            raise
        finally:
            if isinstance(steps, AsyncGenerator):
                await steps.aclose()

    def _scheduled(self, calls: list[Call]) -> list[Scheduled[PlannedCall]]:
        return [Scheduled(planned.position, planned) for planned in self.together(calls)]
