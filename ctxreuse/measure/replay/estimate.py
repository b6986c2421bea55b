"""Estimates what planning would save on a recorded trace: every policy, over cache sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ctxreuse.errors import BatchTooLargeError
from ctxreuse.measure.replay.policies import OURS_ONLINE, POLICIES, MeasuredPolicy
from ctxreuse.measure.replay.run_result import Run, RunResult
from ctxreuse.measure.replay.simulate import Replay
from ctxreuse.measure.traces.trace_files import TraceRequest, block_tokens
from ctxreuse.rules.cache_rules import CacheRules

_SIZES = (10_000, 30_000, 100_000, 300_000, 1_000_000, 3_000_000, 10_000_000)
"""Tokens that the caches of usual engines hold, from a small GPU with a large model upwards."""

_MOST_SIZES = 4


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """What a trace holds."""

    requests: int
    conversations: int
    turns: int
    blocks: int
    distinct_tokens: int
    block_tokens: int
    repeated_tokens: int

    @classmethod
    def of(cls, trace: Sequence[TraceRequest]) -> TraceSummary:
        """Return the summary of a trace."""
        seen: set[tuple[str, bytes]] = set()
        distinct: dict[bytes, int] = {}
        conversations = set()
        turns = sent = repeated = 0
        for request in trace:
            if request.conversation_id is not None:
                turns += 1
                conversations.add((request.tenant, request.conversation_id))
            for key, block in {block.key: block for block in request.blocks}.items():
                tokens = block_tokens(block)
                distinct[key] = tokens
                sent += tokens
                repeated += tokens * ((request.tenant, key) in seen)
                seen.add((request.tenant, key))
        talks, blocks, distinct_tokens = len(conversations), len(distinct), sum(distinct.values())
        return cls(len(trace), talks, turns, blocks, distinct_tokens, sent, repeated)

    @property
    def reuse_bound(self) -> float:
        """Share of the block tokens that had been sent before."""
        return self.repeated_tokens / self.block_tokens if self.block_tokens else 0.0

    def is_short(self, cache: CacheRules) -> bool:
        """Return whether blocks have, on average, fewer tokens than a block of a cache."""
        return self.distinct_tokens < cache.step_tokens * self.blocks

    def cache_sizes(self) -> list[int | None]:
        """Return cache sizes to try, in tokens: unlimited, and usual ones below `block_tokens`."""
        less = [size for size in _SIZES if size < self.block_tokens]
        return [None, *less[-_MOST_SIZES:]]


def estimate(
    replay: Replay, capacities: Sequence[int | None], policies: Sequence[MeasuredPolicy] = POLICIES
) -> Iterator[RunResult]:
    """Yield what each policy reaches, with and without de-duplication, with each cache."""
    for policy in policies:
        for deduplicate in deduplications(replay.trace) if policy.is_marked else (False,):
            for capacity in capacities:
                try:
                    yield replay.measure(Run(policy, replay.trace, deduplicate, capacity))
                except BatchTooLargeError:
                    break


def deduplications(trace: Sequence[TraceRequest]) -> tuple[bool, ...]:
    """Return whether to de-duplicate: both where there are conversations, else not."""
    has_turns = any(request.conversation_id is not None for request in trace)
    return (False, True) if has_turns else (False,)


def shown(results: Sequence[RunResult]) -> RunResult:
    """Return the result whose prompts a report shows: this package's, online, no cache limit."""
    ours = (one for one in reversed(results) if one.policy == OURS_ONLINE.name)
    return next(one for one in ours if one.capacity_tokens is None)
