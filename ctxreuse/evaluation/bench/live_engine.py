"""Trials on a real engine: what it had cached, when the first token came, what it answered."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias
from uuid import uuid4

from ctxreuse.cache import CacheUsage
from ctxreuse.errors import BatchTooLargeError, EngineError, InvalidRequestError
from ctxreuse.evaluation.bench.trials import Part, Trial, Tried
from ctxreuse.evaluation.replay.outcomes import Outcome
from ctxreuse.evaluation.replay.plan_file import PlannedRequest
from ctxreuse.evaluation.replay.plan_trace import Replayed, replayed
from ctxreuse.evaluation.results.answers import exact_match, token_f1
from ctxreuse.evaluation.results.runs import Run
from ctxreuse.evaluation.traces.trace_files import TraceRequest
from ctxreuse.planner import ReusePlanner
from ctxreuse.planning.plan import Plan
from ctxreuse.serving import EngineClient

TOO_LONG = "longer than the model's context"

_WARM_UP = [{"role": "user", "content": "Hello. " * 100}]
"""Longer than a block of any engine's cache."""

_Step: TypeAlias = tuple[TraceRequest, Plan] | None


@dataclass(frozen=True, slots=True)
class LiveEngine:
    """A server that is asked.

    Attributes:
        base_url: Its address.
        model: The model that answers; None for the server's first.
        api_key: Its key.
        answer_tokens: The longest answer.
        references: Request -> right answers, where they are known.
    """

    base_url: str
    model: str | None
    api_key: str
    answer_tokens: int
    references: Mapping[str, Sequence[str]]

    def run(self, trials: Sequence[Trial], advance: Callable[[], object]) -> Iterator[Tried]:
        """Yield what comes of each trial.

        Each has a `cache_salt` of its own, so that it finds an empty cache. Requests are sent one
        after the other; where conversations take turns, so many at a time. A conversation with a
        turn that is not answered ends there.

        Args:
            trials: What is tried.
            advance: Called twice a request and trial.

        Raises:
            EngineError: If the server does not answer at all.
            InvalidRequestError: If it does not say what it had cached.
        """
        with asyncio.Runner() as runner:
            # one client for all trials: it learns whether the server tells of 0 cached tokens
            client = EngineClient(self.base_url, self.model, api_key=self.api_key)
            try:
                context_tokens = runner.run(self._warm_up(client))
                for trial in trials:
                    yield runner.run(self._try(trial, client, context_tokens, advance))
            finally:
                runner.run(client.aclose())

    async def _warm_up(self, client: EngineClient) -> int | None:
        """Send what nobody measures, for a server's first requests are slow.

        Returns:
            The tokens of the longest prompt with its answer; None if the server does not tell that,
            or not how long prompts are.

        Raises:
            InvalidRequestError: If it does not say what it had cached.
        """
        for _ in range(2):
            answer = await client.complete(_WARM_UP, max_tokens=1)
        if answer.cached_tokens is None:
            raise InvalidRequestError(
                f"the server at {self.base_url} does not say how many tokens it had cached; "
                "start vLLM with --enable-prompt-tokens-details, and with prefix caching"
            )
        try:
            await client.tokenize(_WARM_UP)
        except EngineError:
            return None
        return await client.context_window()

    async def _try(
        self,
        trial: Trial,
        client: EngineClient,
        context_tokens: int | None,
        advance: Callable[[], object],
    ) -> Tried:
        trace, arranging_ms, wrong = trial.trace, 0.0, 0
        if trial.contender.arrange is not None:
            arranged = trial.contender.arrange(trace, trial.deduplicate)
            trace, arranging_ms, wrong = arranged.trace, arranged.planning_ms, arranged.wrong
        planner = trial.contender.policy.planner(
            deduplicate=trial.deduplicate, capacity_tokens=trial.capacity_tokens
        )
        groups, workers = [list(trace)], 1
        if trial.part is Part.sessions and trial.sessions is not None:
            groups, workers = _conversations(trace), trial.sessions
        asker = _Asker(client, planner, self, context_tokens, advance)
        waiting = iter(groups)

        async def work() -> None:
            for group in waiting:
                await asker.converse(trial, group)

        try:
            await asyncio.gather(*(work() for _ in range(workers)))
        except BatchTooLargeError:
            return Tried(trial, None)
        for _ in range(2 * len(trace) - asker.advanced):
            advance()
        return asker.tried(trial, arranging_ms, wrong)


