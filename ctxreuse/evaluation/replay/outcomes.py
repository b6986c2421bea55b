"""Policies run through a simulated prefix cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ctxreuse.cache import BlockLevelCache, CacheUsage, PrefixCacheSimulator
from ctxreuse.evaluation.replay.plan_file import PlannedRequest
from ctxreuse.evaluation.replay.plan_trace import plan_under
from ctxreuse.evaluation.replay.policies import Policy
from ctxreuse.evaluation.replay.simulate import Tokenizer, simulate_blocks, simulate_tokens
from ctxreuse.evaluation.traces.trace_files import Corpus, TraceRequest


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a policy reached with a cache.

    Attributes:
        policy: How the blocks were ordered.
        deduplicated: Whether blocks that a conversation shows already were left out.
        capacity_tokens: What the cache holds, which the planner knows; None is unlimited.
        planned: The plans in execution order.
        usages: What each of them found in the cache.
        planning_ms: Planning time a request, in milliseconds.
    """

    policy: Policy
    deduplicated: bool
    capacity_tokens: int | None
    planned: list[PlannedRequest]
    usages: list[CacheUsage]
    planning_ms: float

    @property
    def total(self) -> CacheUsage:
        """The usage of all requests together."""
        return sum(self.usages, CacheUsage())


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
    ) -> Outcome:
        """Plan the trace, and serve it from a cache.

        Args:
            policy: How the blocks are ordered.
            deduplicate: Whether blocks that a conversation shows already are left out.
            capacity_tokens: What the cache holds; None is unlimited.

        Raises:
            BatchTooLargeError: If the papers' algorithm cannot hold the batch.
        """
        planner = policy.planner(deduplicate=deduplicate, capacity_tokens=capacity_tokens)
        import scipy.cluster.hierarchy  # noqa: F401 - else the first batch waits for it below

        started = time.perf_counter()
        planned = plan_under(policy, self.trace, planner, conversations=True, advance=self.advance)
        planning_ms = 1e3 * (time.perf_counter() - started) / max(1, len(planned))
        usages = self.served(planned, capacity_tokens)
        return Outcome(policy, deduplicate, capacity_tokens, planned, usages, planning_ms)

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
