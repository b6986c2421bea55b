"""Counting what planning saves and costs, on the way of each request."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate, count
from math import inf, sqrt
from typing import Any, Final, NamedTuple, TypeAlias

from ctxreuse.context.blocks import BlockKey, text_digest
from ctxreuse.context.checks import check_function
from ctxreuse.context.fail_open import FailOpen
from ctxreuse.context.fork_safety import ForkSafeLock
from ctxreuse.context.lru_map import PartSize
from ctxreuse.context.rendering import word_tokens
from ctxreuse.errors import InvalidRequestError
from ctxreuse.memory.prefix_index import PrefixIndex
from ctxreuse.memory.sent_log import LoggedPrompt, SentEntry
from ctxreuse.planning.plan import AnsweredCall, Plan
from ctxreuse.planning.savings import (
    PLANNING_BOUNDS_S,
    ExpectedBill,
    Mode,
    PlanningTime,
    ReportedUsage,
    Savings,
)
from ctxreuse.planning.tenant_planner import PlannerSettings
from ctxreuse.rules.answers import may_keep_states, when_silent
from ctxreuse.rules.billed_tokens import BilledTokens
from ctxreuse.rules.cache_rules import CacheRules

TenantClasses: TypeAlias = Callable[[str], str] | Mapping[str, str]
"""The class of each tenant: a function, or a mapping from their names."""

MOST_BLOCKS: Final = 50_000
"""Blocks that are remembered, each where it stood."""
_MOST_NODES = 10_000
_ONE_IN = 16
_WHOLE_FAMILIES = 256
_GROUPS = 32
"""How many groups a sample has; as they differ, so may the sample from all."""
_WHOLE = -1
_OTHERS = -2
_MOST_OF_A_REQUEST = 256
_MOST_AT_ONCE = 64
_ANSWERS = 200
"""Answers that one judgement rests on."""
_LEAST_EXPECTED_TOKENS = 64
_LEAST_SHARE = 0.5

_MISSING = (
    "of %d tokens that a planner expected in the engine's cache, %d answers report %d: another "
    "process may share this engine, a router may spread the requests over several, its cache "
    "may hold less than the planner believes%s. %sCompare `planner.savings.reported` with the "
    "engine's /metrics, and run `ctxreuse doctor --base-url URL --metrics URL`"
)
_SHARE_A_LOG = "Give the planners of all processes one log (ReusePlanner(shared_log=...)). "
_OWN_LOGS = "Give each engine a log of its own (log.of_engine(...)), all its processes the same. "
MOST_CLASSES: Final = 16
OTHER_CLASS: Final = "other"
_LONGEST_CLASS = 64
_MOST_QUEUED = 128
_COUNTED = (
    "requests", "changed", "block_tokens", "cached_as_sent", "cached_if_planned", "left_out",
    "references", "word_tokens",
)  # fmt: skip


class SavingsMeter:
    """Counts for one planner; threads may share it. Its lock is held for some microseconds."""

    def __init__(
        self,
        mode: Mode,
        settings: PlannerSettings,
        tenant_class: TenantClasses | None = None,
        *,
        is_alone: bool = True,
    ) -> None:
        self._mode: Mode = mode
        self._settings, cache = settings, settings.cache
        self._cache = cache if mode == "shadow" and cache.lives else None
        self._class_of = _class_function(tenant_class)
        self._classing = FailOpen("ReusePlanner", 'the tenant counts as "other"', "tenant_class")
        self._retrieved = RetrievedOrder(settings.capacity_tokens, cache)
        self._expectations = CacheExpectations(cache, is_alone)
        self._queued: deque[_Sent | SentEntry | int | str] = deque()
        self._lock = ForkSafeLock(self._forget)
        self._forget()

    def _forget(self) -> None:
        self._queued.clear()
        self._retrieved.forget()
        self._has_reported = False
        self._expectations.forget()
        self._tallies = defaultdict[str, _ClassTotals](_ClassTotals)
        self._buckets = [0] * (len(PLANNING_BOUNDS_S) + 1)
        self._planned = 0
        self._besides: Counter[str] = Counter()  # by the fields of `Savings`
        self._total_s = self._max_s = 0.0

    def savings(self) -> Savings:
        """Return all numbers."""
        with self._lock:  # others wait, or count first
            self._catch_up()
            total = _ClassTotals()
            for tally in self._tallies.values():
                total.add(tally)
            by_class = {
                name: tally.savings(self._mode, self._cache)
                for name, tally in sorted(self._tallies.items())
                if self._class_of is not None
            }
            took = PlanningTime(self._planned, self._total_s, self._max_s, tuple(self._buckets))
            return total.savings(
                self._mode,
                self._cache,
                planning=took,
                **self._besides,
                by_class=by_class,
                parts={
                    "retrieved_blocks": PartSize(self._retrieved.index.block_count, MOST_BLOCKS),
                    "tenant_classes": PartSize(len(by_class), MOST_CLASSES + 1),
                },
            )

    def planned(self, plans: Sequence[Plan], seconds: float) -> None:
        """Count requests in the order in which they came, and how long planning took together."""
        each = seconds / len(plans) if plans else 0.0
        if self._mode == "shadow":
            with self._lock:
                self._took(each, len(plans))
        for plan in plans if self._mode == "active" else ():
            assert plan.logged is not None, "what a planner has planned is logged"
            if [*plan.ranks] != sorted(plan.ranks):  # also those of a batch before it count so
                self._retrieved.differs = True
            turn, gone, said = plan.turn, 0, 0
            name = "" if self._class_of is None else self._class_named(plan.request.tenant)
            if turn.shown:
                gone = sum([turn.weights[key] for key in turn.shown.keys() & turn.tokens.keys()])
                said = sum(map(word_tokens, filter(None, plan.location_annotations)))
            references = len(turn.tokens) - len(plan.logged.prompt.keys)
            cached = plan.expected_cached_tokens
            self._queued.append(_Sent(plan.logged, name, cached, gone, references, said, each))
        if len(self._queued) > _MOST_QUEUED:
            self._catch_up()

    def _catch_up(self) -> None:
        with self._lock:
            for _ in [*self._queued]:  # what comes meanwhile is counted next time
                if not self._queued:
                    break  # a stream that was collected here has counted the rest
                one = self._queued.popleft()
                if isinstance(one, int):
                    self._retrieved.evict(one)
                elif isinstance(one, SentEntry):
                    self._retrieved.follow(one)
                elif isinstance(one, str):
                    self._tally(one).reported["unreported"] += 1
                else:
                    self._count(one)

    def _took(self, each: float, requests: int = 1) -> None:
        """Count how long it took to plan each of some requests; the lock is held."""
        self._buckets[bisect_left(PLANNING_BOUNDS_S, each)] += requests
        self._planned += requests
        self._total_s += requests * each
        self._max_s = max(self._max_s, each)

    def _count(self, sent: _Sent) -> None:
        self._took(sent.seconds)
        entry, cached, left_out = sent.logged.prompt, sent.expected_tokens, sent.left_out_tokens
        as_retrieved, group = cached, _WHOLE  # of a later turn: it depends on the history only
        if not entry.is_later_turn:
            followed = self._retrieved.follow(entry)
            if self._retrieved.differs:  # else nothing was sent otherwise, so nothing is saved
                as_retrieved, group = followed
        tokens, words = sum(entry.tokens), sent.said_tokens + self.added_words(entry, cached)
        is_changed = sent.references > 0 or entry.is_reordered
        numbers = is_changed, tokens + left_out, cached, cached, left_out, sent.references, words
        counts = _Counts(numbers, group, tokens, cached - as_retrieved)
        tally = self._tally(sent.tenant_class)
        tally.count(counts)
        sent.logged.counted.append((tally, counts))

    def taken_back(self, counted: list[tuple[_ClassTotals, _Counts]]) -> None:
        """Take a request out of all numbers, once: it never reached the engine."""
        with self._lock:
            self._catch_up()
            while counted:
                tally, counts = counted.pop()
                tally.count(counts, times=-1)

    def compared(
        self, tenant: str, bills: tuple[BilledTokens, BilledTokens] | None, *numbers: int
    ) -> None:
        """Count a request that is sent as retrieved: `_COUNTED`, and both ways' bills."""
        name = self._class_named(tenant)
        with self._lock:
            tally = self._tally(name)
            tally.count(_Counts(numbers))
            if bills is not None:
                tally.bill_as_retrieved += bills[0]
                tally.bill_if_planned += bills[1]

    def besides(self, **numbers: int) -> None:
        """Count what is no request, by fields of `Savings`; below 0, what is taken back."""
        with self._lock:
            self._besides.update(numbers)

    def note(self, event: SentEntry | int) -> None:
        """Take note of what another planner has sent, or of tokens; see `RetrievedOrder.evict`."""
        if event and self._mode == "active":
            self._queued.append(event)

    def answered(
        self,
        call: AnsweredCall,
        tenant: str,
        before: int,
        written_tokens: Mapping[str, int],
        *,
        is_told: bool,
    ) -> str | None:
        """Count what an engine reports of an answer; return what the log should say, if any."""
        if (prompt := call.prompt_tokens) is None:
            self.unreported(tenant)
            return None
        cached, expected = call.cached_tokens, call.expected_cached_tokens
        name = self._class_named(tenant)
        with self._lock:
            self._has_reported |= bool(cached)
            if cached is None and not is_told and self._has_reported:
                cached = 0  # vLLM names them only where there are some
            tally = self._tally(name)
            tally.written.update(written_tokens)
            confirmed = confirmed_tokens(expected, before, prompt, cached or 0)
            if cached is None:
                tally.reported["unreported"] += 1
            else:
                tally.reported.update(
                    answers=1,
                    prompt_tokens=prompt,
                    cached_tokens=cached,
                    expected_cached_tokens=expected,
                    confirmed_cached_tokens=confirmed,
                )
            return self._expectations.note(expected, confirmed)

    def unreported(self, tenant: str) -> None:
        """Take note of an answer without usage."""
        self._queued.append(self._class_named(tenant))

    def primed(self, tenant: str, calls: int, tokens: int) -> None:
        """Count calls that were sent besides a prompt, and what they computed."""
        name = self._class_named(tenant)
        with self._lock:
            self._tally(name).reported.update(primes=calls, prime_tokens=tokens)

    def _tally(self, name: str) -> _ClassTotals:
        """Return the tally of a class; the lock is held."""
        if name not in self._tallies and len(self._tallies) >= MOST_CLASSES:
            name = OTHER_CLASS
        return self._tallies[name]

    def _class_named(self, tenant: str) -> str:
        """Return the class of a tenant; the user's function is called without the lock."""
        class_of = self._class_of
        if class_of is None:
            return ""
        name = self._classing.attempt(lambda: _checked_class(class_of(tenant)), lambda: OTHER_CLASS)
        return OTHER_CLASS if name == tenant else name

    def added_words(self, entry: SentEntry, cached: int) -> int:
        """Return about how many tokens of words on order and labels of a prompt are computed."""
        words, templates = 0, self._settings.templates
        best = templates.most_ranked
        is_ranked = entry.ranks[:best] == tuple(range(len(entry.ranks)))[:best]
        if not entry.is_later_turn and not is_ranked:
            words += self._settings.words(len(entry.keys), entry.is_labelled)
        if entry.is_labelled:
            reached = accumulate(entry.tokens)  # cached blocks have their labels, too
            words += templates.label_tokens * sum(tokens > cached for tokens in reached)
        return words