@dataclass(slots=True)
class _Asker:
    """Asks under one policy, and notes what comes."""

    client: EngineClient
    planner: ReusePlanner
    engine: LiveEngine
    context_tokens: int | None
    advance: Callable[[], object]
    salt: str = field(default_factory=lambda: uuid4().hex)
    advanced: int = 0
    planning_s: float = 0.0
    planned: list[PlannedRequest] = field(default_factory=list)
    usages: list[CacheUsage] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    scores: list[tuple[str, float, float]] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)

    async def converse(self, trial: Trial, trace: Sequence[TraceRequest]) -> None:
        """Send requests one after the other."""
        last: dict[object, str | int] = {}
        plans = replayed(trial.contender.policy, trace, self.planner, conversations=True)
        step = self._timed(lambda: next(plans, None))
        while step is not None:
            traced, plan = step
            answer = await self._answer(plan)
            if answer is not None:
                key = traced.conversation_id
                after = None if key is None else last.get(key)
                self.planned.append(PlannedRequest.of(plan, traced.turn, after))
                if key is not None:
                    last[key] = traced.request_id
            self.advanced += 2
            self.advance()
            self.advance()
            step = self._timed(partial(_sent, plans, answer))

    def _timed(self, step: Callable[[], _Step]) -> _Step:
        started = time.perf_counter()
        taken = step()
        self.planning_s += time.perf_counter() - started
        return taken

    async def _answer(self, plan: Plan) -> str | None:
        """Return the model's answer; None if there is none."""
        most = self.engine.answer_tokens
        try:
            if self.context_tokens is not None:
                prompt = await self.client.tokenize(plan)
                if len(prompt) + most > self.context_tokens:
                    self._note_failure(plan, TOO_LONG)
                    return None
            answer = await self.client.complete(
                plan, cache_salt=self.salt, max_tokens=most, temperature=0
            )
        except EngineError as error:
            self._note_failure(plan, str(error))
            return None
        if answer.prompt_tokens is None or answer.cached_tokens is None:
            self._note_failure(plan, "answered without a count of tokens")
            return None
        self.usages.append(CacheUsage(answer.prompt_tokens, answer.cached_tokens))
        self.first_token_s.append(answer.time_to_first_token_s)
        right = self.engine.references.get(str(plan.request_id))
        if right:
            scored = token_f1(answer.text, right), exact_match(answer.text, right)
            self.scores.append((str(plan.request_id), *scored))
        return answer.text

    def _note_failure(self, plan: Plan, reason: str) -> None:
        self.failures[reason] += 1
        self.planner.evict([plan.request_id])  # the server's cache does not hold it

    def tried(self, trial: Trial, arranging_ms: float, wrong: int) -> Tried:
        """Return what came of a trial.

        Args:
            trial: What was tried.
            arranging_ms: What somebody else's order took, a request.
            wrong: Requests for which other blocks came back from there.
        """
        outcome = Outcome(
            policy=trial.contender.policy,
            deduplicated=trial.deduplicate,
            capacity_tokens=trial.capacity_tokens,
            planned=self.planned,
            usages=self.usages,
            planning_ms=arranging_ms or 1e3 * self.planning_s / max(1, len(self.planned)),
        )
        run = Run.of(
            outcome,
            part=trial.part.value,
            k=trial.k,
            sessions=trial.sessions,
            request_ids=tuple(str(one.request_id) for one in self.planned),
            first_token_s=tuple(round(seconds, 6) for seconds in self.first_token_s),
            scores=tuple(self.scores),
            failures=self.failures.total(),
        )
        return Tried(trial, run, outcome, wrong, self.failures)


def _sent(plans: Replayed, answer: str | None) -> tuple[TraceRequest, Plan] | None:
    """Say what the last request was answered; return the next one, or None."""
    try:
        return plans.send(answer)
    except StopIteration:
        return None


def _conversations(trace: Sequence[TraceRequest]) -> list[list[TraceRequest]]:
    groups: dict[object, list[TraceRequest]] = {}
    for traced in trace:
        key = traced.conversation_id
        groups.setdefault(("alone", traced.request_id) if key is None else key, []).append(traced)
    return list(groups.values())
