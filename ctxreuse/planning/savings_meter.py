"""Counting what planning saves and costs, on the way of each request."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import Final, NamedTuple, TypeAlias

from ctxreuse.context.checks import reported_count
from ctxreuse.context.fail_open import FailOpen
from ctxreuse.context.fork_safety import ForkSafeLock
from ctxreuse.context.lru_map import PartSize
from ctxreuse.context.rendering import DEFAULT_TEMPLATES, Templates, word_tokens
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.memory.sent_log import SentEntry
from ctxreuse.planning.expectations import CacheExpectations, Mismatch, confirmed_tokens
from ctxreuse.planning.plan import Plan
from ctxreuse.planning.retrieved_order import Front, RetrievedOrder
from ctxreuse.planning.savings import (
    PLANNING_BOUNDS_S,
    ExpectedBill,
    Mode,
    PlanningTime,
    ReportedUsage,
    Savings,
)
from ctxreuse.rules.billed_tokens import BilledTokens
from ctxreuse.rules.cache_rules import DEFAULT_CACHE, CacheRules

TenantClasses: TypeAlias = Callable[[str], str] | Mapping[str, str]
"""The class of each tenant: a function, or a mapping from their names."""

MOST_CLASSES: Final = 16
OTHER_CLASS: Final = "other"
_LONGEST_CLASS = 64
_MOST_QUEUED = 256


class SavingsMeter:
    """Counts for one planner; threads may share it. Its lock is held for some microseconds."""

    def __init__(
        self,
        mode: Mode,
        capacity_tokens: int | None = None,
        tenant_class: TenantClasses | None = None,
        cache: CacheRules = DEFAULT_CACHE,
        templates: Templates = DEFAULT_TEMPLATES,
        *,
        annotates: bool = True,
    ) -> None:
        self._mode: Mode = mode
        self._cache = cache if mode == "shadow" and cache.lives else None
        self._templates = templates
        self._annotates = annotates
        self._class_of = _class_function(tenant_class)
        self._classing = FailOpen("ReusePlanner", 'the tenant counts as "other"', "tenant_class")
        self._retrieved = RetrievedOrder(capacity_tokens)
        self._expectations = CacheExpectations()
        self._queued: deque[_Sent | _Took | SentEntry | int] = deque()
        self._lock = ForkSafeLock(self._forget)
        self._forget()

    def _forget(self) -> None:
        self._queued.clear()
        self._retrieved.forget()
        self._has_reported = False
        self._start_anew()

    def _start_anew(self) -> None:
        """Set all numbers to 0; what would be in the engine's cache stays."""
        self._expectations.forget()
        self._tallies: dict[str, _ClassTotals] = {}
        self._buckets = [0] * (len(PLANNING_BOUNDS_S) + 1)
        self._planned = self._failures = self._without_context = 0
        self._total_s = self._max_s = 0.0

    def savings(self, *, reset: bool = False) -> Savings:
        """Return all numbers, and set them to 0 if asked to."""
        with self._lock:  # others wait, or count first
            self._catch_up()
            tallies, planned = dict(self._tallies), self._planned
            time = PlanningTime(planned, self._total_s, self._max_s, tuple(self._buckets))
            total = _ClassTotals()
            for tally in tallies.values():
                total.add(tally)
            by_class = {
                name: tally.savings(self._mode, cache=self._cache)
                for name, tally in sorted(tallies.items())
                if self._class_of is not None
            }
            savings = total.savings(
                self._mode, time, self._failures, self._without_context, by_class,
                {
                    "retrieved_blocks": self._retrieved.size,
                    "tenant_classes": PartSize(len(by_class), MOST_CLASSES + 1),
                },
                self._cache,
            )  # fmt: skip
            if reset:
                self._start_anew()
        return savings

    def planned(self, plans: Sequence[Plan], seconds: float) -> None:
        """Count requests that were planned, and how long that took together."""
        for plan in plans if self._mode == "active" else ():
            assert plan.logged is not None, "what a planner has planned is logged"
            turn, name, gone, said = plan.shown.turn, "", 0, 0
            if self._class_of is not None:
                name = self._class_named(plan.request.tenant)
            if turn.shown:
                gone = sum([turn.weights[key] for key in turn.shown.keys() & turn.tokens.keys()])
                said = sum(map(word_tokens, filter(None, plan.location_annotations)))
            references = len(turn.tokens) - len(plan.logged.prompt.keys)
            cached = plan.expected_cached_tokens
            entry, _, _, counted = plan.logged
            self._queued.append(_Sent(entry, name, cached, gone, references, said, counted))
        self._queued.append(_Took(len(plans), seconds))
        if len(self._queued) > _MOST_QUEUED:
            self._catch_up()

    def _catch_up(self) -> None:
        """Count what is queued, in order."""
        with self._lock:
            while self._queued:
                one = self._queued.popleft()
                if isinstance(one, int):
                    self._retrieved.evict(one)
                elif isinstance(one, SentEntry):
                    self._follow(one)
                elif isinstance(one, _Took):
                    self._took(*one)
                else:
                    self._count(*one)

    def _took(self, requests: int, seconds: float) -> None:
        """Count how long it took to plan some requests together; the lock is held."""
        if not requests:
            return
        each = seconds / requests
        self._buckets[bisect_left(PLANNING_BOUNDS_S, each)] += requests
        self._planned += requests
        self._total_s += seconds
        self._max_s = max(self._max_s, each)

    def _count(
        self, entry: SentEntry, name: str, cached: int, left_out: int, references: int, said: int,
        counted: list[tuple[_ClassTotals, _Counts]],
    ) -> None:  # fmt: skip
        tally, tokens = self._tally(name), sum(entry.tokens)
        words = said + self.added_words(entry, cached)
        is_changed = references > 0 or entry.ranks != tuple(range(len(entry.ranks)))
        as_retrieved = float(cached)  # of a later turn: it depends on the history only
        if not entry.is_later_turn and entry.keys:
            estimated = self._as_retrieved(tally, entry, tokens, is_changed)
            as_retrieved = as_retrieved if estimated is None else estimated
        counts = _Counts(
            is_changed, tokens + left_out, cached, cached, as_retrieved, left_out, references,
            words,
        )  # fmt: skip
        tally.count(counts)
        counted.append((tally, counts))

    def taken_back(self, counted: list[tuple[_ClassTotals, _Counts]]) -> None:
        """Take a request out of all numbers, once: it never reached the engine."""
        with self._lock:
            self._catch_up()
            while counted:
                tally, counts = counted.pop()
                tally.count(counts, times=-1)

    def compared(
        self, tenant: str, is_changed: bool, tokens: int, sent: int, planned: int, left_out: int,
        references: int, words: int, bills: tuple[BilledTokens, BilledTokens] | None = None,
    ) -> None:  # fmt: skip
        """Count a request that is sent as retrieved."""
        name = self._class_named(tenant)
        with self._lock:
            tally = self._tally(name)
            tally.count(
                _Counts(is_changed, tokens, sent, planned, sent, left_out, references, words)
            )
            if bills is not None:
                tally.bill_as_retrieved += bills[0]
                tally.bill_if_planned += bills[1]

    def sent_elsewhere(self, entry: SentEntry) -> None:
        """Take note of what another planner has sent to the same engine."""
        if self._mode == "active":
            self._queued.append(entry)

    def _follow(self, entry: SentEntry) -> tuple[int, bool] | None:
        """Return what of a prompt would be cached as retrieved, and whether that is a sample."""
        blocks = entry.as_retrieved()
        front = Front(entry.tenant, entry.system, entry.is_labelled)
        first = next(iter(blocks), None)
        if first is None or not self._retrieved.follows(front, first, sum(blocks.values())):
            return None
        is_sample = self._retrieved.is_sample(front, first)
        return self._retrieved.send(front, blocks.items()), is_sample

    def evicted(self, tokens: int) -> None:
        """Take note that the engine dropped tokens."""
        if tokens and self._mode == "active":
            self._queued.append(tokens)

    def answered(
        self,
        tenant: str,
        expected: int,
        before: int,
        prompt_tokens: object,
        cached_tokens: object,
        written_tokens: Mapping[str, int] | None = None,
    ) -> Mismatch | None:
        """Count what an engine reports of an answer; return what the log should say, if any."""
        prompt, cached = reported_count(prompt_tokens), reported_count(cached_tokens)
        name = self._class_named(tenant)
        if prompt is None:
            with self._lock:
                self._tally(name).unreported += 1
            return None
        with self._lock:
            self._has_reported |= bool(cached)
            if cached is None and cached_tokens is None and self._has_reported:
                cached = 0  # vLLM names them only where there are some
            tally = self._tally(name)
            for life, tokens in (written_tokens or {}).items():
                tally.written[life] = tally.written.get(life, 0) + tokens
            confirmed = confirmed_tokens(expected, before, prompt, cached or 0)
            if cached is None:
                tally.unreported += 1
            else:
                tally.answers += 1
                tally.prompt_tokens += prompt
                tally.cached_tokens += min(cached, prompt)
                tally.expected_tokens += expected
                tally.confirmed_tokens += confirmed
            return self._expectations.note(expected, confirmed)

    def primed(self, tenant: str, calls: int, tokens: int) -> None:
        """Count calls that were sent besides a prompt, and what they computed."""
        name = self._class_named(tenant)
        with self._lock:
            tally = self._tally(name)
            tally.primes += calls
            tally.prime_tokens += tokens

    def failed(self) -> None:
        """Count that planning has failed."""
        with self._lock:
            self._failures += 1

    def had_no_context(self, prompts: int) -> None:
        """Count prompts in which no context was found."""
        with self._lock:
            self._without_context += prompts

    def _tally(self, name: str) -> _ClassTotals:
        """Return the tally of a class; the lock is held."""
        tally = self._tallies.get(name)
        if tally is None:
            if len(self._tallies) >= MOST_CLASSES and name != OTHER_CLASS:
                return self._tally(OTHER_CLASS)
            tally = self._tallies[name] = _ClassTotals()
        return tally

    def _class_named(self, tenant: str) -> str:
        """Return the class of a tenant; the user's function is called without the lock."""
        class_of = self._class_of
        if class_of is None:
            return ""
        name = self._classing.attempt(lambda: _checked_class(class_of(tenant)), lambda: OTHER_CLASS)
        return OTHER_CLASS if name == tenant else name

    def added_words(self, entry: SentEntry, cached: int) -> int:
        """Return about how many tokens of words on order and labels of a prompt are computed."""
        words, best = 0, self._templates.most_ranked
        is_ranked = entry.ranks[:best] == tuple(range(len(entry.ranks)))[:best]
        if self._annotates and not entry.is_later_turn and not is_ranked:
            number, is_labelled = len(entry.keys), entry.is_labelled
            words += self._templates.order_tokens(number, is_labelled=is_labelled)
        if entry.is_labelled:
            reached = accumulate(entry.tokens)  # cached blocks have their labels, too
            words += self._templates.label_tokens * sum(tokens > cached for tokens in reached)
        return words

    def _as_retrieved(
        self, tally: _ClassTotals, entry: SentEntry, tokens: int, is_changed: bool
    ) -> float | None:
        """Return what stands for a first turn's cached tokens as retrieved; None: those sent."""
        followed = self._follow(entry)
        if followed is None and not is_changed:
            return None
        if followed is None:
            tally.unfollowed += tokens
            return 0.0
        cached, is_sample = followed
        if not is_sample or not tokens:
            return float(cached)
        # it stands for those since the sample before, so that no number has to be taken back
        unfollowed, tally.unfollowed = tally.unfollowed, 0
        return cached * (1 + unfollowed / tokens)


