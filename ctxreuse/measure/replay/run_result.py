"""A run that is measured, a policy on a trace, and its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np

from ctxreuse.cache import CacheUsage
from ctxreuse.measure.replay.plan_file import PlannedRequest
from ctxreuse.measure.replay.policies import MeasuredPolicy, TraceMode
from ctxreuse.measure.replay.prompts import said_tokens
from ctxreuse.measure.traces.trace_files import TraceRequest
from ctxreuse.planner import ReusePlanner
from ctxreuse.rules.billed_tokens import BilledTokens
from ctxreuse.rules.cache_rules import DEFAULT_CACHE, CacheRules

_BY_REQUEST = ("prompt_tokens", "cached_tokens", "request_ids", "first_token_s", "answers")

POLICIES_PART = "policies"
"""The part of what is measured that compares policies; benchmarks have others."""


@dataclass(frozen=True, slots=True)
class Run:
    """A policy that is to be measured on a trace; `RunResult` is what comes out."""

    policy: MeasuredPolicy
    trace: Sequence[TraceRequest]
    deduplicate: bool = True
    capacity_tokens: int | None = None
    part: str = POLICIES_PART
    k: int | None = None
    sessions: int | None = None
    at_once: int = 1  # conversations that a live engine is asked at a time

    def planner(self, cache: CacheRules = DEFAULT_CACHE) -> ReusePlanner:
        """Return a planner for an engine or a provider whose cache, of these rules, is empty."""
        return self.policy.planner(
            deduplicate=self.deduplicate, capacity_tokens=self.capacity_tokens, cache=cache
        )


@dataclass(frozen=True, slots=True)
class RunBill:
    """What a hosted cache charges for a run, besides the tokens that it serves."""

    written: Mapping[str, int] = field(default_factory=dict)
    never_read: int = 0


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a policy reached, once through the requests."""

    policy: str
    strategy: str
    mode: TraceMode
    deduplicated: bool
    capacity_tokens: int | None
    planning_ms: float
    prompt_tokens: tuple[int, ...]
    cached_tokens: tuple[int, ...]
    part: str = POLICIES_PART
    k: int | None = None
    sessions: int | None = None
    request_ids: tuple[str, ...] = ()
    first_token_s: tuple[float, ...] = ()
    answers: tuple[str, ...] = ()
    failures: int = 0
    word_tokens: int = 0
    bill: RunBill | None = None
    planned: Sequence[PlannedRequest] = field(default=(), compare=False, repr=False)
    notes: tuple[str, ...] = field(default=(), compare=False, repr=False)

    @classmethod
    def of_run(
        cls,
        run: Run,
        planned: Sequence[PlannedRequest],
        usages: Sequence[CacheUsage],
        planning_s: float,
        **more: Any,
    ) -> Self:
        """Return the result of a run."""
        return cls(
            policy=run.policy.name,
            strategy=run.policy.order_name,
            mode=run.policy.mode,
            deduplicated=run.deduplicate,
            capacity_tokens=run.capacity_tokens,
            planning_ms=round(1e3 * planning_s / max(1, len(planned)), 4),
            prompt_tokens=tuple(usage.prompt_tokens for usage in usages),
            cached_tokens=tuple(usage.cached_tokens for usage in usages),
            part=run.part,
            k=run.k,
            sessions=run.sessions,
            word_tokens=sum(map(said_tokens, planned)),
            planned=planned,
            **more,
        )

    @property
    def usages(self) -> list[CacheUsage]:
        """What each request found in the cache."""
        return list(map(CacheUsage, self.prompt_tokens, self.cached_tokens))

    @property
    def total(self) -> CacheUsage:
        """The usage of all requests together."""
        return CacheUsage(sum(self.prompt_tokens), sum(self.cached_tokens))

    @property
    def billed(self) -> BilledTokens:
        """The tokens of all requests together by what is paid for them."""
        total, written = self.total, self.bill.written if self.bill is not None else {}
        uncached = total.prefilled_tokens - sum(written.values())
        return BilledTokens(uncached, total.cached_tokens, written)

    def first_token_percentile_s(self, share: float) -> float:
        """Return a percentile of an engine's times to the first token, in seconds."""
        return float(np.percentile(self.first_token_s, share))

    def only(self, request_ids: Set[str]) -> Self:
        """Return the part of an engine's result that is about some requests."""
        places = [at for at, one in enumerate(self.request_ids) if one in request_ids]
        columns = {name: getattr(self, name) for name in _BY_REQUEST}
        kept: dict[str, Any] = {
            name: tuple(values[at] for at in places) for name, values in columns.items() if values
        }
        return replace(self, **kept)
