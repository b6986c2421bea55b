"""Policies: the ways to order the blocks of requests that are measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from ctxreuse.context.cache_profile import VLLM, CacheProfile
from ctxreuse.planner import ReusePlanner, Strategy

TraceMode: TypeAlias = Literal["online", "offline"]


@dataclass(frozen=True, slots=True)
class Policy:
    """One way to order the requests' blocks."""

    name: str
    strategy: Strategy
    mode: TraceMode
    is_scheduled: bool = True
    is_annotated: bool = True
    is_marked: bool = True
    keep_best: bool = False

    def planner(
        self, *, deduplicate: bool, capacity_tokens: int | None, cache: CacheProfile = VLLM
    ) -> ReusePlanner:
        """Return a planner for an engine or a provider whose cache is empty."""
        return ReusePlanner(
            annotate=None if self.is_annotated else False,
            labels=self.labels(deduplicate=deduplicate),
            deduplicate=deduplicate,
            capacity_tokens=capacity_tokens,
            cache=cache,
            keep_best=self.keep_best,
        )

    def labels(self, *, deduplicate: bool) -> bool | None:
        """Return whether its prompts show labels: everywhere, or nowhere, so that all can share."""
        return None if self.strategy == "reuse" else deduplicate


AS_SENT = Policy("as retrieved", "none", "online")
PAPERS_ONLINE = Policy("papers' order, online", "paper", "online")
PAPERS_BATCH = Policy("papers' order, batch", "paper", "offline")
OURS_ONLINE = Policy("ctxreuse, online", "reuse", "online")
OURS_BATCH = Policy("ctxreuse, batch", "reuse", "offline")
TODAY = Policy("as sent today", "none", "online", is_marked=False)
POLICIES = (AS_SENT, PAPERS_ONLINE, PAPERS_BATCH, OURS_ONLINE, OURS_BATCH)
"""As it is, as the papers (RAGBoost and ContextPilot) and as this package have it."""


def keeping_best(policies: Sequence[Policy]) -> tuple[Policy, ...]:
    """Return policies of which our own keep the retriever's best block in front."""
    return tuple(replace(one, keep_best=one.strategy == "reuse") for one in policies)


def hosted_policies(cache: CacheProfile) -> tuple[Policy, ...]:
    """Return the policies that a bill compares: a provider's default, and ours."""
    ours = (AS_SENT, OURS_ONLINE, OURS_BATCH)
    return (TODAY, *ours) if cache.has_marks else ours
