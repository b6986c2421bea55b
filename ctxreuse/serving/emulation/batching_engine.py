"""An engine with continuous batching, step by step in emulated time: no clock, no model.

A step computes the prompts of requests that have just begun, as far as the step's budget goes, and
gives one token to each request whose prompt is computed. Requests begin in the order in which they
came, as soon as the cache has room for them, as in vLLM's scheduler.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from ctxreuse.cache.simulator import PrefixCacheSimulator, RunningPrompt
from ctxreuse.cache.usage import CacheUsage
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.serving.emulation.rates import COMMON_RATES, EngineRates


@dataclass(slots=True, eq=False)
class EngineRequest:
    """A request to a batching engine.

    Args:
        tokens: The prompt's token ids.
        answer: The token ids that the model will say, at least one.
        salt: vLLM's `cache_salt`.
        chunk_tokens: After how many tokens of the answer, each time, a step says that it has
            progressed; None says nothing before the end.

    Raises:
        InvalidRequestError: If `chunk_tokens` is less than 1.

    Attributes:
        usage: The prompt's tokens and how many came from the cache; None until it begins.
        running: Its hold on the cache, while it runs.
        to_prefill: Prompt tokens that are still to be computed.
        was_aborted: Whether the client has left.
    """

    tokens: Sequence[int]
    answer: Sequence[int]
    salt: str = ""
    chunk_tokens: int | None = None
    usage: CacheUsage | None = field(default=None, init=False)
    running: RunningPrompt | None = field(default=None, init=False)
    to_prefill: int = field(default=0, init=False)
    was_aborted: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        chunk = self.chunk_tokens
        if chunk is not None and (not isinstance(chunk, int) or chunk < 1):
            raise InvalidRequestError(
                f"chunk_tokens must be an integer from 1 or None, not {describe(chunk)}"
            )


@dataclass(frozen=True, slots=True)
class Step:
    """What a step did.

    Attributes:
        duration_s: How long it took, in seconds.
        finished: Requests whose answer ended with it, in the order in which they began.
        progressed: Requests whose answer grew by a whole chunk with it and goes on, in that order.
    """

    duration_s: float
    finished: tuple[EngineRequest, ...]
    progressed: tuple[EngineRequest, ...] = ()


class _Answering(NamedTuple):
    """A request that gets a token a step, ordered by when there is something to tell of it."""

    next_step: int
    number: int
    last_step: int
    request: EngineRequest

    @classmethod
    def after(cls, step: int, number: int, last_step: int, request: EngineRequest) -> _Answering:
        """Return it with the end of its next chunk, or of its answer."""
        chunk = request.chunk_tokens
        following = last_step if chunk is None else min(step + chunk, last_step)
        return cls(following, number, last_step, request)


class BatchingEngine:
    """Runs requests together, step by step.

    Args:
        cache: The engine's prefix cache.
        rates: How long a step takes.
        max_running: Requests that run at a time (vLLM's `max_num_seqs`).
        max_step_tokens: Prompt tokens computed in a step (vLLM's `max_num_batched_tokens`).

    Attributes:
        usage: Tokens of all prompts that have begun, and how many were cached.
        generated_tokens: Tokens of all answers, also of those that were left.

    Raises:
        InvalidRequestError: If a bound is less than 1.

    Example:
        >>> engine = BatchingEngine(PrefixCacheSimulator())
        >>> engine.submit(EngineRequest(tokens=range(1_000), answer=[1, 2]))
        >>> [round(engine.step().duration_s, 5) for _ in range(2)]  # prefill and a token; a token
        [0.11015, 0.01015]
        >>> engine.has_work
        False
    """

    def __init__(
        self,
        cache: PrefixCacheSimulator,
        rates: EngineRates = COMMON_RATES,
        *,
        max_running: int = 256,
        max_step_tokens: int = 8_192,
    ) -> None:
        for name, value in (("max_running", max_running), ("max_step_tokens", max_step_tokens)):
            if not isinstance(value, int) or value < 1:
                raise InvalidRequestError(
                    f"{name} must be an integer from 1, not {describe(value)}"
                )
        self.usage = CacheUsage()
        self.generated_tokens = 0
        self._cache = cache
        self._rates = rates
        self._max_running = max_running
        self._max_step_tokens = max_step_tokens
        self._waiting: deque[EngineRequest] = deque()
        self._prefilling: deque[EngineRequest] = deque()
        self._decoding: list[_Answering] = []  # a heap
        self._numbers = count()
        self._step = 0

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._waiting or self._prefilling or self._decoding)

    def submit(self, request: EngineRequest) -> None:
        """Let a request wait for its turn.

        Raises:
            InvalidRequestError: If it asks for no answer, or not even an empty cache holds it.
        """
        if not request.answer:
            raise InvalidRequestError("an answer must have at least one token")
        if not self._cache.fits(len(request.tokens), len(request.answer)):
            raise InvalidRequestError(
                f"a prompt of {len(request.tokens)} tokens with its answer is larger than the cache"
            )
        self._waiting.append(request)

    def abort(self, request: EngineRequest) -> None:
        """Stop a request, whose client has left; what was computed of it stays in the cache."""
        request.was_aborted = True
        if request in self._waiting:
            self._waiting.remove(request)
        if request in self._prefilling:
            self._prefilling.remove(request)
        left = [one for one in self._decoding if one.request is not request]
        if len(left) < len(self._decoding):
            heapq.heapify(left)
            self._decoding = left
        self._leave_cache(request, ())

    def step(self) -> Step:
        """Run one step; one without work takes no time."""
        budget = self._max_step_tokens
        while self._prefilling and budget:
            budget -= self._prefill(self._prefilling[0], budget)
            if self._prefilling[0].to_prefill:
                break
            self._decode(self._prefilling.popleft())
        while self._waiting and budget and not self._prefilling:
            running = len(self._decoding) + len(self._prefilling)
            if running >= self._max_running or not self._begin(self._waiting[0]):
                break
            request = self._waiting.popleft()
            budget -= self._prefill(request, budget)
            if request.to_prefill:
                self._prefilling.append(request)
            else:
                self._decode(request)
        duration_s = self._rates.step_s(self._max_step_tokens - budget, len(self._decoding))
        self._step += 1
        self.generated_tokens += len(self._decoding)
        finished, progressed = [], []
        while self._decoding and self._decoding[0].next_step <= self._step:
            _, number, last, request = self._decoding[0]
            if last <= self._step:
                heapq.heappop(self._decoding)
                self._leave_cache(request, request.answer)
                finished.append(request)
            else:
                again = _Answering.after(self._step, number, last, request)
                heapq.heapreplace(self._decoding, again)
                progressed.append(request)
        return Step(duration_s, tuple(finished), tuple(progressed))

    def quiet_steps(self) -> tuple[int, float]:
        """Return how many of the next steps tell nobody anything, and how long each takes.

        That holds as long as no request comes or goes.
        """
        if self._waiting or self._prefilling or not self._decoding:
            return 0, 0.0
        steps = self._decoding[0].next_step - self._step - 1
        return steps, self._rates.step_s(0, len(self._decoding))

    def skip(self, steps: int) -> None:
        """Run so many quiet steps at once."""
        self._step += steps
        self.generated_tokens += steps * len(self._decoding)

    def _begin(self, request: EngineRequest) -> bool:
        request.running = self._cache.start(
            request.tokens, request.salt, room_for=len(request.answer)
        )
        if request.running is None:
            return False
        request.usage = request.running.usage
        request.to_prefill = request.usage.prefilled_tokens
        self.usage += request.usage
        return True

    def _prefill(self, request: EngineRequest, budget: int) -> int:
        tokens = min(budget, request.to_prefill)
        request.to_prefill -= tokens
        return tokens

    def _decode(self, request: EngineRequest) -> None:
        last = self._step + len(request.answer)
        one = _Answering.after(self._step, next(self._numbers), last, request)
        heapq.heappush(self._decoding, one)

    def _leave_cache(self, request: EngineRequest, answer: Sequence[int]) -> None:
        if request.running is not None:
            self._cache.finish(request.running, answer, uncomputed=request.to_prefill)
            request.running = None