class _Sent(NamedTuple):
    logged: LoggedPrompt
    tenant_class: str
    expected_tokens: int
    left_out_tokens: int
    references: int
    said_tokens: int  # of words on what is left out
    seconds: float


class _Counts(NamedTuple):
    numbers: tuple[int, ...]  # as `_COUNTED` names them
    group: int = _WHOLE
    tokens: int = 0  # of its blocks, and those that their order saves
    by_order: int = 0


@dataclass(slots=True)
class _ClassTotals:
    """The numbers of one class of tenants; the meter's lock guards it."""

    numbers: Counter[str] = field(default_factory=Counter)  # fields of `Savings`
    reported: Counter[str] = field(default_factory=Counter)  # of `ReportedUsage`
    written: Counter[str] = field(default_factory=Counter)
    tokens: Counter[int] = field(default_factory=Counter)  # of first turns, by group
    by_order: Counter[int] = field(default_factory=Counter)  # saved, by group
    bill_as_retrieved: BilledTokens = field(default_factory=BilledTokens)
    bill_if_planned: BilledTokens = field(default_factory=BilledTokens)

    def count(self, counts: _Counts, times: int = 1) -> None:
        for name, number in zip(_COUNTED, (1, *counts.numbers), strict=True):
            self.numbers[name] += times * number
        self.tokens[counts.group] += times * counts.tokens
        self.by_order[counts.group] += times * counts.by_order

    def add(self, other: _ClassTotals) -> None:
        for one in fields(self):
            mine, others = getattr(self, one.name), getattr(other, one.name)
            if isinstance(mine, Counter):
                mine.update(others)
            else:
                setattr(self, one.name, mine + others)

    def saved_by_order(self) -> tuple[float, float]:
        """Return the tokens that the order saves, as a sample has it, and two standard errors."""
        tokens, saved = self.tokens, self.by_order
        rest = tokens.total() - tokens[_WHOLE]
        sampled, sample = rest - tokens[_OTHERS], [group for group in tokens if group >= 0]
        if not sampled or len(sample) < 2:
            return saved[_WHOLE], rest
        share = sum(saved[group] for group in sample) / sampled
        squares = sum((saved[group] - share * tokens[group]) ** 2 for group in sample)
        error = 2 * sqrt(squares * len(sample) / (len(sample) - 1)) / sampled
        return saved[_WHOLE] + share * rest, min(1.0, error) * rest

    def savings(self, mode: Mode, cache: CacheRules | None, **others: Any) -> Savings:
        bill = None
        if cache is not None:
            bill = ExpectedBill(self.bill_as_retrieved, self.bill_if_planned, cache)
        by_order, error = self.saved_by_order()
        numbers: dict[str, Any] = dict(self.numbers)
        if not (by_order or self.numbers["changed"] or self.reported["primes"]):
            numbers["word_tokens"] = 0  # nothing was sent otherwise, so nothing is saved or lost
        reported: dict[str, Any] = dict(self.reported)
        return Savings(
            **numbers,
            cached_as_retrieved=max(0, round(self.numbers["cached_as_sent"] - by_order)),
            error_tokens=round(error),
            mode=mode,
            reported=ReportedUsage(**reported, written=dict(self.written)),
            bill=bill,
            **others,
        )


