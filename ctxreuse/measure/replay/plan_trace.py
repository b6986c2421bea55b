"""Plans a whole trace as an application would: request by request, or as one batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ctxreuse.context.blocks import ContextRequest
from ctxreuse.errors import InputFileError, describe
from ctxreuse.measure.replay.plan_file import MOST_TURNS, PlannedRequest
from ctxreuse.measure.replay.policies import MeasuredPolicy
from ctxreuse.measure.traces.trace_files import TraceRequest
from ctxreuse.planner import ReusePlanner
from ctxreuse.planning.plan import Plan


@dataclass(slots=True)
class ReplayedStep:
    """A request of a replay; who replays gives its answer before the next one is planned."""

    planned: PlannedRequest
    plan: Plan
    answer: str | None = None


ANSWER = "OK."  # the answer to every turn of a replayed conversation where there is no model


def plan_under(
    policy: MeasuredPolicy,
    trace: Sequence[TraceRequest],
    planner: ReusePlanner,
    *,
    conversations: bool = False,
    advance: Callable[[], object] = lambda: None,
) -> list[PlannedRequest]:
    """Plan the requests of a trace under a policy."""
    planned: list[PlannedRequest] = []
    for step in replayed(policy, trace, planner, conversations=conversations):
        step.answer = ANSWER
        planned.append(step.planned)
        advance()
    return planned


def replayed(
    policy: MeasuredPolicy,
    trace: Sequence[TraceRequest],
    planner: ReusePlanner,
    *,
    conversations: bool = False,
) -> Iterator[ReplayedStep]:
    """Yield the plan of each request of a trace, in execution order."""
    replay = _PlannedTrace(policy, planner, conversations)
    for key, turns in Counter(map(replay.key, trace)).items():
        if key is not None and turns > MOST_TURNS:
            raise InputFileError(
                f"conversation {describe(key[1])} has more than {MOST_TURNS:,} turns in the trace; "
                "give some of them another conversation_id"
            )
    is_batch = policy.mode == "offline" and policy.strategy != "none"
    for traced, plan in (replay.together if is_batch else replay.one_by_one)(trace):
        after = replay.last.get(replay.key(traced))
        step = ReplayedStep(PlannedRequest.of(plan, traced.turn, after, traced.timestamp_ms), plan)
        yield step
        replay.record(traced, plan, step.answer)


class _PlannedTrace:
    """A policy's plans, and the histories of the conversations that are replayed."""

    def __init__(self, policy: MeasuredPolicy, planner: ReusePlanner, conversations: bool) -> None:
        self._policy = policy
        self._planner = planner
        self._conversations = conversations
        self._history: dict[object, list[dict[str, Any]]] = {}
        self.last: dict[object, str | int] = {}  # the request that each history ends with
        self._ended: set[object] = set()  # conversations of which a turn has no answer

    def key(self, traced: TraceRequest) -> tuple[str, str | int] | None:
        """Return the conversation that a request is a turn of, if conversations are replayed."""
        if traced.conversation_id is None or not self._conversations:
            return None
        return (traced.tenant, traced.conversation_id)

    def _request(self, traced: TraceRequest) -> ContextRequest:
        """Return a request as it stands behind its history."""
        key = self.key(traced)
        return ContextRequest(
            blocks=traced.blocks,
            query=traced.query,
            system=traced.system,
            history=None if key is None else self._history.get(key, []),
            conversation_id=None if key is None else traced.conversation_id,
            tenant=traced.tenant,
            request_id=traced.request_id,
        )

    def record(self, traced: TraceRequest, plan: Plan, answer: str | None) -> None:
        """Note that a plan was sent, and its answer."""
        key = self.key(traced)
        if key is not None and answer is None:
            self._ended.add(key)
        elif key is not None:
            self.last[key] = traced.request_id
            history = self._history.setdefault(key, [])
            history.append({"role": "user", "content": plan.content})
            history.append({"role": "assistant", "content": answer})

    def one_by_one(self, trace: Sequence[TraceRequest]) -> Iterator[tuple[TraceRequest, Plan]]:
        """Yield the plans of requests that arrive one after the other."""
        strategy, primes = self._policy.strategy, self._policy.is_primed
        for traced in trace:
            if self.key(traced) not in self._ended:
                now = None if traced.timestamp_ms is None else traced.timestamp_ms / 1000
                request = self._request(traced)
                yield traced, self._planner.plan(request, strategy, now=now, primes=primes)

    def together(self, trace: Sequence[TraceRequest]) -> Iterator[tuple[TraceRequest, Plan]]:
        """Yield the plans of a batch: of the first turns; later ones follow one by one."""
        policy, talks = self._policy, by_conversation(trace, self.key)
        firsts = [turns[0] for turns in talks]
        requests = [self._request(traced) for traced in firsts]
        batch = self._planner.plan_batch(requests, policy.strategy, primes=policy.is_primed)
        planned = {id(firsts[at]): plan for at, plan in zip(batch.order, batch.plans, strict=True)}
        if policy.is_scheduled:
            trace = [traced for at in batch.order for traced in talks[at]]
        for traced in trace:
            if id(traced) in planned:
                yield traced, planned[id(traced)]
            else:
                yield from self.one_by_one((traced,))


def by_conversation(
    trace: Sequence[TraceRequest], key: Callable[[TraceRequest], object]
) -> list[list[TraceRequest]]:
    """Return the requests of each conversation, as the trace begins them; others are alone."""
    talks: dict[object, list[TraceRequest]] = {}
    for traced in trace:
        name = key(traced)
        talks.setdefault(("alone", id(traced)) if name is None else name, []).append(traced)
    return list(talks.values())
