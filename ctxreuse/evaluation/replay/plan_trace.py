"""Planning a whole trace, as an application would have: request by request, or as one batch."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from ctxreuse.context.blocks import ContextBlock, ContextRequest
from ctxreuse.evaluation.replay.plan_file import PlannedRequest
from ctxreuse.evaluation.replay.policies import Mode, Policy
from ctxreuse.evaluation.traces.trace_files import TraceRequest
from ctxreuse.planner import ReusePlanner, Strategy
from ctxreuse.planning.plan import Plan

Replayed: TypeAlias = Generator[tuple[TraceRequest, Plan], str | None, None]
"""Yields each request with its plan when it is its turn, and is sent what it was answered."""

ANSWER = "OK."
"""What every turn of a replayed conversation is answered where there is no model."""


def plan_trace(
    trace: Sequence[TraceRequest],
    planner: ReusePlanner,
    mode: Mode,
    strategy: Strategy = "reuse",
    *,
    conversations: bool = False,
    advance: Callable[[], object] = lambda: None,
) -> list[PlannedRequest]:
    """Plan the requests of a trace.

    Args:
        trace: The requests in arrival order.
        planner: Plans them; a fresh one for a fresh cache.
        mode: "online" plans each request as it arrives, "offline" all of them as one batch.
        strategy: "reuse", "paper" or "none".
        conversations: Whether turns stand behind the history of their conversation, each turn
            answered with "OK."; otherwise each request is planned on its own.
        advance: Called once a request, for progress bars.

    Returns:
        The planned requests in execution order. Offline, the first turns are one batch and each
        conversation runs to its end behind its first turn.
    """
    policy = Policy(strategy, strategy, mode)
    return plan_under(policy, trace, planner, conversations=conversations, advance=advance)


def plan_under(
    policy: Policy,
    trace: Sequence[TraceRequest],
    planner: ReusePlanner,
    *,
    conversations: bool = False,
    advance: Callable[[], object] = lambda: None,
) -> list[PlannedRequest]:
    """Plan the requests of a trace under a policy; see `plan_trace`."""
    last: dict[object, str | int] = {}
    planned: list[PlannedRequest] = []
    for traced, plan in _answered(replayed(policy, trace, planner, conversations=conversations)):
        key = _conversation(traced) if conversations else None
        planned.append(PlannedRequest.of(plan, traced.turn, last.get(key)))
        if key is not None:
            last[key] = traced.request_id
        advance()
    return planned


def replayed(
    policy: Policy,
    trace: Sequence[TraceRequest],
    planner: ReusePlanner,
    *,
    conversations: bool = False,
) -> Replayed:
    """Yield each request of a trace with its plan, in execution order.

    Each is answered before the next is planned: what is sent to the generator stands in the history
    of the conversation's next turn. None says that there is no answer; the conversation ends there.

    Args:
        policy: How they are planned.
        trace: The requests in arrival order.
        planner: Plans them; a fresh one for a fresh cache.
        conversations: Whether turns stand behind the history of their conversation.
    """
    histories = _Histories(conversations)
    is_batch = policy.mode == "offline" and policy.strategy != "none"
    for traced, planned in (_offline if is_batch else _online)(policy, trace, planner, histories):
        plan = planned if traced.ranked is None else _annotated(planned, traced.ranked)
        answer = yield traced, plan
        histories.record(traced, plan, answer)


def _annotated(plan: Plan, ranked: Sequence[ContextBlock]) -> Plan:
    """Return a plan that tells the retriever's ranking of blocks that stand in another order."""
    keys = list(dict.fromkeys(block.key for block in ranked))
    if plan.request.history or keys == list(plan.request.unique_blocks):
        return plan
    label_of = plan.label_of
    words = plan.templates.order_annotation([label_of[key] for key in keys])
    return replace(plan, order_annotation=words)


class _Histories:
    """The histories of the conversations that are replayed."""

    def __init__(self, conversations: bool) -> None:
        self._conversations = conversations
        self._history: dict[object, list[dict[str, Any]]] = {}
        self._ended: set[object] = set()

    def key(self, traced: TraceRequest) -> object | None:
        """Return the conversation that a request is a turn of, if it counts as one."""
        return _conversation(traced) if self._conversations else None

    def has_ended(self, traced: TraceRequest) -> bool:
        """Return whether an earlier turn of the conversation has no answer."""
        return self.key(traced) in self._ended

    def request(self, traced: TraceRequest) -> ContextRequest:
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
        """Take a plan as sent and answered."""
        key = self.key(traced)
        if key is None:
            return
        if answer is None:
            self._ended.add(key)
            return
        history = self._history.setdefault(key, [])
        history.append({"role": "user", "content": plan.content})
        history.append({"role": "assistant", "content": answer})


_Steps: TypeAlias = Iterator[tuple[TraceRequest, Plan]]


def _online(
    policy: Policy, trace: Sequence[TraceRequest], planner: ReusePlanner, histories: _Histories
) -> _Steps:
    for traced in trace:
        if not histories.has_ended(traced):
            yield traced, planner.plan(histories.request(traced), policy.strategy)


def _offline(
    policy: Policy, trace: Sequence[TraceRequest], planner: ReusePlanner, histories: _Histories
) -> _Steps:
    first_turns: list[TraceRequest] = []
    later_turns: dict[object, list[TraceRequest]] = {}
    for traced in trace:
        key = histories.key(traced)
        if key is None:
            first_turns.append(traced)
        elif key in later_turns:
            later_turns[key].append(traced)
        else:
            first_turns.append(traced)
            later_turns[key] = []
    requests = [histories.request(traced) for traced in first_turns]
    batch = planner.plan_batch(requests, policy.strategy)
    if policy.is_scheduled:
        for position, plan in zip(batch.order, batch.plans, strict=True):
            first = first_turns[position]
            yield first, plan
            yield from _online(
                policy, later_turns.get(histories.key(first), ()), planner, histories
            )
        return
    firsts = iter(batch.in_input_order())
    later = {id(traced) for turns in later_turns.values() for traced in turns}
    for traced in trace:
        if id(traced) in later:
            yield from _online(policy, (traced,), planner, histories)
        else:
            yield traced, next(firsts)


def _answered(plans: Replayed) -> _Steps:
    try:
        one = next(plans)
        while True:
            yield one
            one = plans.send(ANSWER)
    except StopIteration:
        return


def _conversation(traced: TraceRequest) -> object | None:
    if traced.conversation_id is None:
        return None
    return (traced.tenant, traced.conversation_id)
