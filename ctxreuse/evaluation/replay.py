"""Planning a whole trace, as an application would have: request by request, or as one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

from ctxreuse.blocks import ContextRequest
from ctxreuse.evaluation.planfile import PlannedRequest
from ctxreuse.evaluation.traces import TraceRequest
from ctxreuse.planner import ReusePlanner, Strategy
from ctxreuse.plans import Plan

Mode: TypeAlias = Literal["online", "offline"]
ANSWER = "OK."
"""What every turn of a replayed conversation is answered."""


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
    if mode == "offline" and strategy != "none":
        planned = _offline(trace, planner, strategy, conversations)
    else:
        planned = _online(trace, planner, strategy, conversations)
    result = []
    for request in planned:
        advance()
        result.append(request)
    return result


class _Replay:
    """The histories of the conversations that are replayed."""

    def __init__(self, conversations: bool) -> None:
        self._conversations = conversations
        self._history: dict[object, list[dict[str, Any]]] = {}
        self._last: dict[object, str | int] = {}

    def key(self, traced: TraceRequest) -> object | None:
        """Return the conversation that a request is a turn of, if it counts as one."""
        if not self._conversations or traced.conversation_id is None:
            return None
        return (traced.tenant, traced.conversation_id)

    def request(self, traced: TraceRequest) -> ContextRequest:
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

    def answer(self, traced: TraceRequest, plan: Plan) -> PlannedRequest:
        """Take a plan as sent and answered."""
        key = self.key(traced)
        after = None if key is None else self._last.get(key)
        if key is not None:
            self._last[key] = traced.request_id
            history = self._history.setdefault(key, [])
            history.append({"role": "user", "content": plan.content})
            history.append({"role": "assistant", "content": ANSWER})
        return PlannedRequest.of(plan, traced.turn, after)


def _online(
    trace: Sequence[TraceRequest],
    planner: ReusePlanner,
    strategy: Strategy,
    conversations: bool,
) -> Iterator[PlannedRequest]:
    replay = _Replay(conversations)
    for traced in trace:
        yield replay.answer(traced, planner.plan(replay.request(traced), strategy))


def _offline(
    trace: Sequence[TraceRequest],
    planner: ReusePlanner,
    strategy: Strategy,
    conversations: bool,
) -> Iterator[PlannedRequest]:
    replay = _Replay(conversations)
    first_turns: list[TraceRequest] = []
    later_turns: dict[object, list[TraceRequest]] = {}
    for traced in trace:
        key = replay.key(traced)
        if key is None:
            first_turns.append(traced)
        elif key in later_turns:
            later_turns[key].append(traced)
        else:
            first_turns.append(traced)
            later_turns[key] = []
    batch = planner.plan_batch([replay.request(traced) for traced in first_turns], strategy)
    for position, plan in zip(batch.order, batch.plans, strict=True):
        first = first_turns[position]
        yield replay.answer(first, plan)
        for traced in later_turns.get(replay.key(first), ()):
            yield replay.answer(traced, planner.plan(replay.request(traced), strategy))
