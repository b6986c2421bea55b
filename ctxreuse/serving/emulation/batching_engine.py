"""The emulated engine: continuous batching, in order of arrival, and a prefix cache; no model."""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ctxreuse.cache.simulator import CacheUsage, PrefixCacheSimulator, RunningPrompt
from ctxreuse.context.checks import checked_integer, checked_kind, checked_number, checked_positive
from ctxreuse.errors import InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRates:
    """What a step takes; by default that of a model of 8 billion parameters on one H100."""

    prefill_tokens_per_s: float = 10_000.0
    decode_step_s: float = 0.010  # a step in which requests get a token each
    decode_step_per_request_s: float = 0.000_15  # what each of them adds

    def __post_init__(self) -> None:
        for name in self.__slots__:
            checked_number(name, getattr(self, name))
        checked_positive("prefill_tokens_per_s", self.prefill_tokens_per_s)

    def step_s(self, prefilled_tokens: int, decoding: int) -> float:
        """Return how many seconds a step takes."""
        prefill = prefilled_tokens / self.prefill_tokens_per_s
        if not decoding:
            return prefill
        return prefill + self.decode_step_s + self.decode_step_per_request_s * decoding


COMMON_RATES = EngineRates()
"""The rates of every benchmark of this project."""


class BatchedRequest:
    """A prompt and its answer; the reader hears of each `chunk_tokens` of it, or of all."""

    def __init__(
        self, tokens: Sequence[int], answer: Sequence[int], chunk_tokens: int | None = None
    ) -> None:
        self.tokens = tokens
        self.answer = answer
        self.chunk_tokens = chunk_tokens
        self.usage: CacheUsage | None = None
        self.running: RunningPrompt | None = None
        self.to_prefill = 0
        self.order = 0  # of first tokens
        self.last_step = 0
        self.generated = 0  # tokens of its answer so far
        self.failure: Exception | None = None
        self.has_news = asyncio.Event()


class BatchStep(NamedTuple):
    """What a step did."""

    duration_s: float
    finished: tuple[BatchedRequest, ...]
    progressed: tuple[BatchedRequest, ...] = ()


