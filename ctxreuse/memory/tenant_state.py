"""What a planner remembers of one tenant, and how the oldest of each part of it goes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from ctxreuse.context.blocks import BlockKey
from ctxreuse.context.fork_safety import ForkSafeLock
from ctxreuse.memory.conversations import Conversations
from ctxreuse.memory.cooccurrence import Cooccurrence
from ctxreuse.memory.prefix_index import PrefixIndex, SearchBudget
from ctxreuse.memory.sent_log import SentLog
from ctxreuse.memory.token_ratio import TokenRatios
from ctxreuse.memory.written_prefixes import Beginning, WrittenPrefixes
from ctxreuse.rules.marks import MarkPrices


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much a planner remembers of all tenants; a long id counts by `id_size`."""

    tenants: int = 1_000
    index_nodes: int = 40_000
    index_blocks: int = 1_000_000
    request_ids: int = 160_000
    recent_blocks: int = 1_000_000
    conversations: int = 100_000
    shown_blocks: int = 200_000
    logged_blocks: int = 200_000
    token_counts: int = 100_000
    written_blocks: int = 200_000


class PathQuery(NamedTuple):
    """A request of which it is asked what stands in the cache."""

    root: bytes | None
    weights: Mapping[BlockKey, int]
    first: BlockKey | None  # what a path has to begin with; None is anything
    least: int  # tokens that a common beginning needs to save anything
    now: float | None
    budget: SearchBudget | None  # of a batch
    note_limit: Callable[[str], object]


class TenantState:
    """What is remembered of one tenant; who reads or changes it holds `lock`."""

    def __init__(
        self,
        name: str,
        capacity_tokens: int | None,
        max_nodes: int,
        prices: MarkPrices | None = None,
    ) -> None:
        self.name = name
        self._capacity_tokens = capacity_tokens
        self._max_nodes = max_nodes
        self._prices = prices
        self.lock = ForkSafeLock(self._forget)
        self.name_in_order = 0, name  # by the first request; the common lock guards it
        self.sizes = (0,) * len(DROP_OLDEST)  # when the lock was last released
        self._forget()

    def _forget(self) -> None:
        """Forget all but the sizes: the totals hold them still."""
        self.index = PrefixIndex(self._capacity_tokens, self._max_nodes)
        self.recent = Cooccurrence()
        self.conversations = Conversations()
        self.log = SentLog()
        # another tenant's counts would tell by time which texts it has
        self.token_counts: OrderedDict[BlockKey, int] = OrderedDict()
        self.prefixes = None if self._prices is None else WrittenPrefixes(self._prices)
        self.ratios: TokenRatios | None = None
        self.unnamed_requests = 0

    def beginning(self, asked: PathQuery) -> Beginning:
        """Return the path that is worth most in front, and what it saves there, in tokens."""
        if self.prefixes is not None:
            return self.prefixes.beginning(asked.root, asked.weights, asked.now, asked.first)
        match = self.index.search(asked.root, asked.weights, asked.budget, asked.first)
        if match.is_cut_short or match.is_greedy:
            match.note_limits(asked.note_limit)
        if match.weight < asked.least:
            return Beginning((), 0.0)
        sent = self.index.sent_prefix(asked.root, list(asked.weights))
        return Beginning(match.path, match.weight - sum(list(asked.weights.values())[:sent]))

    def readable(self, asked: PathQuery, words: int) -> tuple[BlockKey, ...]:
        """Return the longest path that can be read now, if that saves more than words cost."""
        if self.prefixes is not None:
            path = self.prefixes.written_path(asked.root, asked.weights, asked.now, asked.first)
            saved = sum(map(asked.weights.__getitem__, path)) * self.prefixes.saving
            return path if saved > words else ()
        path, gain = self.beginning(asked)
        if gain > words or not path:
            return path
        retrieved = list(asked.weights)
        return tuple(retrieved[: self.index.sent_prefix(asked.root, retrieved)])


def sizes_of(state: TenantState) -> tuple[int, ...]:
    """Return the size of each part in `DROP_OLDEST`; every plan asks."""
    index, conversations = state.index, state.conversations
    return (
        index.node_count,
        index.block_count,
        index.tokens,
        index.ids_size,
        state.recent.entries,
        conversations.size,
        conversations.shown_size,
        state.log.size,
        len(state.token_counts),
        0 if state.prefixes is None else state.prefixes.block_count,
    )


def _shrink_prefixes(state: TenantState) -> None:
    if state.prefixes is not None:
        state.prefixes.forget_oldest()


DROP_OLDEST: Final[dict[str, Callable[[TenantState], object]]] = {
    "index_nodes": lambda state: state.index.evict_oldest_leaf(),
    "index_blocks": lambda state: state.index.evict_oldest_leaf(),
    "index_tokens": lambda state: state.index.evict_oldest(1),
    "request_ids": lambda state: state.index.forget_oldest_request(),
    "recent_blocks": lambda state: state.recent.forget_oldest(),
    "conversations": lambda state: state.conversations.forget_oldest(),
    "shown_blocks": lambda state: state.conversations.forget_oldest(),
    "logged_blocks": lambda state: state.log.forget_oldest(),
    "token_counts": lambda state: state.token_counts.popitem(last=False),
    "written_blocks": _shrink_prefixes,
}
"""How the oldest entry of each part of `Bounds` goes, but for the number of tenants."""

PARTS = tuple(DROP_OLDEST)