class RetrievedOrder:
    """Estimates what would be cached if everything were sent as it was retrieved; not locked.

    Prompts share a prefix only if they begin with the same block. So all that begin with one block
    are followed, or none: the first 256 families, and one in 16 of the others, a sample. They have
    a share of the cache that is their share of all tokens.
    """

    def __init__(self, capacity_tokens: int | None, cache: CacheRules) -> None:
        self._cache = cache
        self._capacity = inf if capacity_tokens is None else capacity_tokens
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self.index = PrefixIndex(max_nodes=_MOST_NODES)
        self._times = count()
        self._families: set[tuple[object, BlockKey]] = set()
        self.differs = False  # from what is sent
        self._owed = 0.0
        self._tokens = self._followed_tokens = 0

    def follow(self, entry: SentEntry) -> tuple[int, int]:
        """Return what is cached of a request sent now, and its group."""
        self.differs |= entry.is_reordered
        blocks = entry.as_retrieved()
        path, weights = list(blocks)[:_MOST_OF_A_REQUEST], list(blocks.values())
        if not path:
            return 0, _WHOLE
        first, size = path[0], sum(weights)
        root = text_digest(entry.tenant), entry.system, entry.is_labelled
        family = root, first
        if len(self._families) < _WHOLE_FAMILIES:
            self._families.add(family)
        group = _OTHERS if first[0] % _ONE_IN else first[1] % _GROUPS
        if family in self._families:
            group = _WHOLE
        self._tokens += size
        if group == _OTHERS or not self._cache.serves_all:  # marks and states are not followed
            return 0, _OTHERS
        self._followed_tokens += size
        self._make_room()
        inserted = self.index.insert(root, path, weights[: len(path)], None, next(self._times))
        cached = sum(weights[: inserted.blocks_before])
        if self._cache.has_minimum:
            cached = self._cache.served(entry.front_tokens, cached)
        return cached, group

    def evict(self, tokens: int) -> None:
        """Forget a share of what the engine dropped, some later; below 0, of all beyond that."""
        owed = self._owed if tokens > 0 else self.index.tokens
        self._owed = max(0.0, min(owed + tokens * self._share(), self.index.tokens))
        self._make_room()

    def _share(self) -> float:
        return self._followed_tokens / self._tokens if self._tokens else 1.0

    def _make_room(self) -> None:
        index, limit = self.index, self._capacity * self._share()
        for _ in range(_MOST_AT_ONCE):
            excess = max(self._owed, index.tokens - limit)
            if excess <= 0 and index.block_count <= MOST_BLOCKS:
                break
            self._owed = max(0.0, self._owed - index.evict_oldest(max(excess, 1)))


