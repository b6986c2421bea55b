"""What a planner remembers of one tenant, and how the oldest of each part of it goes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ctxreuse.context.blocks import BlockKey
from ctxreuse.context.fork_safety import ForkSafeLock
from ctxreuse.memory.conversations import Conversations
from ctxreuse.memory.prefix_index import PrefixIndex
from ctxreuse.memory.sent_log import SentLog
from ctxreuse.ordering.marks import MarkPrices
from ctxreuse.ordering.online import Cooccurrence
from ctxreuse.ordering.written_prefixes import WrittenPrefixes
from ctxreuse.planning.token_ratio import TokenRatios


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


class TenantState:
    """What is remembered of one tenant; who reads or changes it holds `lock`."""

    def __init__(
        self,
        name: str,
        capacity_tokens: int | None,
        max_nodes: int,
        prices: MarkPrices | None = None,
        keeps_best: bool = False,
    ) -> None:
        self.name = name
        self._capacity_tokens = capacity_tokens
        self._max_nodes = max_nodes
        self._prices = prices
        self.keeps_best = keeps_best
        self.lock = ForkSafeLock(self._forget)
        self.name_in_order = 0, name  # by the first request; the common lock guards it
        self.sizes = (0,) * len(DROP_OLDEST)  # when the lock was last released
        self.oldest_use: int | None = None  # of the index, likewise
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
