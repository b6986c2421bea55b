"""What a policy came to on some requests, as results keep it."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace
from typing import Any, Self

from ctxreuse.cache import CacheUsage
from ctxreuse.evaluation.replay.outcomes import Outcome

POLICIES_PART = "policies"
"""The part of a benchmark that compares policies; an estimate is nothing else."""

K_PART = "k"
"""The part that tries several numbers of blocks a request."""
SESSIONS_PART = "sessions"
"""The part that has several numbers of conversations take turns."""
ABLATIONS_PART = "ablations"
"""The part that leaves out one idea at a time."""


@dataclass(frozen=True, slots=True)
class Run:
    """One policy, once through the requests.

    Attributes:
        policy: Its name.
        strategy: The planner's strategy.
        mode: "online" or "offline".
        deduplicated: Whether blocks that a conversation shows already were left out.
        capacity_tokens: What the cache held; None is unlimited.
        planning_ms: Planning time a request, in milliseconds.
        prompt_tokens: Tokens of each request, in the order in which they ran.
        cached_tokens: Those of them that came from the cache.
        part: The part of a benchmark that it belongs to.
        k: Blocks a request at most; None where the trace says.
        sessions: Conversations at a time; None where the trace says.
        request_ids: Of the answered requests, where an engine was asked.
        first_token_s: Seconds from sending each request to its first token, where an engine was
            asked.
        scores: F1 and exact match of each answered question with a known right answer, where an
            engine was asked: request id, F1, exact match.
        failures: Requests that an engine did not answer.
    """

    policy: str
    strategy: str
    mode: str
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
    scores: tuple[tuple[str, float, float], ...] = ()
    failures: int = 0

    @classmethod
    def of(cls, outcome: Outcome, **more: Any) -> Self:
        """Return the result of a simulated run.

        Args:
            outcome: What came of it.
            **more: Attributes that the outcome does not say.
        """
        return cls(
            policy=outcome.policy.name,
            strategy=outcome.policy.strategy,
            mode=outcome.policy.mode,
            deduplicated=outcome.deduplicated,
            capacity_tokens=outcome.capacity_tokens,
            planning_ms=round(outcome.planning_ms, 4),
            prompt_tokens=tuple(usage.prompt_tokens for usage in outcome.usages),
            cached_tokens=tuple(usage.cached_tokens for usage in outcome.usages),
            **more,
        )

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """Return a run of what `dataclasses.asdict` made of one."""
        lists = ("prompt_tokens", "cached_tokens", "request_ids", "first_token_s")
        tuples: dict[str, Any] = {name: tuple(fields.get(name, ())) for name in lists}
        scores = tuple((str(one), float(f1), float(em)) for one, f1, em in fields.get("scores", ()))
        return cls(**fields | tuples | {"scores": scores})

    @property
    def usages(self) -> list[CacheUsage]:
        """What each request found in the cache."""
        return list(map(CacheUsage, self.prompt_tokens, self.cached_tokens))

    @property
    def total(self) -> CacheUsage:
        """The usage of all requests together."""
        return CacheUsage(sum(self.prompt_tokens), sum(self.cached_tokens))

    def only(self, request_ids: Set[str]) -> Run:
        """Return the part of an engine's run that has to do with some requests."""
        places = [at for at, one in enumerate(self.request_ids) if one in request_ids]
        parts: dict[str, Any] = {
            name: tuple(getattr(self, name)[at] for at in places)
            for name in ("prompt_tokens", "cached_tokens", "request_ids", "first_token_s")
        }
        scores = tuple(score for score in self.scores if score[0] in request_ids)
        return replace(self, scores=scores, **parts)