class CacheExpectations:
    """Compares answers with what was expected, 200 at a time; not locked, its owner does that."""

    def __init__(self, cache: CacheRules, is_alone: bool) -> None:
        self._cache = cache
        self._remedy = _SHARE_A_LOG if is_alone else _OWN_LOGS
        self._said: set[bool] = set()
        self.forget()

    def forget(self) -> None:
        """Begin to count anew; what was said is not said again."""
        self._answers = self._expected = self._found = 0
        self._shares = 0.0

    def note(self, expected: int, confirmed: int) -> str | None:
        """Take note of an answer; return what the log says with a remedy, each kind once."""
        if expected < _LEAST_EXPECTED_TOKENS:  # may be less than a block of the engine
            return None
        self._answers += 1
        self._expected += expected
        self._found += confirmed
        self._shares += confirmed / expected  # no long prompt outweighs the others
        if self._answers < _ANSWERS:
            return None
        is_missing = self._shares / self._answers < _LEAST_SHARE
        expected, found = self._expected, self._found
        self.forget()
        if not is_missing or bool(found) in self._said:
            return None
        self._said.add(bool(found))
        if not found:
            return when_silent(self._cache, _ANSWERS, expected)
        told = expected, _ANSWERS, found, may_keep_states(self._cache), self._remedy
        return _MISSING % told


def confirmed_tokens(expected: int, before: int, prompt: int, cached: int) -> int:
    """Return how many of the expected tokens, behind others, an answer confirms to be cached."""
    due = min(expected + before, prompt)
    return expected * min(cached, due) // due if due else 0


def _class_function(tenant_class: TenantClasses | None) -> Callable[[str], str] | None:
    if isinstance(tenant_class, Mapping):
        known = dict(tenant_class)
        return lambda tenant: known.get(tenant, OTHER_CLASS)
    words = "a function from a tenant to its class, a mapping or None"
    check_function("tenant_class", tenant_class, words)
    return tenant_class


def _checked_class(name: object) -> str:
    if isinstance(name, str) and 0 < len(name) <= _LONGEST_CLASS and name.isprintable():
        return name
    raise InvalidRequestError(
        f"a tenant's class must be a printable name of up to {_LONGEST_CLASS} characters, not "
        f"{type(name).__name__}"
    )
