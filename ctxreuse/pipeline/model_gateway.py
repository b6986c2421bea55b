"""The gateway to a model: prompts wait for each other, are planned, and go on in planned order."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from ctxreuse.context.fail_open import FailOpen
from ctxreuse.context.reported_usage import ReportedTokens
from ctxreuse.pipeline.leader_first import CallsInFlight
from ctxreuse.pipeline.micro_batch import MicroBatcher, Scheduled
from ctxreuse.pipeline.prompt_turn import (
    OpenPrompt,
    PlannedPrompt,
    PromptPlanner,
    ScopedPrompt,
    as_given,
)
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
    ) -> None:
        self._made_with = planner, strategy, window_s, component
        self._planner = PromptPlanner(planner, strategy, component)
        self._note_answer = planner.report_usage
        self._fail_open = FailOpen(
            component, "prompts are sent as given", tell=planner.note_failure
        )
        self._batcher = MicroBatcher(self._scheduled, window_s, dropped=self.forget)
        self.attempt = self._fail_open.attempt
        self.statistics = self._planner.statistics
        self._in_flight = CallsInFlight()
        self._lets_wait = window_s > 0

    def __reduce__(self) -> tuple[Any, ...]:
        return ModelGateway, self._made_with

    @property
    def faults(self) -> int:
        """How often planning has failed and prompts were sent as given."""
        return self._fail_open.faults

    def plan(self, prompt: ScopedPrompt) -> PlannedPrompt:
        """Wait in this thread until a prompt is released; return it planned."""
        opened = self._opened(prompt)
        if not opened.contexts:  # it gains nothing by waiting for others
            return self._scheduled([opened])[0].result
        return self._in_turn(self._batcher.submit(opened))

    async def aplan(self, prompt: ScopedPrompt) -> PlannedPrompt:
        """Wait in this task until a prompt is released; return it planned."""
        opened = self._opened(prompt)
        if not opened.contexts:
            return self._scheduled([opened])[0].result
        return await self._ain_turn(await self._batcher.asubmit(opened))

    def enter(self, planned: PlannedPrompt) -> PlannedPrompt:
        """Wait in this thread until a prompt of a batch, which starts now, may be sent."""
        return self._in_turn(self._entered(planned))

    async def aenter(self, planned: PlannedPrompt) -> PlannedPrompt:
        """`enter`, awaited."""
        return await self._ain_turn(self._entered(planned))

    def _in_turn(self, planned: PlannedPrompt) -> PlannedPrompt:
        """Wait until a prompt's leader has begun to be answered, if it has one."""
        if planned.in_flight is not None:
            with self.forget_on_failure(planned):
                planned.in_flight.wait()
        return planned

    async def _ain_turn(self, planned: PlannedPrompt) -> PlannedPrompt:
        if planned.in_flight is not None:
            with self.forget_on_failure(planned):
                await planned.in_flight.await_()
        return planned

    def plan_batch(self, prompts: Sequence[ScopedPrompt]) -> list[PlannedPrompt]:
        """Return prompts that are known together in the order in which to send them, each once."""
        opened = [self._opened(one) for one in prompts]
        return [one.result for one in self._scheduled(opened, in_batch=True)]

    def _opened(self, prompt: ScopedPrompt) -> OpenPrompt:
        return self.attempt(lambda: self._planner.open(prompt), lambda: OpenPrompt.failed(prompt))

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

    def _scheduled(
        self, prompts: list[OpenPrompt], in_batch: bool = False
    ) -> list[Scheduled[PlannedPrompt]]:
        """Return prompts planned together; those of a batch enter when they are sent."""
        planned = self.attempt(
            lambda: self._planner.plan_open(prompts),
            lambda: as_given([one.given for one in prompts]),
        )
        if self._lets_wait and not in_batch:
            planned = [self._entered(one) for one in planned]
        return [Scheduled(one.position, one) for one in planned]

    def _entered(self, planned: PlannedPrompt) -> PlannedPrompt:
        """Return a prompt that is to be sent next; those behind it may have to wait for it."""
        use = planned.use
        if use is None:
            return planned
        return self.attempt(
            lambda: replace(planned, in_flight=self._in_flight.enter(use)), lambda: planned
        )


def note_beginning(planned: PlannedPrompt | None) -> None:
    """Let the calls go on that wait for one, which has begun to be answered."""
    if planned is not None and planned.in_flight is not None:
        planned.in_flight.begin()
