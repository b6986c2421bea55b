"""The gateway to a model: prompts wait for each other, are planned, and go on in the planned order.

The model wrappers of all frameworks share it. An internal error sends prompts as given.
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
from ctxreuse.adapters.prompt_planner import PlannedPrompt, PromptPlanner, ScopedPrompt, as_given
from ctxreuse.adapters.rendered_contexts import ContextRegistry
from ctxreuse.context.fail_open import FailOpen
from ctxreuse.planner import ReusePlanner, Strategy

_Result = TypeVar("_Result")
_Piece = TypeVar("_Piece")


class ModelGateway:
    """Plans prompts and tells the planner which were not sent. Threads and tasks may share it.

    Args:
        planner: Plans the contexts.
        strategy: "reuse", "paper" or "none".
        window_s: Seconds for which a single prompt waits for others; 0 plans each on its own.
        component: The model wrapper's name, for the log.
        registry: Where rendered contexts are remembered; None takes the one of this process.

    Attributes:
        plan: Waits in this thread until a prompt is released; returns it planned.
        aplan: Does the same in this task.
        attempt: Returns what a function returns or, if it raises, what another one does.

    Raises:
        InvalidRequestError: wrong type or out of range.
        UnknownStrategyError: there is no such strategy.
    """

    def __init__(
        self,
        planner: ReusePlanner,
        strategy: Strategy,
        window_s: float,
        component: str,
        registry: ContextRegistry | None = None,
    ) -> None:
        self._planner = PromptPlanner(planner, strategy, registry)
        self._fail_open = FailOpen(component, "prompts are sent as given")
        self._batcher = MicroBatcher(self._scheduled, window_s, dropped=self.evict)
        self.attempt = self._fail_open.attempt
        self.plan = self._batcher.submit
        self.aplan = self._batcher.asubmit

    @property
    def faults(self) -> int:
        """How often planning has failed and prompts were sent as given."""
        return self._fail_open.faults

    def plan_batch(self, prompts: Sequence[ScopedPrompt]) -> list[PlannedPrompt]:
        """Return prompts that are known together in the order in which to send them, each once."""
        return self.attempt(lambda: self._planner.plan(prompts), lambda: as_given(prompts))

    def evict(self, planned: PlannedPrompt) -> None:
        """Tell the planner that a prompt was not sent, or that its call failed."""
        if planned.plans:
            self.attempt(lambda: self._planner.forget(planned.plans), lambda: None)

    @contextmanager
    def evict_on_failure(self, planned: PlannedPrompt | None) -> Iterator[None]:
        """Evict a prompt if the code that sends it raises or is cancelled.

        Args:
            planned: The prompt; None if it was not planned.
        """
        try:
            yield
        except BaseException:
            if planned is not None:
                self.evict(planned)
            raise

    def stream(
        self, planned: PlannedPrompt | None, start: Callable[[], Iterator[_Piece]]
    ) -> Generator[_Piece, None, None]:
        """Yield what a model streams.

        If that fails or is cancelled before the first piece, the planner forgets the prompt. Later
        on, the engine has read the prompt and probably keeps it.

        Args:
            planned: The prompt; None if it was not planned.
            start: Makes the model stream.
        """
        has_begun = False
        pieces = None
        try:
            pieces = start()
            for piece in pieces:
                has_begun = True
                yield piece
        except BaseException:
            if planned is not None and not has_begun:
                self.evict(planned)
            raise
        finally:
            close: Any = getattr(pieces, "close", None)
            if close is not None:
                close()

    async def astream(
        self, planned: PlannedPrompt | None, start: Callable[[], AsyncIterator[_Piece]]
    ) -> AsyncGenerator[_Piece, None]:
        """Yield what a model streams, as `stream` does."""
        has_begun = False
        pieces = None
        try:
            pieces = start()
            async for piece in pieces:
                has_begun = True
                yield piece
        except BaseException:
            if planned is not None and not has_begun:
                self.evict(planned)
            raise
        finally:
            close: Any = getattr(pieces, "aclose", None)
            if close is not None:
                await close()

    def _scheduled(self, prompts: list[ScopedPrompt]) -> list[Scheduled[PlannedPrompt]]:
        return [Scheduled(planned.position, planned) for planned in self.plan_batch(prompts)]
