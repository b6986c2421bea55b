"""What a benchmark tries: policies, cache sizes, blocks a request, sessions, and ablations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from ctxreuse.evaluation.bench.baselines import Contender
from ctxreuse.evaluation.bench.workload import USUAL_SESSIONS, Workload
from ctxreuse.evaluation.replay.estimate import cut, deduplications
from ctxreuse.evaluation.replay.outcomes import Outcome
from ctxreuse.evaluation.replay.policies import (
    AS_SENT,
    OURS_BATCH,
    OURS_ONLINE,
    PAPERS_BATCH,
    Policy,
)
from ctxreuse.evaluation.results.runs import (
    ABLATIONS_PART,
    K_PART,
    POLICIES_PART,
    SESSIONS_PART,
    Run,
)
from ctxreuse.evaluation.traces.trace_files import TraceRequest

KS = (3, 5, 10, 15)
"""Blocks a request that are usually tried; the papers' evaluation goes from 3 to 15."""

SESSIONS = (2, 4, 8, 16, 32)
"""Conversations at a time, as in RAGBoost's Table 2 (b)."""


class Part(StrEnum):
    """A part of a benchmark."""

    policies = POLICIES_PART
    k = K_PART
    sessions = SESSIONS_PART
    ablations = ABLATIONS_PART


@dataclass(frozen=True, slots=True)
class Trial:
    """One contender, once through the requests.

    Attributes:
        part: What it belongs to.
        contender: Who orders.
        trace: The requests in arrival order.
        deduplicate: Whether blocks that a conversation shows already are left out.
        capacity_tokens: What the cache holds; None is unlimited.
        k: Blocks a request at most.
        sessions: Conversations at a time; None where all questions stand alone.
    """

    part: Part
    contender: Contender
    trace: Sequence[TraceRequest]
    deduplicate: bool
    capacity_tokens: int | None
    k: int
    sessions: int | None


@dataclass(frozen=True, slots=True)
class Tried:
    """A trial and what came of it.

    Attributes:
        trial: What was tried.
        run: What came of it; None if the policy cannot hold the trace as one batch.
        outcome: What was sent and found; None if nothing was simulated.
        wrong: Requests for which a contender returned other blocks than it was given.
        failures: Why an engine did not answer requests, and how many each time.
    """

    trial: Trial
    run: Run | None
    outcome: Outcome | None = None
    wrong: int = 0
    failures: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Matrix:
    """What is tried.

    Attributes:
        workload: What is sent.
        contenders: Who takes part; as retrieved first.
        capacities: Tokens that the cache holds; None is unlimited, and first.
        k: Blocks a request, where nothing else is said.
        ks: Numbers of blocks of the part that tries several.
        sessions: Numbers of sessions of the part that tries several.
        seed: Of the order of arrival; None is that of the files, where it says nothing of sessions.
    """

    workload: Workload
    contenders: Sequence[Contender]
    capacities: Sequence[int | None]
    k: int
    ks: Sequence[int]
    sessions: Sequence[int]
    seed: int | None

    def trace(self, k: int | None = None) -> list[TraceRequest]:
        """Return the requests in the usual order of arrival.

        Args:
            k: Blocks a request at most; the usual number by default.
        """
        if self.seed is None:
            trace = self.workload.in_order()
        else:
            trace = self.workload.trace(USUAL_SESSIONS, self.seed)
        return cut(trace, self.k if k is None else k)

    def trials(self, parts: Sequence[Part]) -> list[Trial]:
        """Return what is tried in some parts."""
        makers: dict[Part, Callable[[], Iterator[Trial]]] = {
            Part.policies: self._policies,
            Part.k: self._ks,
            Part.sessions: self._sessions,
            Part.ablations: self._ablations,
        }
        return [trial for part in parts for trial in makers[part]()]

    def _trial(self, part: Part, contender: Contender, trace: Sequence[TraceRequest]) -> Trial:
        by_chance = self.workload.has_turns and self.seed is not None
        usual = USUAL_SESSIONS if by_chance else None
        return Trial(part, contender, trace, self.workload.has_turns, None, self.k, usual)

    def _policies(self) -> Iterator[Trial]:
        trace = self.trace()
        for contender in self.contenders:
            trial = self._trial(Part.policies, contender, trace)
            for deduplicate in deduplications(trace):
                for capacity in self.capacities:
                    yield replace(trial, deduplicate=deduplicate, capacity_tokens=capacity)

    def _ks(self) -> Iterator[Trial]:
        for k in self.ks:
            trace = self.trace(k)
            for contender in self.contenders:
                yield replace(self._trial(Part.k, contender, trace), k=k)

    def _sessions(self) -> Iterator[Trial]:
        """Yield what takes turns: with a cache that loses something, where there is one."""
        if not self.workload.has_turns:
            return
        for sessions in self.sessions:
            trace = cut(self.workload.trace(sessions, self.seed or 0), self.k)
            for name, policy, deduplicate in (
                (AS_SENT.name, AS_SENT, False),
                (f"{OURS_ONLINE.name}, not de-duplicated", OURS_ONLINE, False),
                (OURS_ONLINE.name, OURS_ONLINE, True),
            ):
                trial = self._trial(Part.sessions, Contender(replace(policy, name=name)), trace)
                yield replace(
                    trial,
                    deduplicate=deduplicate,
                    capacity_tokens=self._small,
                    sessions=sessions,
                )

    def _ablations(self) -> Iterator[Trial]:
        """Yield the batch and the online order with one idea less each; section 7.3, Table 5."""
        trace = self.trace()
        for policy in (PAPERS_BATCH, OURS_BATCH, OURS_ONLINE):
            ways = [policy]
            if policy.mode == "offline":
                name = f"{policy.name}, ordered but not scheduled"
                ways.append(replace(policy, name=name, is_scheduled=False))
            name = f"{policy.name}, not annotated"
            ways.append(replace(policy, name=name, is_annotated=False))
            for way in ways:
                yield from self._in_both_caches(way, self.workload.has_turns, trace)
            if self.workload.has_turns:
                whole = replace(policy, name=f"{policy.name}, not de-duplicated")
                yield from self._in_both_caches(whole, False, trace)

    def _in_both_caches(
        self, policy: Policy, deduplicate: bool, trace: Sequence[TraceRequest]
    ) -> Iterator[Trial]:
        trial = self._trial(Part.ablations, Contender(policy), trace)
        for capacity in dict.fromkeys((None, self._small)):
            yield replace(trial, deduplicate=deduplicate, capacity_tokens=capacity)

    @property
    def _small(self) -> int | None:
        """The smallest cache that is tried; None where all are unlimited."""
        return min((size for size in self.capacities if size is not None), default=None)
