"""Where calls to a model wait for each other, are planned, and go on in the planned order.

What the model wrappers of all frameworks share; a fault of ours sends prompts as given.
"""

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
from typing import Any, TypeVar

from ctxreuse.adapters.micro_batch import MicroBatcher, Scheduled
from ctxreuse.adapters.prompt_planner import PlannedPrompt, Prompt, PromptPlanner, as_given
from ctxreuse.context.fail_open import FailOpen
from ctxreuse.planner import ReusePlanner, Strategy

_Result = TypeVar("_Result")
_Piece = TypeVar("_Piece")


class ModelGateway:
    """Plans calls and keeps the planner informed. Threads and tasks may share it.

    Args:
        planner: Plans the contexts.
        strategy: "reuse", "paper" or "none".
        window_s: Seconds for which a single call waits for others; 0 plans each on its own.
        component: Whose calls these are, for the log.

    Raises:
        InvalidRequestError: If the planner or the window is none.
        UnknownStrategyError: If there is no such strategy.
    """

    def __init__(
        self, planner: ReusePlanner, strategy: Strategy, window_s: float, component: str
    ) -> None:
        self._planner = PromptPlanner(planner, strategy)
        self._fail_open = FailOpen(component, "prompts are sent as given")
        self._window = MicroBatcher(self._scheduled, window_s, dropped=self.forget)

    @property
    def faults(self) -> int:
        """How often planning has failed and prompts were sent as given."""
        return self._fail_open.faults

    def attempt(self, work: Callable[[], _Result], instead: Callable[[], _Result]) -> _Result:
        """Return what `work` returns or, if that has a fault, what `instead` does."""
        return self._fail_open.attempt(work, instead)

    def go_through(self, call: Prompt) -> PlannedPrompt:
        """Wait in this thread until it is the call's turn; return it planned."""
        return self._window.submit(call)

    async def ago_through(self, call: Prompt) -> PlannedPrompt:
        """Wait in this task until it is the call's turn; return it planned."""
        return await self._window.asubmit(call)

    def plan_batch(self, calls: Sequence[Prompt]) -> list[PlannedPrompt]:
        """Return calls that are known together in the order in which to send them, each once."""
        return self._fail_open.attempt(lambda: self._planner.plan(calls), lambda: as_given(calls))

    def forget(self, planned: PlannedPrompt) -> None:
        """Tell the planner that a call was not sent, or failed."""
        if planned.plans:
            self._fail_open.attempt(lambda: self._planner.forget(planned.plans), lambda: None)

    @contextmanager
    def evict_on_failure(self, planned: PlannedPrompt | None) -> Iterator[None]:
        """Run what sends a call; if that raises or is cancelled, the planner forgets the call.

        Args:
            planned: The call; None if it was not planned.
        """
        try:
            yield
        except BaseException:
            if planned is not None:
                self.forget(planned)
            raise

    def stream(
        self, planned: PlannedPrompt | None, start: Callable[[], Iterator[_Piece]]
    ) -> Generator[_Piece, None, None]:
        """Yield what a model streams.

        If that fails or is cancelled before anything came, the planner forgets the call. Later on,
        the engine has read the prompt and probably keeps it, whoever stops listening.

        Args:
            planned: The call; None if it was not planned.
            start: Makes the model stream.
        """
        came = False
        pieces = None
        try:
            pieces = start()
            for piece in pieces:
                came = True
                yield piece
        except BaseException:
            if planned is not None and not came:
                self.forget(planned)
            raise
        finally:
            close: Any = getattr(pieces, "close", None)
            if close is not None:
                close()

    async def astream(
        self, planned: PlannedPrompt | None, start: Callable[[], AsyncIterator[_Piece]]
    ) -> AsyncGenerator[_Piece, None]:
        """Yield what a model streams, as `stream` does."""
        came = False
        pieces = None
        try:
            pieces = start()
            async for piece in pieces:
                came = True
                yield piece
        except BaseException:
            if planned is not None and not came:
                self.forget(planned)
            raise
        finally:
            close: Any = getattr(pieces, "aclose", None)
            if close is not None:
                await close()

    def _scheduled(self, calls: list[Prompt]) -> list[Scheduled[PlannedPrompt]]:
        return [Scheduled(planned.position, planned) for planned in self.plan_batch(calls)]
