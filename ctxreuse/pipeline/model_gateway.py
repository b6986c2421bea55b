"""The gateway to a model: prompts wait for each other, are planned, and go on in planned order."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from inspect import isawaitable
from typing import Any, TypeAlias, TypeVar

from ctxreuse.context.fail_open import FailOpen
from ctxreuse.context.reported_usage import ReportedTokens
from ctxreuse.pipeline.leader_first import CallsInFlight, calls_of_batch
from ctxreuse.pipeline.ordered_release import MicroBatcher
from ctxreuse.pipeline.prompt_turn import (
    OpenPrompt,
    PlannedPrompt,
    PromptPlanner,
    ScopedPrompt,
    Wire,
)
from ctxreuse.planner import ReusePlanner, Strategy
from ctxreuse.planning.plan import AnsweredCall

_Piece = TypeVar("_Piece")
_Prompt: TypeAlias = ScopedPrompt | PlannedPrompt


class ModelGateway:
    """Plans prompts, reports what was not sent; an error sends them as given; thread-safe."""

    def __init__(
        self,
        planner: ReusePlanner,
        strategy: Strategy,
        window_s: float,
        component: str,
        through: str,  # the names of the model's classes
        usage_of: Callable[[Any], ReportedTokens | None],
        beside: Any = None,  # the `OwnCalls` to the model's engine; they never raise
        primes: bool = False,
        adds_up: bool = False,  # the usage of an answer's pieces; else each tells all so far
    ) -> None:
        settings = beside, primes, adds_up
        self._made_with = planner, strategy, window_s, component, through, usage_of, *settings
        self._through, self._usage_of, self._adds_up = through, usage_of, adds_up
        self._reuse, self._beside, self._primes = planner, beside, primes
        self._planner = PromptPlanner(planner, strategy, component, primes=primes)
        self.fail_open = FailOpen(component, "prompts are sent as given", tell=planner.note_failure)
        self._batcher = MicroBatcher(self._scheduled, window_s, dropped=self.forget)
        self.attempt = self.fail_open.attempt
        self.statistics = self._planner.statistics
        self._in_flight = CallsInFlight()
        self._lets_wait = window_s > 0 or primes

    def __reduce__(self) -> tuple[Any, ...]:
        return ModelGateway, self._made_with

    async def aplan(
        self, prompt: _Prompt, wire: Wire | None = None, *, blocks: bool = False
    ) -> PlannedPrompt:
        """Wait until a prompt is to be sent, in this thread if it blocks; return it planned.

        One that a batch has planned waits for its leader alone. Primes are sent if `wire` is known.
        """
        if isinstance(prompt, PlannedPrompt):
            planned = self._entered(prompt)
        elif not (opened := self._opened(prompt)).contexts:  # it gains nothing by waiting
            planned = self._scheduled([opened])[0]
        elif blocks:
            planned = self._batcher.submit(opened)
        else:
            planned = await self._batcher.asubmit(opened)
        beside = self._beside if self._primes or self._reuse.prompt_follower is not None else None
        if planned.in_flight is None and beside is None:
            return planned
        try:
            if planned.in_flight is not None:
                await planned.in_flight.wait(blocks=blocks)
            if beside is not None and wire is not None:
                primes = await beside.prime(planned, wire, blocks=blocks) if planned.forks else ()
                return self._primed(planned, wire, primes)
        except BaseException:  # its wait is interrupted
            self.forget(planned)
            raise
        return planned

    def _primed(self, planned: PlannedPrompt, wire: Wire, primes: Sequence[Any]) -> PlannedPrompt:
        """Let the followers of a prompt go on that is about to be sent."""
        if follower := self._reuse.prompt_follower:
            follower.expect()
        if planned.in_flight is not None and self._primes:
            planned.in_flight.begin()
        if primes:
            computed = sum(one.prefilled_tokens for one in primes)
            plan, note = planned.plans[0], self._reuse.report_primes
            self.attempt(lambda: note(plan, len(primes), computed))
        return replace(planned, wire=wire)

    def plan_batch(self, prompts: Sequence[ScopedPrompt]) -> list[PlannedPrompt]:
        """Return prompts that are known together in the order in which to send them, each once."""
        opened = [self._opened(one) for one in prompts]
        return self._scheduled(opened, in_batch=True)

    def _opened(self, prompt: ScopedPrompt) -> OpenPrompt:
        return self.attempt(lambda: self._planner.open(prompt), lambda: OpenPrompt.failed(prompt))

    def forget(self, planned: PlannedPrompt | None) -> None:
        """Tell the planner that a prompt was not sent, or that its call failed."""
        if planned is None:
            return
        if planned.in_flight is not None:
            planned.in_flight.give_up()
        for plan in planned.plans:
            self.attempt(partial(self._reuse.forget, plan))

    @contextmanager
    def calling(self, planned: PlannedPrompt | None) -> Iterator[Callable[[_Piece], _Piece]]:
        """Yield what reads an answer's pieces; without any, the engine keeps no prompt.

        What the pieces say of usage is reported at the end.
        """
        began, is_begun = time.perf_counter(), False  # it is kept once its answer is begun
        told: ReportedTokens | None = None

        def read(piece: _Piece) -> _Piece:
            nonlocal is_begun, told
            if not is_begun and planned is not None and planned.in_flight is not None:
                planned.in_flight.begin()
            is_begun = True
            usage = self.attempt(lambda: self._usage_of(piece))
            if usage is not None and told is not None:
                usage = told.with_more(usage, adds_up=self._adds_up)
            told = usage or told
            return piece

        try:
            yield read
        finally:
            if not is_begun:
                self.forget(planned)
        if planned is None or not is_begun:
            return
        seconds = time.perf_counter() - began
        if told is not None:
            self._report(planned, told, seconds)
        else:
            call = AnsweredCall(plans=planned.plans, seconds=seconds, through=self._through)
            self._reuse.note_unreported(call, planned.tenant)

    def _report(self, planned: PlannedPrompt, usage: ReportedTokens, seconds: float) -> None:
        told = {**usage._asdict(), "seconds": seconds, "tenant": planned.tenant}
        report = partial(self._reuse.report_usage, planned.plans, through=self._through, **told)
        self.attempt(report)
        follower, is_known = self._reuse.prompt_follower, planned.wire and planned.plans
        if follower is not None and self._beside is not None and is_known:
            self._beside.follow(planned, follower)

    def stream(
        self, planned: PlannedPrompt | None, start: Callable[[], Iterator[_Piece]]
    ) -> Generator[_Piece, None, None]:
        """Yield what a model streams."""
        with self.calling(planned) as read:
            pieces = start()
            try:
                for piece in pieces:
                    yield read(piece)
            finally:
                close: Any = getattr(pieces, "close", None)
                if close:
                    close()

    async def astream(
        self, planned: PlannedPrompt | None, start: Callable[[], Any]
    ) -> AsyncGenerator[Any, None]:
        """`stream`, awaited; so is its start where that is to be awaited."""
        with self.calling(planned) as read:
            pieces = start()
            if isawaitable(pieces):
                pieces = await pieces
            try:
                async for piece in pieces:
                    yield read(piece)
            finally:
                close: Any = getattr(pieces, "aclose", None)
                if close:
                    await close()

    def _scheduled(self, prompts: list[OpenPrompt], in_batch: bool = False) -> list[PlannedPrompt]:
        """Return prompts planned together; those of a batch enter when they are sent."""
        planned = self.attempt(
            lambda: self._planner.plan_open(prompts),
            lambda: [
                self._planner.closed(position, OpenPrompt.failed(one.given))
                for position, one in enumerate(prompts)
            ],
        )
        if in_batch and self._primes:
            planned = self.attempt(lambda: _in_batch(planned), lambda: planned)
        elif self._lets_wait and not in_batch:
            planned = [self._entered(one) for one in planned]
        return planned

    def _entered(self, planned: PlannedPrompt) -> PlannedPrompt:
        """Return a prompt that is to be sent next; those behind it may have to wait for it."""
        use = planned.use
        if use is None or planned.in_flight is not None:
            return planned
        return self.attempt(
            lambda: replace(planned, in_flight=self._in_flight.enter(use)), lambda: planned
        )


def _in_batch(prompts: Sequence[PlannedPrompt]) -> list[PlannedPrompt]:
    """Return prompts of a batch that know for whose primes to wait."""
    calls = iter(calls_of_batch([one.plans[0] for one in prompts if one.plans]))
    return [replace(one, in_flight=next(calls)) if one.plans else one for one in prompts]
