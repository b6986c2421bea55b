"""Shadow mode: what planning would save, while everything is sent as it was retrieved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import NamedTuple, Protocol

from ctxreuse.context.blocks import ContextRequest
from ctxreuse.planning.plan import BatchPlan, Plan, Strategy


class Planning(Protocol):
    """What a shadow needs of a planner."""

    def plan(self, request: ContextRequest, strategy: Strategy) -> Plan:
        """Plan one request."""
        ...

    def plan_batch(self, requests: list[ContextRequest], strategy: Strategy) -> BatchPlan:
        """Plan requests that are known together."""
        ...

    def evict(self, request_ids: list[str | int]) -> object:
        """Forget requests."""
        ...

    def evict_tokens(self, tokens: int) -> object:
        """Forget so many tokens."""
        ...

    def trim(self, request_id: str | int, blocks: int) -> object:
        """Forget the end of a request."""
        ...


@dataclass(frozen=True, slots=True)
class Savings:
    """What planning would have saved so far; tokens are block tokens.

    Attributes:
        requests: Requests that were sent.
        changed: Those that would have been sent otherwise: in another order, or without blocks that
            their conversation shows already.
        block_tokens: Tokens of their blocks.
        cached_as_sent: Of these, expected to be served from the cache as they were sent.
        cached_if_planned: The same, had they been planned.
        left_out: Tokens of the blocks that would have been left out.

    Example:
        >>> Savings(requests=2, changed=1, block_tokens=400, cached_if_planned=100).saved_share
        0.25
    """

    requests: int = 0
    changed: int = 0
    block_tokens: int = 0
    cached_as_sent: int = 0
    cached_if_planned: int = 0
    left_out: int = 0

    @property
    def prefilled_as_sent(self) -> int:
        """Block tokens that the engine had to compute."""
        return self.block_tokens - self.cached_as_sent

    @property
    def prefilled_if_planned(self) -> int:
        """Block tokens that it would have had to compute."""
        return self.block_tokens - self.left_out - self.cached_if_planned

    @property
    def saved_share(self) -> float:
        """Share of the computed block tokens that planning would have saved; below 0: cost."""
        before = self.prefilled_as_sent
        return (before - self.prefilled_if_planned) / before if before else 0.0


class Arrived(NamedTuple):
    """A request as it was sent, with the tokens of its blocks, and of those shown already."""

    sent: Plan
    tokens: int
    shown: int


class Shadow:
    """Plans beside a planner what that sends as retrieved, and counts.

    Args:
        planner: A planner of its own, which sees what would have been sent.
    """

    def __init__(self, planner: Planning) -> None:
        self.planner = planner
        self.savings = Savings()
        self._lock = Lock()

    def note(self, arrived: Sequence[Arrived], strategy: Strategy) -> None:
        """Count requests that were sent.

        Args:
            arrived: One request, or those that were known together.
            strategy: How they would have been planned.
        """
        later_turns = [one for one in arrived if one.sent.request.history]
        for one in later_turns:  # nothing changes but that blocks are left out
            cached = min(one.sent.expected_cached_tokens, one.tokens - one.shown)
            self._add(one, cached, is_changed=one.shown > 0)
        first_turns = [one for one in arrived if not one.sent.request.history]
        requests = [_with_id(one.sent) for one in first_turns]
        if len(arrived) == 1:
            plans = [self.planner.plan(request, strategy) for request in requests]
        else:
            plans = list(self.planner.plan_batch(requests, strategy).in_input_order())
        for one, plan in zip(first_turns, plans, strict=True):
            is_changed = plan.blocks != one.sent.blocks
            self._add(one, plan.expected_cached_tokens, is_changed=is_changed)

    def _add(self, one: Arrived, cached: int, *, is_changed: bool) -> None:
        with self._lock:
            before = self.savings
            self.savings = Savings(
                before.requests + 1,
                before.changed + is_changed,
                before.block_tokens + one.tokens,
                before.cached_as_sent + one.sent.expected_cached_tokens,
                before.cached_if_planned + cached,
                before.left_out + one.shown,
            )


def _with_id(plan: Plan) -> ContextRequest:
    """Return a plan's request with the id that it was sent under, which evictions name."""
    return replace(plan.request, request_id=plan.request_id)
