"""Runs through a simulated prefix cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ctxreuse.cache import BlockLevelCache, CacheUsage, PrefixCacheSimulator
from ctxreuse.evaluation.replay.plan_file import PlannedRequest
from ctxreuse.evaluation.replay.plan_trace import plan_under
from ctxreuse.evaluation.replay.policies import Policy, Run
from ctxreuse.evaluation.replay.run_result import RunResult
from ctxreuse.evaluation.replay.simulate import Tokenizer, simulate_blocks, simulate_tokens
from ctxreuse.evaluation.traces.trace_files import Corpus, TraceRequest

Outcome = RunResult
"""The former name of `RunResult`."""


@dataclass(frozen=True, slots=True)
class Replay:
    """A trace that is replayed under one policy after the other.

    Conversations are replayed, each turn answered "OK.".

    Attributes:
        trace: The requests in arrival order.
        corpus: Their blocks.
        tokenizer: Simulates whole prompts, token by token; None counts blocks by their tokens.
        advance: Called twice a request and run, for progress bars.
    """

    trace: Sequence[TraceRequest]
    corpus: Corpus
    tokenizer: Tokenizer | None = None
    advance: Callable[[], object] = lambda: None

    def of(self, trace: Sequence[TraceRequest]) -> Replay:
        """Return a replay of another trace of the same corpus."""
        return replace(self, trace=trace)

    def run(
        self, policy: Policy, *, deduplicate: bool = True, capacity_tokens: int | None = None
    ) -> RunResult:
        """Plan the trace, and serve it from a cache.

        Args:
            policy: How the blocks are ordered.
            deduplicate: Whether blocks that a conversation shows already are left out.
            capacity_tokens: What the cache holds; None is unlimited.

        Raises:
            BatchTooLargeError: The papers' algorithm cannot hold the batch.
        """
        return self.measure(Run(policy, self.trace, deduplicate, capacity_tokens))

    def measure(self, run: Run) -> RunResult:
        """Plan a run's own trace, which is of the same corpus, and serve it from a cache.

        Raises:
            BatchTooLargeError: The papers' algorithm cannot hold the batch.
        """
        reordered = run.reordered()
        planner = run.planner()
        import scipy.cluster.hierarchy  # noqa: F401 - else the first batch waits for it below

        started = time.perf_counter()
        planned = plan_under(
            run.policy, reordered.requests, planner, conversations=True, advance=self.advance
        )
        planning_s = time.perf_counter() - started
        usages = self.served(planned, run.capacity_tokens)
        return RunResult.of_run(run, reordered, planned, usages, planning_s)

    def served(
        self, planned: Sequence[PlannedRequest], capacity_tokens: int | None
    ) -> list[CacheUsage]:
        """Return what each request finds in a cache that is empty at first.

        Args:
            planned: The requests in execution order.
            capacity_tokens: What the cache holds; None is unlimited.
        """
        if self.tokenizer is None:
            served = simulate_blocks(planned, self.corpus, BlockLevelCache(capacity_tokens))
        else:
            cache = PrefixCacheSimulator(capacity_tokens)
            served = simulate_tokens(planned, self.corpus, cache, self.tokenizer)
        usages = []
        for usage in served:
            usages.append(usage)
            self.advance()
        return usages
