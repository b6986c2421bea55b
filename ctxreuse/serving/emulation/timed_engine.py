"""A batching engine in the time of an event loop: what it computes takes as long as it says.

In an event loop with a virtual clock (`ctxreuse.serving.aio.virtual_time`) hours pass in a moment.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import accumulate, repeat

from ctxreuse.cache.usage import CacheUsage
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.serving.emulation.batching_engine import BatchingEngine, EngineRequest, Step


class TimedEngine:
    """Runs a batching engine whenever somebody waits for an answer. For one event loop.

    It has no task of its own: the loop's timers drive it, so nothing is left when nobody waits.
    Each step ends at a time of the loop's clock that follows from the step before, so that timers
    which fire late, as those of real loops do, slow nothing down in the long run.

    Args:
        engine: The engine.
        speed: How many times faster than its rates it runs.

    Raises:
        InvalidRequestError: If the speed is not more than 0.
    """

    def __init__(self, engine: BatchingEngine, speed: float = 1.0) -> None:
        if not isinstance(speed, (int, float)) or not 0 < speed < float("inf"):
            raise InvalidRequestError(f"speed must be a number above 0, not {describe(speed)}")
        self._engine = engine
        self._speed = speed
        self._waiting: dict[EngineRequest, _Waiter] = {}
        self._loop: asyncio.AbstractEventLoop | None = None  # in which steps are going on
        self._step_ends = 0.0
        self._quiet: _QuietSteps | None = None

    @property
    def requests(self) -> int:
        """How many requests wait for their turn or are being answered."""
        return len(self._waiting)

    async def serve(
        self, tokens: Sequence[int], answer: Sequence[int], salt: str = ""
    ) -> CacheUsage:
        """Wait until a prompt is computed and answered; who is cancelled aborts it.

        Args:
            tokens: The prompt's token ids.
            answer: The answer's.
            salt: vLLM's `cache_salt`.

        Returns:
            The prompt's tokens, and how many came from the cache.

        Raises:
            InvalidRequestError: If the cache cannot hold the prompt, or there is no answer.
        """
        request = EngineRequest(tokens, answer, salt)
        async with aclosing(self._answered(request)) as told:
            async for _ in told:
                pass
        assert request.usage is not None, "a finished request has begun"
        return request.usage

    async def stream(
        self, tokens: Sequence[int], answer: Sequence[int], salt: str = "", *, chunk_tokens: int = 8
    ) -> AsyncGenerator[int, None]:
        """Follow an answer while it is given; who leaves early, or is cancelled, aborts it.

        The request is sent when the first number is asked for.

        Args:
            tokens: The prompt's token ids.
            answer: The answer's.
            salt: vLLM's `cache_salt`.
            chunk_tokens: After how many tokens, each time, the reader is told.

        Yields:
            How many tokens of the answer there are; it grows up to their number. A reader that is
            late learns of several chunks at once.

        Raises:
            InvalidRequestError: If the cache cannot hold the prompt, there is no answer, or
                `chunk_tokens` is less than 1.
        """
        request = EngineRequest(tokens, answer, salt, chunk_tokens)
        async with aclosing(self._answered(request)) as told:
            async for said in told:
                yield said

    async def _answered(self, request: EngineRequest) -> AsyncGenerator[int, None]:
        """Yield how many tokens of an answer there are, up to the last one."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            self._end_quiet_steps()
        self._engine.submit(request)
        waiter = self._waiting[request] = _Waiter()
        if self._loop is not loop:  # nothing goes on, or it went on in a loop that is gone
            self._loop, self._step_ends, self._quiet = loop, loop.time(), None
            loop.call_soon(self._begin_step)
        said = 0
        try:
            while said < len(request.answer):
                said = await waiter.more_than(said)
                yield said
        finally:
            if said < len(request.answer):
                if self._loop is loop:
                    self._end_quiet_steps()
                self._engine.abort(request)
            del self._waiting[request]

    def _begin_step(self) -> None:
        if not self._engine.has_work:
            self._loop = None
            return
        assert self._loop is not None
        steps, duration_s = self._engine.quiet_steps()
        if steps:
            lasting = repeat(duration_s / self._speed, steps)
            ends = list(accumulate(lasting, initial=self._step_ends))[1:]
            timer = self._loop.call_at(ends[-1], self._loop.call_soon, self._end_quiet_steps)
            self._quiet = _QuietSteps(ends, timer)
            return
        try:
            step = self._engine.step()
        except Exception as error:  # token ids that are none; else everybody would wait for ever
            self._loop = None
            for waiter in self._waiting.values():
                waiter.fail(error)
            return
        self._step_ends += step.duration_s / self._speed
        # what else is due at that time comes first, and so is part of the next step
        self._loop.call_at(self._step_ends, self._loop.call_soon, self._end_step, step)

    def _end_quiet_steps(self) -> None:
        """End them with the step that is running, since something will change."""
        quiet, self._quiet = self._quiet, None
        if quiet is None:
            return
        assert self._loop is not None
        quiet.timer.cancel()
        last = min(bisect_left(quiet.ends, self._loop.time()), len(quiet.ends) - 1)
        self._engine.skip(last + 1)
        self._step_ends = quiet.ends[last]
        self._loop.call_at(self._step_ends, self._loop.call_soon, self._begin_step)

    def _end_step(self, step: Step) -> None:
        for request in step.progressed:
            if request in self._waiting:
                assert request.chunk_tokens is not None, "it progresses by chunks"
                self._waiting[request].grow(request.chunk_tokens)
        for request in step.finished:
            if request in self._waiting:
                self._waiting[request].grow(len(request.answer) - self._waiting[request].said)
        self._begin_step()


@dataclass(frozen=True, slots=True, eq=False)
class _QuietSteps:
    """Steps that tell nobody anything: no timer is needed for each.

    Attributes:
        ends: When each of them ends.
        timer: Rings when the last one does.
    """

    ends: list[float]
    timer: asyncio.TimerHandle


@dataclass(slots=True, eq=False)
class _Waiter:
    """Who waits for a request.

    Attributes:
        said: How many tokens of its answer there are.
        error: Why no more will come.
        woken: Done when there is more; None while its reader does something else.
    """

    said: int = 0
    error: Exception | None = None
    woken: asyncio.Future[None] | None = None

    async def more_than(self, said: int) -> int:
        """Wait until there are more tokens; return how many."""
        while self.said <= said:
            if self.error is not None:
                raise self.error
            self.woken = asyncio.get_running_loop().create_future()
            await self.woken
        return self.said

    def grow(self, tokens: int) -> None:
        self.said += tokens
        self._wake()

    def fail(self, error: Exception) -> None:
        self.error = error
        self._wake()

    def _wake(self) -> None:
        if self.woken is not None and not self.woken.done():
            self.woken.set_result(None)
