"""Bounds the index by what an engine's cache can hold, if the engine reports no evictions."""

from __future__ import annotations

from collections import deque
from threading import Lock
from typing import NamedTuple

from ctxreuse.cache.metrics import PrefixCacheMetrics
from ctxreuse.context.checks import checked_integer, checked_kind
from ctxreuse.errors import InvalidRequestError
from ctxreuse.planner import ReusePlanner
from ctxreuse.planning.plan import Plan


class _Stored(NamedTuple):
    """What one answered request added: to the engine's cache, and of that to the index."""

    tokens: int
    block_tokens: int


class CapacityTracker:
    """Evicts from the planner's index what the engine must have evicted.

    The engine's cache holds whole prompts and answers: system texts, labels, annotations,
    questions, chat markup. The index counts the tokens of context blocks only, as the planner
    counts or estimates them. An index bounded by the engine's capacity would therefore remember
    far more than the engine holds, and plan for prefixes that are gone. So each answer is used as
    a measurement: it says how many tokens the engine stored anew (prompt less cached, and the
    answer), and the plan how many block tokens came into the index. Over the requests that fill
    the engine's cache once, the ratio of the two sums is the share of the cache that block tokens
    take; the index is cut to that share of the capacity, least recently used first over all
    tenants, because the engine has one cache and does the same.

    For an engine that publishes its evictions use `KVEventSync` instead. Requests that were planned
    count as sent; `forget` takes out those that failed. Threads may share it.

    Args:
        planner: The planner whose index is bounded.
        capacity_tokens: Tokens that the engine's cache holds.

    Raises:
        InvalidRequestError: wrong type or out of range.

    Example:
        >>> from ctxreuse import ContextBlock, ContextRequest, ReusePlanner
        >>> planner = ReusePlanner()
        >>> shadow = CapacityTracker(planner, capacity_tokens=1_000)
        >>> for number in range(9):
        ...     block = ContextBlock(id=number, text="...", tokens=150)
        ...     plan = planner.plan(ContextRequest([block], "Why?"))
        ...     shadow.observe(plan, prompt_tokens=200, cached_tokens=0, completion_tokens=50)
        >>> planner.statistics().tokens  # of 1,000 tokens, three in five are blocks
        600
    """

    def __init__(self, planner: ReusePlanner, capacity_tokens: int) -> None:
        self.planner = checked_kind("planner", planner, ReusePlanner, "a ReusePlanner")
        self.capacity_tokens = checked_integer("capacity_tokens", capacity_tokens)
        self._lock = Lock()
        self._recent: deque[_Stored] = deque()
        self._tokens = 0
        self._block_tokens = 0

    @classmethod
    def from_metrics(
        cls, planner: ReusePlanner, metrics: PrefixCacheMetrics | str
    ) -> CapacityTracker:
        """Return a tracker of the size that the engine reports.

        Args:
            planner: The planner whose index is bounded.
            metrics: The engine's `/metrics`, as text or parsed.

        Raises:
            InvalidRequestError: the metrics do not tell the size.
        """
        if not isinstance(metrics, PrefixCacheMetrics):
            metrics = PrefixCacheMetrics.parse(metrics)
        capacity = metrics.capacity_tokens
        if capacity is None:
            raise InvalidRequestError(
                "these metrics do not tell the size of the cache (vllm:cache_config_info); "
                "pass CapacityTracker(planner, capacity_tokens=...)"
            )
        return cls(planner, capacity)

    @property
    def block_share(self) -> float:
        """The measured share of the engine's cache that block tokens take; 1 at first."""
        return min(1.0, self._block_tokens / self._tokens) if self._tokens else 1.0

    def observe(
        self,
        plan: Plan,
        prompt_tokens: int,
        cached_tokens: int | None,
        completion_tokens: int = 0,
    ) -> None:
        """Note an answered request, and evict what it pushed out.

        Args:
            plan: The request's plan.
            prompt_tokens: Tokens of its prompt, as the engine counts them.
            cached_tokens: Those that came from the cache. None, for engines that do not tell,
                uses the plan's expectation.
            completion_tokens: Tokens of the answer.
        """
        expected = plan.expected_cached_tokens
        cached = min(prompt_tokens, expected if cached_tokens is None else cached_tokens)
        stored = _Stored(
            prompt_tokens - cached + completion_tokens,
            max(0, self.planner.block_tokens(plan.blocks) - expected),
        )
        with self._lock:
            self._recent.append(stored)
            self._tokens += stored.tokens
            self._block_tokens += stored.block_tokens
            while self._tokens - self._recent[0].tokens >= max(1, self.capacity_tokens):
                gone = self._recent.popleft()
                self._tokens -= gone.tokens
                self._block_tokens -= gone.block_tokens
            limit = int(self.capacity_tokens * self.block_share)
            excess = self.planner.statistics().tokens - limit
            if excess > 0:
                self.planner.evict_tokens(excess)

    def forget(self, plan: Plan) -> None:
        """Take out a request that failed: its prompt is not in the engine's cache."""
        self.planner.evict([plan.request_id])
