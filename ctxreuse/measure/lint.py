"""`ctxreuse lint`: what in a recorded trace keeps a cache from hitting, and what that costs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from operator import itemgetter
from typing import Any, Final, NamedTuple, TypeAlias

from ctxreuse.context.checks import check_function, checked_each, checked_kind
from ctxreuse.context.tokens import estimate_tokens
from ctxreuse.measure.doctor.findings import printable
from ctxreuse.measure.replay.explain_plan import REMEDIES, explain_plan
from ctxreuse.measure.replay.plan_file import PlannedRequest
from ctxreuse.measure.replay.simulate import Progress, no_progress
from ctxreuse.measure.results.prices import Prices
from ctxreuse.measure.results.verdict import sentence
from ctxreuse.measure.table import Shown, Table, shortened
from ctxreuse.measure.traces.changing_documents import (
    IN_TEXTS,
    UNKNOWN,
    ChangingDocuments,
    changing_documents,
    hides_texts,
)
from ctxreuse.measure.traces.sent_calls import SentCall
from ctxreuse.measure.traces.trace_files import Corpus, TraceRequest, block_tokens
from ctxreuse.measure.traces.varying_fronts import (
    FRONT_PARTS,
    Variation,
    behind_fronts,
    front_text,
    front_variations,
    is_digest,
)
from ctxreuse.memory.explanations import Cause, Explanation
from ctxreuse.planning.savings import counted
from ctxreuse.rules.cache_rules import DEFAULT_CACHE, CacheRules

_OFTEN = 0.1  # share of the requests from which on other tools count as changing
_NEARLY = 0.8  # share of the shortest prefix from which on a prompt is just under it
_BY_CAUSE: Final = {  # checks that are what `explain` says
    Cause.other_order: "documents in changing order",
    Cause.other_labels: "labels in some prompts only",
    Cause.other_system: "another system text",
    Cause.other_key: "another cache key",
    Cause.other_model: "another model",
    Cause.expired: "sent too late",
}

_PLANNED: Final = (
    "Have them planned: do what `ctxreuse estimate` says comes next, such as wrapping the model; "
    "where that is done,"
)
_TOO_MANY: Final = "too many breakpoints"


class LintFinding(NamedTuple):
    """What one check has found in a trace."""

    check: str
    request_id: str | int
    number: int
    label: str
    requests: int
    found: str
    tokens: int
    cost_tokens: int
    share: float
    remedy: str


@dataclass(frozen=True, slots=True)
class LintReport:
    """What was found in a trace, the most expensive first."""

    findings: Sequence[LintFinding]
    requests: int
    prompt_tokens: int
    cache: str
    unknown: Sequence[str] = ()
    prices: Prices | None = None

    @property
    def verdict(self) -> str:
        """All this in a sentence, and what to do first."""
        of = f"{counted(self.requests)} with {self.prompt_tokens:,} prompt tokens ({self.cache})"
        if not self.findings:
            return f"Nothing found in {of}."
        words, first = counted(len(self.findings), "finding"), self.findings[0]
        return f"{words} in {of}. First: {first.check}, {first.share:.1%} of the input's price."

    def _money(self, finding: LintFinding) -> float | None:
        if self.prices is None:
            return None
        return finding.cost_tokens * self.prices.input / 1_000_000

    def as_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {
            "verdict": self.verdict,
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "cache": self.cache,
            "findings": [
                {**one._asdict(), "share": round(one.share, 6), "money": self._money(one)}
                for one in self.findings
            ],
            "unknown": list(self.unknown),
            **({"prices": asdict(self.prices)} if self.prices else {}),
        }

    def output(self) -> Iterator[Shown]:
        """Yield what a terminal shows."""
        yield self.verdict
        if self.findings:
            columns: dict[str, Callable[[LintFinding], str]] = {
                "check": lambda one: one.check,
                "requests": lambda one: f"{one.requests:,}",
                "tokens": lambda one: f"{one.tokens:,}",
                "share": lambda one: f"{one.share:.1%}",
            }
            if self.prices is not None:
                columns[self.prices.currency] = lambda one: f"{self._money(one) or 0.0:.4g}"
            yield Table.of("What it costs", {"": self.findings}, columns)
        if self.prices is not None:
            yield f"prices of {self.prices.date}: {self.prices.source}"
        for one in self.findings:
            label = f" “{printable(one.label)}”" if one.label else ""
            yield f"{one.check}, request {one.number:,}{label}: {printable(one.found)}"
            yield f"  -> {one.remedy}"
        for words in self.unknown:
            yield f"not known: {words}"


@dataclass(slots=True)
class _Request:
    number: int
    traced: TraceRequest
    explanation: Explanation
    sent: SentCall
    front_tokens: int
    prompt_tokens: int
    front_again: int = 0

    @property
    def front(self) -> Hashable:
        return (self.root, self.sent.tools, self.traced.system, self.traced.front)

    @property
    def root(self) -> Hashable:
        """What is the same for all requests that could share a prefix."""
        return (self.traced.tenant, self.sent.model)

    def lost(self, *causes: Cause) -> int:
        if self.explanation.cause not in causes:
            return 0
        return max(self.explanation.lost_tokens, self.sent.history_tokens)


_Evidence: TypeAlias = list[tuple[_Request, int]]
"""Requests that show something, and the tokens that each has computed for it."""


class _CheckedTrace(NamedTuple):
    requests: Sequence[_Request]
    cache: CacheRules
    variations: Sequence[Variation]
    changing: ChangingDocuments | None

    def finding(
        self, check: str, tally: _Evidence, found: str, remedy: str, factor: float | None = None
    ) -> LintFinding:
        one, _ = max(tally, key=itemgetter(1))
        tokens = sum(number for _, number in tally)
        cost = round(tokens * (factor or 0.0))
        if factor is None:
            written = sum(number for each, number in tally if each.sent.marks)
            extra = written * (self.cache.write_factor - 1)
            cost = round(tokens * (1 - self.cache.read_factor) + extra)
        total = sum(one.prompt_tokens for one in self.requests)
        return LintFinding(
            check=check,
            request_id=one.traced.request_id,
            number=one.number,
            label=_label(one.traced),
            requests=len(tally),
            found=found,
            tokens=tokens,
            cost_tokens=cost,
            share=cost / total if total else 0.0,
            remedy=remedy,
        )


def lint(
    trace: Sequence[TraceRequest],
    corpus: Corpus,
    cache: CacheRules = DEFAULT_CACHE,
    progress: Progress = no_progress,
) -> LintReport:
    """Return what in a trace keeps a prefix cache from hitting, the most expensive first."""
    trace = checked_each("trace", trace, TraceRequest, "a TraceRequest")
    checked_kind("corpus", corpus, Mapping, "a dict of blocks by id; read it with read_corpus")
    checked_kind("cache", cache, CacheRules, "CacheRules")
    check_function("progress", progress, "a function")
    sent = [
        PlannedRequest.as_recorded(replace(one, request_id=_named(number, one)))
        for number, one in enumerate(behind_fronts(trace), start=1)
    ]
    requests, seen = list[_Request](), set[Hashable]()
    with progress("comparing", len(trace)) as advance:
        explained = explain_plan(sent, corpus, cache=cache)
        for number, (traced, one) in enumerate(zip(trace, explained, strict=True), start=1):
            request = _request(number, traced, one)
            if request.front in seen:
                request.front_again = request.front_tokens
            seen.add(request.front)
            requests.append(request)
            advance()
    changing = changing_documents(trace)
    settled = trace if changing is None else changing.settled(trace)
    varying = [one for one in front_variations(settled) if one.is_often]
    looked_at = _CheckedTrace(requests, cache, varying, changing)
    checks = [_volatile, _documents, _tools, _causes]
    checks += [_marks, _behind_questions] if cache.marks else []
    checks += [_minimum] if cache.lives else []
    findings = [one for check in checks for one in check(looked_at)]
    findings.sort(key=lambda one: (one.check != _TOO_MANY, -one.cost_tokens, one.check))
    total = sum(one.prompt_tokens for one in requests)
    return LintReport(findings, len(requests), total, cache.name, list(_unknown(looked_at)))


def _label(traced: TraceRequest) -> str:
    return shortened(" ".join(traced.query.split()))


def _named(number: int, traced: TraceRequest) -> str:
    return f"{number:,} “{_label(traced)}”" if traced.query else f"{number:,}"


def _request(number: int, traced: TraceRequest, explanation: Explanation) -> _Request:
    sent = traced.sent or SentCall()
    system = sent.system_tokens
    if system is None:
        system = estimate_tokens(traced.system or traced.front or "")
    front = sent.tool_tokens + system
    blocks = sum(map(block_tokens, traced.blocks))
    prompt = front + sent.history_tokens + blocks + estimate_tokens(traced.query)
    return _Request(number, traced, explanation, sent, front, prompt)


def _unknown(trace: _CheckedTrace) -> Iterator[str]:
    blind = [one.traced for one in trace.requests if one.traced.sent is None]
    if blind:
        # histories of whole prompts have been seen
        last = " and" if all(one.framework for one in blind) else ", history and"
        yield (
            f"tools{last} breakpoints of {counted(len(blind))}; record what clients send: "
            "ctxreuse record --source openai (or anthropic) -o recording app.py"
        )
    if hides_texts(one.traced for one in trace.requests):
        yield f"{UNKNOWN}; {IN_TEXTS}"
    if not trace.cache.lives:
        yield "breakpoints and minimum: name the provider's cache, such as --cache anthropic"


# checks


def _volatile(trace: _CheckedTrace) -> Iterator[LintFinding]:
    for variation in trace.variations:
        tally, seen = _Evidence(), set[str]()
        for one in trace.requests:
            text = front_text(variation.part, one.traced)
            if one.traced.tenant != variation.tenant or text not in variation.all_texts:
                continue
            if seen and text not in seen:
                hidden = (one.sent.system_tokens or 0) if is_digest(text) else 0
                rest = hidden or estimate_tokens(text[variation.at :])
                tokens = rest + one.lost(Cause.other_system, Cause.other_order)
                # behind it the front goes on; a first paragraph stands behind the front
                before = one.front_tokens - rest * (variation.part != "first paragraph")
                if before + tokens >= trace.cache.least_tokens:
                    tally.append((one, tokens))
            seen.add(text)
        if any(tokens for _, tokens in tally):
            remedy = sentence(variation.remedy)
            yield trace.finding("volatile text in front", tally, str(variation), remedy)


def _documents(trace: _CheckedTrace) -> Iterator[LintFinding]:
    changing = trace.changing
    if changing is None:
        return
    tally = [(trace.requests[at], tokens) for at, tokens in changing.tokens.items()]
    remedy = sentence(changing.remedy)
    yield trace.finding("documents whose text changes", tally, str(changing), remedy)


def _tools(trace: _CheckedTrace) -> Iterator[LintFinding]:
    orders, others = _Evidence(), _Evidence()
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
            if tokens >= trace.cache.least_tokens:
                (orders if same in sets[one.root] else others).append((one, tokens))
        exact[one.root].add(tools)
        sets[one.root].add(same)
    if orders:
        found = f"{_counted(orders)} the same tools as earlier ones in another order"
        remedy = "Sort the tools by name, so that every request lists them in the same order."
        yield trace.finding("tools in changing order", orders, found, remedy)
    if len(others) > max(1, _OFTEN * number):
        found = f"{len(others) + 1:,} sets of tools in {number:,} requests with tools"
        remedy = REMEDIES[Cause.other_tools]
        yield trace.finding("tools that change", others, found, remedy)


def _causes(trace: _CheckedTrace) -> Iterator[LintFinding]:
    volatile = {text for one in trace.variations for text in one.all_texts}
    tallies: defaultdict[Cause, _Evidence] = defaultdict(list)
    for one in trace.requests:
        cause = one.explanation.cause
        is_told = cause in (Cause.other_system, Cause.other_order) and any(
            front_text(part, one.traced) in volatile for part in FRONT_PARTS
        )
        if cause is Cause.other_system and one.traced.front is not None and not one.traced.system:
            continue  # words before the documents are no system text
        is_kept = one.prompt_tokens >= trace.cache.least_tokens
        if cause in _BY_CAUSE and one.lost(cause) and is_kept and not is_told:
            tallies[cause].append((one, one.lost(cause)))
    for cause, tally in tallies.items():
        one, _ = max(tally, key=itemgetter(1))
        worst = one.explanation
        found, remedy = worst.why, REMEDIES[cause]
        if cause is Cause.other_order:
            remedy = f"{_PLANNED} {remedy[0].lower()}{remedy[1:]}"
            found = (
                f"{_counted(tally)} documents of an earlier one in another order or place; this "
                f"one parts from request {worst.closest} behind {worst.shared_blocks} of its "
                f"{len(one.traced.blocks)}, and {worst.lost_tokens:,} tokens are computed "
                "again"
            )
        yield trace.finding(_BY_CAUSE[cause], tally, found, remedy)


def _marks(trace: _CheckedTrace) -> Iterator[LintFinding]:
    cache = trace.cache
    lost, unmarked, many = _Evidence(), _Evidence(), _Evidence()
    before: dict[Hashable, SentCall] = {}
    for one in trace.requests:
        sent, earlier = one.sent, before.get(one.root, SentCall())
        if sent.mark_count > cache.marks:
            many.append((one, 0))
        tokens = one.lost(Cause.never_written)
        gone = earlier.marks.keys() - sent.marks.keys()
        is_recorded = one.traced.sent is not None
        if is_recorded and (not sent.marks or (not cache.look_back and gone & {"tools", "system"})):
            tokens += one.front_again
        if tokens and one.prompt_tokens >= cache.least_tokens:
            (lost if is_recorded and gone else unmarked).append((one, tokens))
        if sent.marks:
            before[one.root] = sent
    if many:
        many.sort(key=lambda each: -each[0].sent.mark_count)
        does = "refuses such a request" if cache.look_back else "writes only the latest"
        found = (
            f"{_counted(many)} more breakpoints than {cache.name} takes, "
            f"{many[0][0].sent.mark_count} instead of {cache.marks}; the provider {does}"
        )
        remedy = "Set breakpoints in one place: plan.body() keeps to the limit, yours included."
        yield trace.finding(_TOO_MANY, many, found, remedy)
    if lost:
        found = f"{_counted(lost)} no breakpoint where an earlier one has some"
        remedy = "Set the same breakpoints in every request, else what they end is not read."
        yield trace.finding("lost breakpoints", lost, found, remedy)
    if unmarked:
        found = f"{_counted(unmarked)} no breakpoint behind what earlier ones begin with, too"
        remedy = REMEDIES[Cause.never_written]
        yield trace.finding("no breakpoint where prompts fork", unmarked, found, remedy)


def _behind_questions(trace: _CheckedTrace) -> Iterator[LintFinding]:
    """Find marks behind questions that no later turn repeats: they are paid for in vain."""
    cache, tally = trace.cache, _Evidence()
    turns = Counter((one.traced.tenant, one.traced.conversation_id) for one in trace.requests)
    for one in trace.requests:
        marks = [mark for mark in one.traced.marks or () if mark]
        is_behind = one.sent.marks.get("turn", 0) > len(marks)
        conversation = one.traced.conversation_id
        goes_on = conversation is not None and turns[one.traced.tenant, conversation] > 1
        if not is_behind or one.sent.history or goes_on:
            continue
        kept = one.front_tokens if one.traced.marks else 0
        kept += sum(map(block_tokens, one.traced.blocks[: max(marks, default=0)]))
        if one.prompt_tokens >= cache.least_tokens and one.prompt_tokens > kept:
            tally.append((one, one.prompt_tokens - kept))
    if tally and cache.write_factor > 1:
        found = (
            f"{_counted(tally)} a breakpoint behind a question that no later turn repeats: it is "
            f"written at {cache.write_factor:g} times the price and never read"
        )
        remedy = "Set breakpoints behind documents that come again, as plan.body() does."
        factor = cache.write_factor - 1
        yield trace.finding("breakpoint behind the question", tally, found, remedy, factor)


def _counted(tally: _Evidence) -> str:
    return f"{counted(len(tally))} {'has' if len(tally) == 1 else 'have'}"


def _minimum(trace: _CheckedTrace) -> Iterator[LintFinding]:
    tally, least = _Evidence(), trace.cache.least_tokens
    lengths = []
    for one in trace.requests:
        again = one.front_again + one.lost(Cause.below_minimum)
        for length in (one.prompt_tokens, one.front_tokens + one.explanation.shared_tokens):
            if again and _NEARLY * least <= length < least:
                lengths.append(length)
                tally.append((one, again))
                break
    if tally:
        found = (
            f"{_counted(tally)} {min(lengths):,} to {max(lengths):,} tokens in all or in common "
            f"with earlier ones; {trace.cache.name} keeps prefixes from {least:,} tokens on"
        )
        remedy = (
            "Put more that stays the same in front, such as examples or one more document, until "
            f"it has {least:,} tokens."
        )
        yield trace.finding("just under the minimum", tally, found, remedy)