class _Took(NamedTuple):
    """How long planning took."""

    requests: int
    seconds: float


class _Sent(NamedTuple):
    """A request that is to be counted."""

    entry: SentEntry
    tenant_class: str
    expected_tokens: int
    left_out_tokens: int
    references: int
    said_tokens: int  # of words on what is left out
    counted: list[tuple[_ClassTotals, _Counts]]  # what is counted, and where


class _Counts(NamedTuple):
    """What one request adds to the numbers."""

    is_changed: bool
    tokens: int
    as_sent: int
    if_planned: int
    as_retrieved: float
    left_out: int
    references: int
    words: int


@dataclass(slots=True)
class _ClassTotals:
    """The numbers of one class of tenants; the meter's lock guards it."""

    answers: int = 0
    as_retrieved: float = 0
    as_sent: int = 0
    bill_as_retrieved: BilledTokens = field(default_factory=BilledTokens)
    bill_if_planned: BilledTokens = field(default_factory=BilledTokens)
    block_tokens: int = 0
    cached_tokens: int = 0
    changed: int = 0
    confirmed_tokens: int = 0
    expected_tokens: int = 0
    if_planned: int = 0
    left_out: int = 0
    prime_tokens: int = 0
    primes: int = 0
    prompt_tokens: int = 0
    references: int = 0
    requests: int = 0
    unfollowed: int = 0  # tokens of first turns since the latest sample
    unreported: int = 0
    word_tokens: int = 0
    written: dict[str, int] = field(default_factory=dict)

    def count(self, counts: _Counts, times: int = 1) -> None:
        self.requests += times
        self.changed += times * counts.is_changed
        self.block_tokens += times * counts.tokens
        self.as_sent += times * counts.as_sent
        self.if_planned += times * counts.if_planned
        self.as_retrieved += times * counts.as_retrieved
        self.left_out += times * counts.left_out
        self.references += times * counts.references
        self.word_tokens += times * counts.words

    def add(self, other: _ClassTotals) -> None:
        for one in fields(self):
            if one.name != "written":
                setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))
        for life, tokens in other.written.items():
            self.written[life] = self.written.get(life, 0) + tokens

    def savings(
        self,
        mode: Mode,
        planning: PlanningTime = PlanningTime(),  # noqa: B008 - frozen
        planning_failures: int = 0,
        prompts_without_context: int = 0,
        by_class: Mapping[str, Savings] | None = None,
        parts: Mapping[str, PartSize] | None = None,
        cache: CacheRules | None = None,
    ) -> Savings:
        bill = None
        if cache is not None:
            bill = ExpectedBill(self.bill_as_retrieved, self.bill_if_planned, cache)
        return Savings(
            requests=self.requests,
            changed=self.changed,
            block_tokens=self.block_tokens,
            cached_as_sent=self.as_sent,
            cached_if_planned=self.if_planned,
            left_out=self.left_out,
            cached_as_retrieved=int(self.as_retrieved),
            references=self.references,
            word_tokens=self.word_tokens,
            mode=mode,
            planning=planning,
            reported=ReportedUsage(
                self.answers,
                self.unreported,
                self.prompt_tokens,
                self.cached_tokens,
                self.expected_tokens,
                self.confirmed_tokens,
                self.primes,
                self.prime_tokens,
                dict(self.written),
            ),
            planning_failures=planning_failures,
            prompts_without_context=prompts_without_context,
            by_class=by_class or {},
            parts=parts or {},
            bill=bill,
        )


def _class_function(tenant_class: object) -> Callable[[str], object] | None:
    if tenant_class is None:
        return None
    if isinstance(tenant_class, Mapping):
        known = dict(tenant_class)
        return lambda tenant: known.get(tenant, OTHER_CLASS)
    if callable(tenant_class):
        return tenant_class
    raise InvalidRequestError(
        "tenant_class must be a function from a tenant to its class, a mapping or None, not "
        f"{describe(tenant_class)}"
    )


def _checked_class(name: object) -> str:
    """Return the name of a class."""
    if isinstance(name, str) and 0 < len(name) <= _LONGEST_CLASS and name.isprintable():
        return name
    raise InvalidRequestError(
        f"a tenant's class must be a printable name of up to {_LONGEST_CLASS} characters, not "
        f"{type(name).__name__}"
    )
