"""Bounds the index by what an engine's cache can hold, if the engine reports no evictions."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from ctxreuse.cache.metrics import PrefixCacheMetrics
from ctxreuse.context.blocks import BlockKey
from ctxreuse.context.checks import checked_integer, checked_kind
from ctxreuse.context.fork_safety import ForkSafeLock
from ctxreuse.context.lru_map import PartSize
from ctxreuse.errors import InvalidRequestError
from ctxreuse.planner import ReusePlanner
from ctxreuse.planning.plan import AnsweredCall

_MOST_REQUESTS = 4_096
"""The most answers that a measurement looks back on, however little each of them stored."""
_MOST_BLOCKS = 500_000  # the most blocks that these answers may have together, about 250 bytes each

_Block: TypeAlias = tuple[str, BlockKey]  # a block of a tenant; that of another one is not the same


class _ObservedPrompt(NamedTuple):
    """What one answered request stored anew and found, in the engine's cache."""

    tokens: int  # that it stored
    blocks: tuple[tuple[_Block, int, bool], ...]  # with its tokens, and whether it was found


@dataclass(slots=True)
class _Use:
    """How often the latest requests stored a block, and how often they found it."""

    tokens: int
    stored: int = 0
    found: int = 0


class CapacityTracker:
    """Evicts from the planner's index what the engine must have evicted.

    The engine's cache holds whole prompts and answers, the index context blocks only. So over the
    latest answers that fill the cache once, the share of block tokens in what was stored anew is
    measured; blocks that were found are there for certain. The index is cut to that share of the
    capacity, least recently used first over all tenants.

    It hears of each answer of which the planner is told: by clients, pools, wrapped models, and
    `planner.report_usage`. For an engine that publishes its evictions use `KVEventSync` instead.

    Args:
        planner: The planner whose index is bounded; one tracker at a time, the last one made.
        capacity_tokens: Tokens that the engine's cache holds.

    Example:
        >>> from ctxreuse import ContextBlock, ContextRequest, ReusePlanner
        >>> planner = ReusePlanner()
        >>> _ = CapacityTracker(planner, capacity_tokens=1_000)
        >>> for number in range(9):
        ...     block = ContextBlock(id=number, text="...", tokens=150)
        ...     plan = planner.plan(ContextRequest([block], "Why?"))
        ...     planner.report_usage(plan, 200, 0, completion_tokens=50)
        >>> planner.statistics().tokens  # of 1,000 tokens, three in five are blocks
        600
    """

    def __init__(self, planner: ReusePlanner, capacity_tokens: int) -> None:
        self.planner = checked_kind("planner", planner, ReusePlanner, "a ReusePlanner")
        self.capacity_tokens = checked_integer("capacity_tokens", capacity_tokens)
        self._lock = ForkSafeLock(self._forget_answers)
        self._forget_answers()
        planner.capacity_tracker = self

    def _forget_answers(self) -> None:
        self._recent: deque[_ObservedPrompt] = deque()
        self._recent_blocks = 0
        self._uses: dict[_Block, _Use] = {}
        self._tokens = 0
        self._found = self._stored_and_found = self._only_stored = 0  # block tokens

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.planner, self.capacity_tokens)

    @classmethod
    def from_metrics(
        cls, planner: ReusePlanner, metrics: PrefixCacheMetrics | str
    ) -> CapacityTracker:
        """Return a tracker of the size that `/metrics` tell; InvalidRequestError if they do not."""
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
    def parts(self) -> dict[str, PartSize]:
        """How many answers and blocks a measurement looks back on, and the bounds."""
        with self._lock:
            return {
                "measured_answers": PartSize(len(self._recent), _MOST_REQUESTS),
                "measured_blocks": PartSize(self._recent_blocks, _MOST_BLOCKS),
            }

    @property
    def block_share(self) -> float:
        """The measured share of the engine's cache that block tokens take; 1 at first."""
        with self._lock:  # what was found, and other blocks in the rest of the cache
            rest = max(self._tokens - self._stored_and_found, self._only_stored)
            other = self._only_stored / rest if rest else float(not self._tokens)
            return other + (1 - other) * min(1.0, self._found / max(1, self.capacity_tokens))

    def answered(self, call: AnsweredCall) -> None:
        """Evict what an answered request pushed out; unknown cached tokens are those expected."""
        checked_kind("call", call, AnsweredCall, "an AnsweredCall")
        if call.plans and call.prompt_tokens is not None:
            measured = self._measured(call, call.prompt_tokens)
            with self._lock:
                self._recent.append(measured)
                self._count(measured, 1)
                capacity = max(1, self.capacity_tokens)
                while (
                    self._tokens - self._recent[0].tokens >= capacity
                    or len(self._recent) > _MOST_REQUESTS
                    or self._recent_blocks > _MOST_BLOCKS
                ):
                    self._count(self._recent.popleft(), -1)
                may_stay = int(self.capacity_tokens * self.block_share)
                if (excess := self.planner.statistics().tokens - may_stay) > 0:
                    self.planner.evict_tokens(excess)

    def _measured(self, call: AnsweredCall, prompt: int) -> _ObservedPrompt:
        expected, cached = call.expected_cached_tokens, call.cached_tokens
        cached = min(prompt, expected if cached is None else cached)
        blocks: list[tuple[_Block, int, bool]] = []
        for plan in call.plans:
            # what was expected and is gone was stored anew
            found = min(plan.expected_cached_tokens, cached)
            tenant, end = plan.request.tenant, 0
            for block in plan.blocks[: _MOST_BLOCKS - len(blocks)]:
                tokens = self.planner.block_tokens([block], tenant)
                end += tokens
                blocks.append(((tenant, block.key), tokens, end <= found))
        return _ObservedPrompt(prompt - cached + (call.completion_tokens or 0), tuple(blocks))

    def _count(self, measured: _ObservedPrompt, times: int) -> None:
        """Count a measurement in (1) or out (-1)."""
        self._tokens += times * measured.tokens
        self._recent_blocks += times * len(measured.blocks)
        for block, tokens, was_found in measured.blocks:
            use = self._uses.setdefault(block, _Use(tokens))
            self._sum_up(use, -1)
            use.found += times * was_found
            use.stored += times * (not was_found)
            self._sum_up(use, 1)
            if not (use.found or use.stored):
                del self._uses[block]

    def _sum_up(self, use: _Use, times: int) -> None:
        stored = times * use.tokens * use.stored
        if use.found:
            self._found += times * use.tokens
            self._stored_and_found += stored
        else:
            self._only_stored += stored
