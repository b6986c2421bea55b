"""Runs on a real engine: what it had cached, when the first token came, what it answered.

Runs that are compared take turns, some requests each, and begin in turn, so that a slow phase of
the machine meets all of them alike. Each has a `cache_salt`, so it finds an empty cache; they share
the room in it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress, count
from operator import attrgetter
from typing import Self
from uuid import uuid4

from ctxreuse.cache import CacheUsage
from ctxreuse.errors import EngineError, InvalidRequestError, shown_url
from ctxreuse.measure.replay.plan_file import PlannedRequest, by_conversation, replayed
from ctxreuse.measure.replay.simulate import Run, RunResult, net_of_primes
from ctxreuse.measure.traces.trace_files import TraceRequest
from ctxreuse.planner import ReusePlanner
from ctxreuse.planning.plan import Plan
from ctxreuse.rules.cache_rules import DEFAULT_CACHE, CacheRules
from ctxreuse.serving import EngineClient

TOO_LONG = "longer than the model's context"

_A_TURN = 4  # requests of a run, for each conversation at a time

_WARM_UP = [{"role": "user", "content": "Hello. " * 100}]  # longer than a block of any cache


@dataclass(slots=True)
class LiveEngine:
    """A server that runs are measured on; a context manager."""

    base_url: str = field(repr=False)
    model: str | None
    api_key: str = field(repr=False)
    answer_tokens: int
    advance: Callable[[], object]  # called twice a request and run
    cache: CacheRules = DEFAULT_CACHE
    client: EngineClient = field(init=False)  # learns whether the server tells of 0 cached tokens
    # the longest prompt with its answer; None if the server does not say how long prompts are
    context_tokens: int | None = field(init=False, default=None)
    _runner: asyncio.Runner = field(init=False, default_factory=asyncio.Runner)

    def __post_init__(self) -> None:
        self.client = EngineClient(self.base_url, self.model, api_key=self.api_key)

    def __enter__(self) -> Self:
        """Send what nobody measures, because a server's first requests are slow."""
        try:
            self._runner.run(self._warm_up())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._runner.run(self.client.aclose())
        finally:
            self._runner.close()

    def measure(self, runs: Sequence[Run]) -> list[RunResult]:
        """Send the runs' requests; a conversation with a turn that is not answered ends there."""
        return self._runner.run(self._measure(runs))

    async def _warm_up(self) -> None:
        for _ in range(2):
            answer = await self.client.complete(_WARM_UP, max_tokens=1)
        if answer.cached_tokens is None:
            raise InvalidRequestError(
                f"the server at {shown_url(self.base_url)} does not say how many tokens it had "
                "cached; start vLLM with --enable-prompt-tokens-details, and with prefix caching"
            )
        try:
            await self.client.tokenize(_WARM_UP)
        except EngineError:
            return
        self.context_tokens = await self.client.context_window()

    async def _measure(self, runs: Sequence[Run]) -> list[RunResult]:
        measured = sending = [_Sending(self, run, run.planner(self.cache)) for run in runs]
        while sending:
            sending = [one for one in sending if await one.send_some()]
            sending = sending[1:] + sending[:1]
        return [one.result() for one in measured]


@dataclass(slots=True)
class _Sending:
    engine: LiveEngine
    run: Run
    planner: ReusePlanner
    # as many as are asked at a time; each sends some requests a step, by conversation
    lines: list[AsyncIterator[bool]] = field(init=False)
    salt: str = field(default_factory=lambda: uuid4().hex)
    planning_s: float = 0.0
    # with usage, seconds to the first token, and answer
    answered: list[tuple[PlannedRequest, CacheUsage, float, str]] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        requests, at_once = self.run.trace, self.run.at_once
        talks = by_conversation(requests, attrgetter("conversation_id"))
        waiting = iter([requests] if at_once == 1 else talks)
        self.lines = [self._send(waiting) for _ in range(at_once)]

    async def send_some(self) -> bool:
        """Send some requests, and plan the next ones; return whether there are any."""
        goes_on = await asyncio.gather(*(anext(one, False) for one in self.lines))
        self.lines = list(compress(self.lines, goes_on))
        return bool(self.lines)

    async def _send(self, waiting: Iterator[Sequence[TraceRequest]]) -> AsyncIterator[bool]:
        """Send what waits, one request after the other; yield behind some of them."""
        sent = count(1)
        for trace in waiting:
            plans = replayed(self.run.policy, trace, self.planner, conversations=True)
            while True:
                started = time.perf_counter()
                step = next(plans, None)
                self.planning_s += time.perf_counter() - started
                if step is None:
                    break
                step.answer = await self._answer(step.planned, step.plan)
                self.engine.advance()
                self.engine.advance()
                if not next(sent) % _A_TURN:
                    yield True

    def result(self) -> RunResult:
        for _ in range(2 * (len(self.run.trace) - len(self.answered) - self.failures.total())):
            self.engine.advance()  # for what conversations that ended early leave out
        columns = zip(*self.answered, strict=True) if self.answered else ((),) * 4
        planned, usages, first_token_s, answers = columns
        return RunResult.of_run(
            self.run,
            planned,
            usages,
            self.planning_s,
            notes=tuple(
                f"{self.run.policy.name}: {number:,} requests not answered: {reason}"
                for reason, number in self.failures.items()
            ),
            request_ids=tuple(str(one.request_id) for one in planned),
            first_token_s=first_token_s,
            answers=answers,
            failures=self.failures.total(),
        )

    async def _answer(self, planned: PlannedRequest, plan: Plan) -> str | None:
        client, longest = self.engine.client, self.engine.context_tokens
        most = self.engine.answer_tokens
        try:
            if longest is not None and len(await client.tokenize(plan)) + most > longest:
                raise EngineError(TOO_LONG)
            began = time.perf_counter()
            primes = await client.prime(plan, cache_salt=self.salt)
            primed_s = time.perf_counter() - began
            answer = await client.complete(
                plan, cache_salt=self.salt, max_tokens=most, temperature=0
            )
            if answer.prompt_tokens is None or answer.cached_tokens is None:
                raise EngineError("answered without a count of tokens")
        except EngineError as error:
            self.failures[str(error)] += 1
            self.planner.forget(plan)  # the server's cache does not hold it
            return None
        usage = net_of_primes(CacheUsage(answer.prompt_tokens, answer.cached_tokens), primes)
        seconds = round(primed_s + answer.time_to_first_token_s, 6)
        self.answered.append((planned, usage, seconds, answer.text))
        return answer.text
