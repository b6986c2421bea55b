"""Plans of a whole trace, as an application would make them, and as JSON lines in that order.

A line holds ids, labels and words, never a document's text: `request_id`, `blocks` (ids to send, in
order), `references` (ids left out), `order_annotation`, `parts` (what the message shows, in order:
`[label, id]` for a block, `[label, id, words]` for a reference), `is_labelled` (whether it shows
these labels), `query`, `system`, `tenant`, `conversation_id`, `turn`, `after` (the request whose
prompt and answer stand before this one), `expected_cached_tokens`, `timestamp` (of its arrival,
in milliseconds) where the trace has it, and `marks` where it is planned for a cache that keeps
marked prefixes only: after how many of its `blocks` a mark stands, ascending; 0 is behind the
system text. `primes` are after how many of them a call ends that is sent before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ctxreuse.context.blocks import BlockId, ContextRequest
from ctxreuse.context.rendering import Notice, Reference
from ctxreuse.errors import InputFileError, describe
from ctxreuse.measure.replay.policies import MeasuredPolicy
from ctxreuse.measure.traces.json_lines import JsonLine, read_lines
from ctxreuse.measure.traces.sent_calls import SentCall
from ctxreuse.measure.traces.trace_files import TraceRequest, request_fields
from ctxreuse.planner import ReusePlanner
from ctxreuse.planning.plan import Plan
from ctxreuse.rules.answers import recorded_marks

_OF_REQUEST = ("query", "system", "tenant", "conversation_id")
_FIELDS = (
    *("request_id", "blocks", "references", "order_annotation", "parts", "is_labelled"),
    *(*_OF_REQUEST, "turn", "after", "expected_cached_tokens"),
)
MOST_TURNS = 10_000  # of a conversation in a file; each repeats what stands before it

PlannedPart = tuple[str, BlockId, str | None]  # label, id, location annotation if left out


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A plan without its texts; `place` is its file and line, `timestamp_ms` its arrival."""

    request_id: str | int
    parts: tuple[PlannedPart, ...]
    order_annotation: str | None = None
    query: str = ""
    system: str | None = None
    tenant: str = ""
    conversation_id: str | int | None = None
    turn: int = 0
    after: str | int | None = None
    expected_cached_tokens: int | None = None
    place: str = "plan"
    timestamp_ms: float | None = None
    is_labelled: bool = True
    marks: tuple[int, ...] | None = None
    primes: tuple[int, ...] = ()
    sent: SentCall | None = None

    @classmethod
    def of(cls, plan: Plan, traced: TraceRequest, after: str | int | None) -> PlannedRequest:
        """Return the record of a traced request's plan."""
        return cls(
            request_id=plan.request_id,
            parts=tuple(
                (part.label, part.id, part.annotation)
                if isinstance(part, Reference)
                else (part.label, part.block.id, None)
                for part in plan.parts
                if not isinstance(part, Notice)
            ),
            order_annotation=plan.order_annotation,
            **{name: getattr(plan.request, name) for name in _OF_REQUEST},
            turn=traced.turn,
            after=after,
            expected_cached_tokens=plan.expected_cached_tokens,
            timestamp_ms=traced.timestamp_ms,
            is_labelled=plan.is_labelled,
            marks=recorded_marks(plan.cache, plan.marks),
            primes=plan.primes,
        )

    @classmethod
    def as_recorded(cls, traced: TraceRequest) -> PlannedRequest:
        """Return a recorded request as it was sent, without any plan."""
        names = (one.name for one in fields(cls))
        alike = {name: getattr(traced, name) for name in names if hasattr(traced, name)}
        parts = tuple(("", block.id, None) for block in traced.blocks)
        return cls(**alike | {"parts": parts, "place": "trace", "is_labelled": False})

    @property
    def blocks(self) -> list[BlockId]:
        """The ids of the blocks to send, in order."""
        return [block_id for _, block_id, annotation in self.parts if annotation is None]

    @property
    def references(self) -> list[BlockId]:
        """The ids of the blocks left out."""
        return [block_id for _, block_id, annotation in self.parts if annotation is not None]

    def as_json(self) -> dict[str, Any]:
        """Return the line as a JSON object."""
        parts = [[one for one in part if one is not None] for part in self.parts]
        timestamp = {} if self.timestamp_ms is None else {"timestamp": self.timestamp_ms}
        marks = {} if self.marks is None else {"marks": list(self.marks)}
        primes = {"primes": list(self.primes)} if self.primes else {}
        fields = {name: getattr(self, name) for name in _FIELDS}
        return fields | {"parts": parts} | marks | primes | timestamp


def read_plan(path: str) -> list[PlannedRequest]:
    """Read a plan file."""
    return list(planned_requests(read_lines(path)))


def planned_requests(lines: Iterable[JsonLine]) -> Iterator[PlannedRequest]:
    """Yield the requests of a plan file's lines; see `read_plan`."""
    turns: dict[str | int, int] = {}  # of each request, with those that it continues
    for line in lines:
        parts = _parts(line)
        most = sum(annotation is None for *_, annotation in parts)
        request = PlannedRequest(
            parts=parts,
            order_annotation=line.get("order_annotation", (str,), None),
            after=line.get("after", (str, int), None),
            expected_cached_tokens=line.natural("expected_cached_tokens", None),
            place=line.place,
            is_labelled=line.get("is_labelled", (bool,), True)
            and line.fields.get("parts") is not None,
            marks=line.marks("marks", most),
            primes=line.marks("primes", most) or (),
            **request_fields(line),
        )
        if request.after is not None and request.after not in turns:
            line.fail(
                f"it continues request {request.after!r}, which does not stand before it; "
                "keep the lines in execution order"
            )
        turns[request.request_id] = 1 if request.after is None else turns[request.after] + 1
        if turns[request.request_id] > MOST_TURNS:
            line.fail(
                f"it continues a conversation of {MOST_TURNS:,} turns; end the conversation "
                "before it, and begin another"
            )
        yield request


def _parts(line: JsonLine) -> tuple[PlannedPart, ...]:
    if line.fields.get("parts") is None:
        return tuple(("", block_id, None) for block_id in line.ids("blocks"))
    parts: list[PlannedPart] = []
    for part in line.get("parts", (list,)):
        match part:
            case [str(label), str() | int() as block_id] if not isinstance(block_id, bool):
                parts.append((label, block_id, None))
            case [str(label), str() | int() as block_id, str(words)]:
                parts.append((label, block_id, words))
            case _:
                line.fail("field 'parts' must hold [label, id] or [label, id, words]")
    return tuple(parts)


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
        step = ReplayedStep(PlannedRequest.of(plan, traced, after), plan)
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
        key = self.key(traced)
        if key is not None and answer is None:
            self._ended.add(key)
        elif key is not None:
            self.last[key] = traced.request_id
            history = self._history.setdefault(key, [])
            history.append({"role": "user", "content": plan.content})
            history.append({"role": "assistant", "content": answer})

    def one_by_one(self, trace: Sequence[TraceRequest]) -> Iterator[tuple[TraceRequest, Plan]]:
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
