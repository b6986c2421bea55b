"""The gateway to a model: prompts wait for each other, are planned, and go on in planned order."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from ctxreuse.adapters.leader_first import CallsInFlight
from ctxreuse.adapters.micro_batch import MicroBatcher, Scheduled
from ctxreuse.adapters.prompt_draft import ScopedPrompt
from ctxreuse.adapters.prompt_planner import PlannedPrompt, PromptPlanner, as_given
from ctxreuse.adapters.rendered_contexts import ContextRegistry
from ctxreuse.context.fail_open import FailOpen
from ctxreuse.context.reported_usage import ReportedTokens
from ctxreuse.planner import ReusePlanner, Strategy

_Piece = TypeVar("_Piece")


class ModelGateway:
    """Plans prompts, reports what was not sent; an error sends them as given; thread-safe."""

    def __init__(
        self,
        planner: ReusePlanner,
        strategy: Strategy,
        window_s: float,
        component: str,
        registry: ContextRegistry | None = None,
    ) -> None:
        self._made_with = planner, strategy, window_s, component, registry
        self._planner = PromptPlanner(planner, strategy, registry)
        self._note_answer = planner.report_usage
        self._fail_open = FailOpen(
            component, "prompts are sent as given", tell=planner.note_failure
        )
        self._batcher = MicroBatcher(self._scheduled, window_s, dropped=self.forget)
        self.attempt = self._fail_open.attempt
        self.statistics = self._planner.statistics
        self._in_flight = CallsInFlight() if window_s else None

    def __reduce__(self) -> tuple[Any, ...]:
        return ModelGateway, self._made_with

    @property
    def faults(self) -> int:
        """How often planning has failed and prompts were sent as given."""
        return self._fail_open.faults

    def plan(self, prompt: ScopedPrompt) -> PlannedPrompt:
        """Wait in this thread until a prompt is released; return it planned."""
        if not self._waits(prompt):
            return self._scheduled([prompt])[0].result
        planned = self._batcher.submit(prompt)
        if planned.in_flight is not None:
            with self.forget_on_failure(planned):
                planned.in_flight.wait()
        return planned

    async def aplan(self, prompt: ScopedPrompt) -> PlannedPrompt:
        """Wait in this task until a prompt is released; return it planned."""
        if not self._waits(prompt):
            return self._scheduled([prompt])[0].result
        planned = await self._batcher.asubmit(prompt)
        if planned.in_flight is not None:
            with self.forget_on_failure(planned):
                await planned.in_flight.await_()
        return planned

    def _waits(self, prompt: ScopedPrompt) -> bool:
        """Return whether a prompt gains by waiting for others; without a context it cannot."""
        return self.attempt(lambda: self._planner.may_show_context(prompt), lambda: True)

    def plan_batch(self, prompts: Sequence[ScopedPrompt]) -> list[PlannedPrompt]:
        """Return prompts that are known together in the order in which to send them, each once."""
        return self.attempt(lambda: self._planner.plan(prompts), lambda: as_given(prompts))

    def forget(self, planned: PlannedPrompt) -> None:
        """Tell the planner that a prompt was not sent, or that its call failed."""
        if planned.in_flight is not None:
            planned.in_flight.give_up()
        if planned.plans:
            self.attempt(lambda: self._planner.forget(planned.plans), lambda: None)

    def report_usage(
        self, planned: PlannedPrompt | None, usage: ReportedTokens | None, seconds: float
    ) -> None:
        """Tell the planner what the engine reports of a prompt that was answered."""
        note_beginning(planned)
        if planned is None or usage is None:
            return
        self.attempt(
            lambda: self._note_answer(
                planned.plans,
                usage.prompt_tokens,
                usage.cached_tokens,
                completion_tokens=usage.completion_tokens,
                written_tokens=usage.written_tokens,
                seconds=seconds,
                tenant=planned.tenant,
            ),
            lambda: None,
        )

    @contextmanager
    def forget_on_failure(self, planned: PlannedPrompt | None) -> Iterator[None]:
        """Forget a prompt if the code that sends it raises or is cancelled."""
        try:
            yield
        except BaseException:
            self.forget_unread(planned, is_read=False)
            raise

    def stream(
        self, planned: PlannedPrompt | None, start: Callable[[], Iterator[_Piece]]
    ) -> Generator[_Piece, None, None]:
        """Yield what a model streams; forget the prompt if that ends before the first piece."""
        is_read = False
        try:
            pieces = start()
            try:
                for piece in pieces:
                    if not is_read:
                        note_beginning(planned)
                    is_read = True  # by the engine, which then probably keeps the prompt
                    yield piece
            finally:
                close: Any = getattr(pieces, "close", None)
                if close is not None:
                    close()
        finally:
            self.forget_unread(planned, is_read)

    async def astream(
        self, planned: PlannedPrompt | None, start: Callable[[], AsyncIterator[_Piece]]
    ) -> AsyncGenerator[_Piece, None]:
        """Yield what a model streams, as `stream` does."""
        is_read = False
        try:
            pieces = start()
            try:
                async for piece in pieces:
                    if not is_read:
                        note_beginning(planned)
                    is_read = True
                    yield piece
            finally:
                close: Any = getattr(pieces, "aclose", None)
                if close is not None:
                    await close()
        finally:
            self.forget_unread(planned, is_read)

    def forget_unread(self, planned: PlannedPrompt | None, is_read: bool) -> None:
        """Forget a prompt if the engine has answered nothing, so probably has not read it."""
        if planned is not None and not is_read:
            self.forget(planned)

    def _scheduled(self, prompts: list[ScopedPrompt]) -> list[Scheduled[PlannedPrompt]]:
        planned = [self._entered(one) for one in self.plan_batch(prompts)]
        return [Scheduled(one.position, one) for one in planned]

    def _entered(self, planned: PlannedPrompt) -> PlannedPrompt:
        """Return a prompt that is to be sent next; those behind it may have to wait for it."""
        in_flight, use = self._in_flight, planned.use
        if in_flight is None or use is None:
            return planned
        return self.attempt(
            lambda: replace(planned, in_flight=in_flight.enter(use)), lambda: planned
        )


def note_beginning(planned: PlannedPrompt | None) -> None:
    """Let the calls go on that wait for one, which has begun to be answered."""
    if planned is not None and planned.in_flight is not None:
        planned.in_flight.begin()