class BatchingEngine:
    """Runs requests step by step, or in an event loop's time; a late timer slows nothing down."""

    def __init__(
        self,
        capacity_tokens: int | None = None,
        block_size: int = 16,
        rates: EngineRates = COMMON_RATES,
        *,
        speed: float = 1.0,
        max_running: int = 256,
        max_step_tokens: int = 8_192,
    ) -> None:
        self.cache = PrefixCacheSimulator(capacity_tokens, block_size, null_block=True)
        self.usage = CacheUsage()
        self.generated_tokens = 0
        self._rates = checked_kind("rates", rates, EngineRates, "EngineRates")
        self._speed = checked_positive("speed", speed)
        self._max_running = checked_integer("max_running", max_running, 1)
        self._max_step_tokens = checked_integer("max_step_tokens", max_step_tokens, 1)
        self._waiting: deque[BatchedRequest] = deque()
        self._without_room: BatchedRequest | None = None  # until a running request ends
        self._prefilling: BatchedRequest | None = None
        # a heap of (step that the reader hears of, order, request)
        self._decoding: list[tuple[int, int, BatchedRequest]] = []
        self._orders = 0
        self._step = 0
        self._readers: dict[BatchedRequest, None] = {}
        self._loop: asyncio.AbstractEventLoop | None = None  # in which steps are going on
        self._step_ends = 0.0

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._waiting or self._prefilling or self._decoding)

    @property
    def open_requests(self) -> int:
        """How many requests of `stream` wait for their turn or are being answered."""
        return len(self._readers)

    def submit(self, request: BatchedRequest) -> None:
        """Put a request in the queue."""
        if not request.answer:
            raise InvalidRequestError("an answer must have at least one token")
        if not self.cache.fits(len(request.tokens), len(request.answer)):
            raise InvalidRequestError(
                f"a prompt of {len(request.tokens)} tokens with its answer is larger than the cache"
            )
        self._waiting.append(request)

    def abort(self, request: BatchedRequest) -> None:
        """Stop a request, whose client has left; what was computed of it stays in the cache."""
        if request in self._waiting:
            self._waiting.remove(request)
        if request is self._prefilling:
            self._prefilling = None
        self._decoding = [entry for entry in self._decoding if entry[2] is not request]
        heapq.heapify(self._decoding)
        self._leave_cache(request, ())

    def step(self) -> BatchStep:
        """Run one step; without work it takes no time."""
        budget = self._max_step_tokens
        while budget and (request := self._prefilling or self._begin_next()) is not None:
            tokens = min(budget, request.to_prefill)
            budget -= tokens
            request.to_prefill -= tokens
            if request.to_prefill:
                self._prefilling = request
                break
            self._prefilling = None
            request.order, request.last_step = self._orders, self._step + len(request.answer)
            self._orders += 1
            self._await_news(request)
        duration_s = self._rates.step_s(self._max_step_tokens - budget, len(self._decoding))
        self._step += 1
        self.generated_tokens += len(self._decoding)
        finished, progressed = [], []
        while self._decoding and self._decoding[0][0] <= self._step:
            request = heapq.heappop(self._decoding)[2]
            if request.last_step <= self._step:
                self._leave_cache(request, request.answer)
                finished.append(request)
            else:
                self._await_news(request)
                progressed.append(request)
        return BatchStep(duration_s, tuple(finished), tuple(progressed))

    def _begin_next(self) -> BatchedRequest | None:
        if not self._waiting or len(self._decoding) >= self._max_running:
            return None
        request = self._waiting[0]
        if request is self._without_room:
            return None
        request.running = self.cache.start(request.tokens, room_for=len(request.answer))
        if request.running is None:
            self._without_room = request
            return None
        request.usage = request.running.usage
        request.to_prefill = request.usage.prefilled_tokens
        self.usage += request.usage
        return self._waiting.popleft()

    def _await_news(self, request: BatchedRequest) -> None:
        """Have the step end the request's next chunk, or its answer, that does so."""
        following = request.last_step
        if request.chunk_tokens is not None:
            following = min(self._step + request.chunk_tokens, following)
        heapq.heappush(self._decoding, (following, request.order, request))

    def _leave_cache(self, request: BatchedRequest, answer: Sequence[int]) -> None:
        if request.running is not None:
            self.cache.finish(request.running, answer, uncomputed=request.to_prefill)
            request.running = self._without_room = None

    async def stream(self, request: BatchedRequest) -> AsyncGenerator[int, None]:
        """Yield how many tokens of a request's answer there are; leaving early aborts it."""
        loop = asyncio.get_running_loop()
        self.submit(request)
        self._readers[request] = None
        if self._loop is not loop:  # nothing goes on, or it went on in a loop that is gone
            self._loop, self._step_ends = loop, loop.time()
            loop.call_soon(self._begin_step)
        read = 0
        try:
            while read < len(request.answer):
                while request.generated <= read:
                    if request.failure is not None:
                        raise request.failure
                    request.has_news.clear()
                    await request.has_news.wait()
                read = request.generated
                yield read
        finally:
            if read < len(request.answer):
                self.abort(request)
            del self._readers[request]

    def _begin_step(self) -> None:
        if not self.has_work:
            self._loop = None
            return
        assert self._loop is not None
        try:
            step = self.step()
        except Exception as error:  # such as token ids that are no numbers: every reader must hear
            self._loop = None
            for request in self._readers:
                request.failure = error
                request.has_news.set()
            return
        self._step_ends += step.duration_s / self._speed
        # what else is due at that time comes first, and so is part of the next step
        self._loop.call_at(self._step_ends, self._loop.call_soon, self._end_step, step)

    def _end_step(self, step: BatchStep) -> None:
        for request in (*step.progressed, *step.finished):
            chunk = request.chunk_tokens or len(request.answer)
            request.generated = min(request.generated + chunk, len(request.answer))
            request.has_news.set()
        self._begin_step()
