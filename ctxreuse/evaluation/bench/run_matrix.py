"""Which runs a benchmark has: policies, cache sizes, blocks a request, sessions, and ablations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ctxreuse.evaluation.bench.workload import USUAL_SESSIONS, Workload
from ctxreuse.evaluation.replay.estimate import cut, deduplications
from ctxreuse.evaluation.replay.policies import (
    AS_SENT,
    OURS_BATCH,
    OURS_ONLINE,
    PAPERS_BATCH,
    Part,
    Policy,
    Run,
)
from ctxreuse.evaluation.traces.trace_files import TraceRequest

SESSIONS = (2, 4, 8, 16, 32)
"""Conversations at a time, as in RAGBoost's Table 2 (b)."""


@dataclass(frozen=True, slots=True)
class RunMatrix:
    """The runs of a benchmark.

    Attributes:
        workload: What is sent.
        policies: The policies that are compared; as retrieved first.
        capacities: Tokens that the cache holds; None is unlimited, and first.
        k: Blocks a request, where nothing else is said.
        ks: Numbers of blocks of the part that tries several.
        sessions: Numbers of sessions of the part that tries several.
        seed: Of the order of arrival; None is that of the files, where it says nothing of sessions.
    """

    workload: Workload
    policies: Sequence[Policy]
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

    def runs(self, parts: Sequence[Part]) -> list[Run]:
        """Return the runs of some parts."""
        makers: dict[Part, Callable[[], Iterator[Run]]] = {
            Part.policies: self._policies,
            Part.k: self._ks,
            Part.sessions: self._sessions,
            Part.ablations: self._ablations,
        }
        return [run for part in parts for run in makers[part]()]

    def _run(self, part: Part, policy: Policy, trace: Sequence[TraceRequest]) -> Run:
        by_chance = self.workload.has_turns and self.seed is not None
        usual = USUAL_SESSIONS if by_chance else None
        return Run(policy, trace, self.workload.has_turns, None, part, self.k, usual)

    def _policies(self) -> Iterator[Run]:
        trace = self.trace()
        for policy in self.policies:
            run = self._run(Part.policies, policy, trace)
            for deduplicate in deduplications(trace):
                for capacity in self.capacities:
                    yield replace(run, deduplicate=deduplicate, capacity_tokens=capacity)

    def _ks(self) -> Iterator[Run]:
        for k in self.ks:
            trace = self.trace(k)
            for policy in self.policies:
                yield replace(self._run(Part.k, policy, trace), k=k)

    def _sessions(self) -> Iterator[Run]:
        """Yield runs of conversations that take turns, with the smallest cache."""
        if not self.workload.has_turns:
            return
        for sessions in self.sessions:
            trace = cut(self.workload.trace(sessions, self.seed or 0), self.k)
            for name, policy, deduplicate in (
                (AS_SENT.name, AS_SENT, False),
                (f"{OURS_ONLINE.name}, not de-duplicated", OURS_ONLINE, False),
                (OURS_ONLINE.name, OURS_ONLINE, True),
            ):
                yield replace(
                    self._run(Part.sessions, replace(policy, name=name), trace),
                    deduplicate=deduplicate,
                    capacity_tokens=self._smallest_cache,
                    sessions=sessions,
                )

    def _ablations(self) -> Iterator[Run]:
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
    ) -> Iterator[Run]:
        run = self._run(Part.ablations, policy, trace)
        for capacity in dict.fromkeys((None, self._smallest_cache)):
            yield replace(run, deduplicate=deduplicate, capacity_tokens=capacity)

    @property
    def _smallest_cache(self) -> int | None:
        """Tokens of the smallest cache; None where all are unlimited."""
        return min((size for size in self.capacities if size is not None), default=None)
