"""What in a recorded trace keeps a prefix cache from hitting, request by request and as sent.

Causes and their tokens are those of `ctxreuse explain`; what stands in front of the documents, the
marks and the shortest prefix are looked at besides. Work grows with the length of the trace.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from os.path import commonprefix
from typing import Final, TypeAlias

from ctxreuse.context.cache_profile import VLLM, CacheProfile
from ctxreuse.context.tokens import estimate_tokens
from ctxreuse.evaluation.doctor.varying_fronts import (
    Variation,
    front_text,
    front_variations,
    is_digest,
)
from ctxreuse.evaluation.lint.lint_report import LintFinding, LintReport
from ctxreuse.evaluation.replay.explain_plan import REMEDIES, explain_plan, shortened
from ctxreuse.evaluation.replay.plan_file import PlannedRequest
from ctxreuse.evaluation.replay.simulate import checked_trace
from ctxreuse.evaluation.traces.sent_calls import SentCall
from ctxreuse.evaluation.traces.trace_files import Corpus, TraceRequest, block_tokens
from ctxreuse.index.explain import Cause, Explanation

_OFTEN = 0.1
"""Share of the requests from which on other tools count as changing."""

_NEARLY = 0.8
"""Share of the shortest prefix from which on a prompt is just under it."""

_VOLATILE: Final = "volatile text in front"
_BY_CAUSE: Final = {
    Cause.other_order: "documents in changing order",
    Cause.other_text: "documents whose text changes",
    Cause.other_labels: "labels in some prompts only",
    Cause.other_system: "another system text",
    Cause.other_key: "another cache key",
    Cause.other_model: "another model",
    Cause.expired: "sent too late",
    Cause.never_written: "no mark where prompts fork",
}
"""Checks that are what `explain` says, by its causes."""


@dataclass(slots=True)
class _Request:
    """A request as it was sent.

    Attributes:
        number: Which of the trace it is, from 1.
        traced: Its line.
        explanation: Why it hits or misses.
        sent: How it was sent; empty where that is not known.
        front_tokens: Tokens of tools and system text.
        prompt_tokens: Tokens of the whole prompt.
        front_again: As many of `front_tokens` as an earlier request had in front, too.
    """

    number: int
    traced: TraceRequest
    explanation: Explanation
    sent: SentCall
    front_tokens: int
    prompt_tokens: int
    front_again: int = 0

    @property
    def front(self) -> Hashable:
        """What stands in front of the documents."""
        return (self.root, self.sent.tools, self.traced.system)

    @property
    def root(self) -> Hashable:
        """What is the same for all requests that could share a prefix."""
        return (self.traced.tenant, self.sent.model)

    def lost(self, *causes: Cause) -> int:
        """Return the block tokens that are computed again, if that is for one of some causes."""
        return self.explanation.lost_tokens if self.explanation.cause in causes else 0


@dataclass(slots=True)
class _Tally:
    """What one check finds, request by request."""

    requests: int = 0
    tokens: int = 0
    worst: _Request | None = None
    _most: int = -1
    ids: set[int] = field(default_factory=set)

    def add(self, one: _Request, tokens: int) -> None:
        self.requests += 1
        self.tokens += tokens
        self.ids.add(one.number)
        if tokens > self._most:
            self.worst, self._most = one, tokens


@dataclass(frozen=True, slots=True)
class _Trace:
    """What the checks look at."""

    requests: Sequence[_Request]
    cache: CacheProfile

    @property
    def is_hosted(self) -> bool:
        """Whether the cache has a shortest prefix and charges by the token."""
        return self.cache.granularity != "blocks"

    def finding(
        self, check: str, tally: _Tally, found: str, remedy: str, factor: float | None = None
    ) -> LintFinding:
        """Return what a check has found.

        Args:
            check: Its name.
            tally: The requests that show it.
            found: What was found.
            remedy: What to do.
            factor: What each token costs too much; None is the difference to a token that is read.
        """
        one = tally.worst
        assert one is not None, "a finding has a request"
        cost = tally.tokens * (1 - self.cache.read_factor if factor is None else factor)
        total = sum(one.prompt_tokens for one in self.requests)
        return LintFinding(
            check=check,
            request_id=one.traced.request_id,
            number=one.number,
            label=shortened(" ".join(one.traced.query.split())),
            requests=tally.requests,
            found=found,
            tokens=tally.tokens,
            cost_tokens=round(cost),
            share=cost / total if total else 0.0,
            remedy=remedy,
        )


def lint(trace: Sequence[TraceRequest], corpus: Corpus, cache: CacheProfile = VLLM) -> LintReport:
    """Return what in a trace keeps a prefix cache from hitting, the most expensive first.

    Args:
        trace: The requests in the order in which they were sent.
        corpus: Their blocks.
        cache: The rules of the cache.

    Raises:
        InputFileError: A request names a block that the corpus lacks.
        InvalidRequestError: wrong type.
    """
    trace = checked_trace(trace)
    explained = explain_plan(list(_as_sent(trace)), corpus, cache=cache)
    requests = []
    seen = set[Hashable]()
    for number, (traced, one) in enumerate(zip(trace, explained, strict=True), start=1):
        request = _request(number, traced, one.explanation)
        if request.front in seen:
            request.front_again = request.front_tokens
        seen.add(request.front)
        requests.append(request)
    looked_at = _Trace(requests, cache)
    findings = [one for check in _CHECKS for one in check(looked_at)]
    findings.sort(key=lambda one: (one.check != _TOO_MANY, -one.cost_tokens, one.check))
    total = sum(one.prompt_tokens for one in requests)
    return LintReport(findings, len(requests), total, cache.name, list(_unknown(looked_at)))


def _as_sent(trace: Sequence[TraceRequest]) -> Iterator[PlannedRequest]:
    last: dict[Hashable, str | int] = {}
    for traced in trace:
        key = None if traced.conversation_id is None else (traced.tenant, traced.conversation_id)
        # of a recorded prompt is known whether it repeats its history
        repeats = traced.sent is None and key is not None and traced.turn > 0
        yield PlannedRequest.as_recorded(traced, last.get(key) if repeats else None)
        if key is not None:
            last[key] = traced.request_id


def _request(number: int, traced: TraceRequest, explanation: Explanation) -> _Request:
    sent = traced.sent or SentCall()
    system = sent.system_tokens
    front = sent.tool_tokens + (estimate_tokens(traced.system or "") if system is None else system)
    blocks = sum(map(block_tokens, traced.blocks))
    prompt = front + sent.history_tokens + blocks + estimate_tokens(traced.query)
    return _Request(number, traced, explanation, sent, front, prompt)


def _unknown(trace: _Trace) -> Iterator[str]:
    blind = sum(one.traced.sent is None for one in trace.requests)
    if blind:
        yield (
            f"tools, marks and history of {blind:,} requests; record whole prompts: ctxreuse "
            "record --source openai (or anthropic) -o recording app.py"
        )
    if not trace.is_hosted:
        yield "marks and shortest prefix: name the provider's cache, such as --cache anthropic"


# checks


def _volatile(trace: _Trace) -> Iterator[LintFinding]:
    """Find what varies in front of the documents: times, ids, counters, names."""
    variations = front_variations([one.traced for one in trace.requests])
    for variation in variations:
        if variation.is_often:
            tally = _varying(trace, variation)
            first, second = variation.values
            found = (
                f"{variation.forms:,} forms of the {variation.part} in {variation.requests:,} "
                f"requests; “{variation.before}” is followed by “{first}” and by “{second}”"
            )
            remedy = f"Say {variation.kind} behind the documents, such as in the question."
            if tally.requests:
                yield trace.finding(_VOLATILE, tally, found, remedy)
    yield from _volatile_digests(trace)


def _varying(trace: _Trace, variation: Variation) -> _Tally:
    """Return the requests whose front is new although an earlier one was like it."""
    tally, seen = _Tally(), set[str]()
    parts_at = len(commonprefix(variation.texts))
    for one in trace.requests:
        text = front_text(variation.part, one.traced)
        if one.traced.tenant != variation.tenant or text not in variation.all_texts:
            continue
        if seen and text not in seen:
            rest = estimate_tokens(text[parts_at:])
            tokens = rest + one.lost(Cause.other_system, Cause.other_order)
            before = one.front_tokens if variation.part == "system text" else rest
            tally.add(one, tokens if before + tokens - rest >= _least(trace) else 0)
        seen.add(text)
    return tally


def _volatile_digests(trace: _Trace) -> Iterator[LintFinding]:
    """Find system texts that are new nearly each time in a recording that holds no texts."""
    tally, seen = _Tally(), set[Hashable]()
    hidden = [one for one in trace.requests if is_digest(one.traced.system)]
    for one in hidden:
        front = (one.root, one.sent.tools)
        if front in seen and (front, one.traced.system) not in seen:
            tokens = (one.sent.system_tokens or 0) + one.lost(Cause.other_system)
            tally.add(one, tokens if one.front_tokens + tokens >= _least(trace) else 0)
        seen |= {front, (front, one.traced.system)}
    if tally.requests > _OFTEN * len(hidden):
        found = (
            f"{tally.requests + 1:,} system texts in {len(hidden):,} requests; where they differ "
            "is not in a recording without texts"
        )
        remedy = "Record some requests without --hash-only, and lint them."
        yield trace.finding(_VOLATILE, tally, found, remedy)


def _tools(trace: _Trace) -> Iterator[LintFinding]:
    """Find tools that come in another order, and tools that are others nearly each time."""
    orders, others = _Tally(), _Tally()
    exact: defaultdict[Hashable, set[Hashable]] = defaultdict(set)
    sets: defaultdict[Hashable, set[Hashable]] = defaultdict(set)
    number = 0
    for one in trace.requests:
        tools = one.sent.tools
        if not tools:
            continue
        number += 1
        same = tuple(sorted(tools))
        if tools not in exact[one.root] and exact[one.root]:
            tokens = one.front_tokens + one.lost(Cause.other_tools)
            tokens = tokens if tokens >= _least(trace) else 0
            (orders if same in sets[one.root] else others).add(one, tokens)
        exact[one.root].add(tools)
        sets[one.root].add(same)
    if orders.requests:
        found = f"{orders.requests:,} requests have the same tools in an order of their own"
        remedy = "Sort the tools by name, so that every request lists them in the same order."
        yield trace.finding("tools in changing order", orders, found, remedy)
    if others.requests > max(1, _OFTEN * number):
        found = f"{others.requests + 1:,} sets of tools in {number:,} requests with tools"
        remedy = REMEDIES[Cause.other_tools]
        yield trace.finding("tools that change", others, found, remedy)


def _causes(trace: _Trace) -> Iterator[LintFinding]:
    """Find what `explain` says of the requests."""
    volatile = set[str]()
    for variation in front_variations([one.traced for one in trace.requests]):
        if variation.is_often:
            volatile |= variation.all_texts
    tallies: defaultdict[Cause, _Tally] = defaultdict(_Tally)
    for one in trace.requests:
        cause = one.explanation.cause
        fronts = {front_text(part, one.traced) for part in ("system text", "first paragraph")}
        told = cause in (Cause.other_system, Cause.other_order) and bool(fronts & volatile)
        told = told or (cause is Cause.never_written and not one.sent.marks)
        if cause in _BY_CAUSE and one.explanation.lost_tokens and not told:
            tallies[cause].add(one, one.explanation.lost_tokens)
    for cause, tally in tallies.items():
        assert tally.worst is not None, "it has requests"
        yield trace.finding(_BY_CAUSE[cause], tally, tally.worst.explanation.words, REMEDIES[cause])


_LOST = "lost marks"
_TOO_MANY = "too many marks"
_BEHIND = "mark behind the question"


def _marks(trace: _Trace) -> Iterator[LintFinding]:
    """Find marks that vanish, marks past the most, and marks behind what nobody sends again."""
    cache = trace.cache
    if not cache.has_marks:
        return
    lost, many, behind, none = _Tally(), _Tally(), _Tally(), _Tally()
    before: dict[Hashable, _Request] = {}
    turns = Counter((one.traced.tenant, one.traced.conversation_id) for one in trace.requests)
    most = 0
    for one in trace.requests:
        if one.traced.sent is None:
            continue
        count, earlier = one.sent.mark_count, before.get(one.root)
        if count > cache.marks:
            many.add(one, 0)
            most = max(most, count)
        tokens = one.front_again + one.lost(Cause.never_written)
        is_long = one.prompt_tokens >= cache.least_tokens
        if is_long and earlier is not None and _vanished(one, earlier, cache):
            lost.add(one, tokens)
        elif is_long and not count and earlier is None and tokens:
            none.add(one, tokens)
        talks = turns[one.traced.tenant, one.traced.conversation_id] > 1
        in_blocks = [mark for mark in one.traced.marks or () if mark]
        if one.sent.marks.get("turn", 0) > len(in_blocks) and not one.sent.history and not talks:
            kept = one.front_tokens if one.traced.marks else 0
            if in_blocks:
                kept += sum(map(block_tokens, one.traced.blocks[: in_blocks[-1]]))
            if is_long and one.prompt_tokens > kept:
                behind.add(one, one.prompt_tokens - kept)
        if count:
            before[one.root] = one
    if many.requests:
        what = (
            "and the provider refuses such a request"
            if cache.look_back
            else "and the provider writes only the latest"
        )
        found = f"{most} marks in a request; {cache.name} takes {cache.marks}, {what}"
        remedy = (
            "Let one place alone set marks: plan.body() keeps within the most, with those of the "
            "user."
        )
        yield trace.finding(_TOO_MANY, many, found, remedy)
    if lost.requests:
        found = f"an earlier request has marks that are missing in {lost.requests:,} requests"
        remedy = "Set the same marks in every request: what is not marked is not read either."
        yield trace.finding(_LOST, lost, found, remedy)
    if none.requests:
        found = f"{none.requests:,} requests begin as earlier ones do, and none has a mark"
        yield trace.finding(
            _BY_CAUSE[Cause.never_written], none, found, REMEDIES[Cause.never_written]
        )
    extra = cache.write_factor - 1
    if behind.requests and extra > 0:
        found = (
            f"{behind.requests:,} requests without a later turn write their question, too, at "
            f"{cache.write_factor:g} times the price; nobody sends it again"
        )
        remedy = "Mark the documents that come again and not the question: plan.body() does."
        yield trace.finding(_BEHIND, behind, found, remedy, extra)


def _vanished(one: _Request, earlier: _Request, cache: CacheProfile) -> bool:
    """Return whether a request lacks a mark of an earlier one, so that nothing is read there."""
    if not one.sent.mark_count:
        return True
    if cache.look_back:
        return False
    fixed = ("tools", "system")
    return any(earlier.sent.marks.get(at) and not one.sent.marks.get(at) for at in fixed)


def _minimum(trace: _Trace) -> Iterator[LintFinding]:
    """Find prompts and common beginnings that are just shorter than what is kept."""
    if not trace.is_hosted:
        return
    tally, least = _Tally(), trace.cache.least_tokens
    lengths = []
    for one in trace.requests:
        again = one.front_again + one.lost(Cause.below_minimum)
        for length in (one.prompt_tokens, one.front_tokens + one.explanation.shared_tokens):
            if again and _NEARLY * least <= length < least:
                lengths.append(length)
                tally.add(one, again)
                break
    if tally.requests:
        found = (
            f"{tally.requests:,} prompts, or what they share with earlier ones, have "
            f"{min(lengths):,} to {max(lengths):,} tokens; {trace.cache.name} keeps prefixes from "
            f"{least:,} tokens on"
        )
        remedy = (
            "Put more that stays the same in front, such as examples or one more document, until "
            f"it has {least:,} tokens."
        )
        yield trace.finding("just under the minimum", tally, found, remedy)


def _least(trace: _Trace) -> int:
    """Return how long a prefix has to be that saves anything."""
    return trace.cache.least_tokens


_Check: TypeAlias = Callable[[_Trace], Iterator[LintFinding]]
_CHECKS: Final[tuple[_Check, ...]] = (_volatile, _tools, _causes, _marks, _minimum)
