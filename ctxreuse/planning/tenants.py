"""What the planner knows about each tenant, and nothing of one tenant in another's.

An order reveals what others asked, so index, recent requests and conversations are kept apart.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ctxreuse.index.cooccurrence import Cooccurrence
from ctxreuse.index.explain import PromptLog
from ctxreuse.index.radix_tree import ContextIndex, Evicted, IndexStatistics
from ctxreuse.index.shown_blocks import Conversations
from ctxreuse.ordering.online import OnlineOrder


@dataclass(slots=True)
class TenantState:
    """One tenant's index, recent requests, the order that suits them, conversations, and log."""

    index: ContextIndex
    recent: Cooccurrence
    online: OnlineOrder
    conversations: Conversations
    log: PromptLog
    counted_nodes: int = 0


class Tenants:
    """The states of all tenants; the least recently active goes when they become too large.

    Each tenant's index is bounded by the whole capacity on its own. A common bound would let one
    tenant's requests push out another's, and so change its plans; the price is that tenants who
    share an engine expect more to be cached than is, until the engine reports evictions.

    Args:
        capacity_tokens: What the engine's cache holds, or None.
        max_nodes: Bound on the index nodes of all tenants together (some 500 bytes each).
        max_tenants: How many tenants are remembered.
    """

    def __init__(
        self,
        capacity_tokens: int | None,
        max_nodes: int = 1_000_000,
        max_tenants: int = 1_000,
    ) -> None:
        self._capacity_tokens = capacity_tokens
        self._max_nodes = max_nodes
        self._max_tenants = max_tenants
        self._nodes = 0
        self._states: OrderedDict[str, TenantState] = OrderedDict()

    def state(self, tenant: str) -> TenantState:
        """Return a tenant's state, a new one if it is not known."""
        state = self._states.get(tenant)
        if state is None:
            recent = Cooccurrence()
            state = self._states[tenant] = TenantState(
                ContextIndex(self._capacity_tokens, self._max_nodes),
                recent,
                OnlineOrder(recent),
                Conversations(),
                PromptLog(),
            )
            if len(self._states) > self._max_tenants:
                self._forget_oldest()
        else:
            self._states.move_to_end(tenant)
        return state

    def known(self, tenant: str) -> TenantState | None:
        """Return a tenant's state if there is one, without counting that as activity."""
        return self._states.get(tenant)

    def enforce_bounds(self, state: TenantState) -> None:
        """Forget idle tenants while the active one's growth takes all together over the bound."""
        nodes = state.index.statistics().nodes + state.online.size()
        self._nodes += nodes - state.counted_nodes
        state.counted_nodes = nodes
        while self._nodes > self._max_nodes and len(self._states) > 1:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        _, state = self._states.popitem(last=False)
        self._nodes -= state.counted_nodes

    def evict(self, request_ids: Iterable[str | int]) -> Evicted:
        """Forget requests in every tenant's index that holds them."""
        asked = tuple(dict.fromkeys(request_ids))
        unknown, tokens = set(asked), 0
        for index in self._indexes():
            evicted = index.evict(asked)
            tokens += evicted.tokens
            unknown.intersection_update(evicted.unknown)
        return Evicted(
            len(asked) - len(unknown), tokens, tuple(id_ for id_ in asked if id_ in unknown)
        )

    def evict_tokens(self, tokens: int) -> Evicted:
        """Shorten the least recently used leaves of all tenants: the engine's cache is one."""
        heap = [
            (oldest, number, index)
            for number, index in enumerate(self._indexes())
            if (oldest := index.oldest_use()) is not None
        ]
        heapq.heapify(heap)
        gone = 0
        while heap and gone < tokens:
            _, number, index = heapq.heappop(heap)
            gone += index.evict_oldest(tokens - gone)
            oldest = index.oldest_use()
            if oldest is not None:
                heapq.heappush(heap, (oldest, number, index))
        return Evicted(0, gone, ())

    def trim(self, request_id: str | int, blocks: int) -> Evicted:
        """Cut a request's path behind its first `blocks` blocks, in every index that holds it."""
        known = tokens = 0
        for index in self._indexes():
            evicted = index.trim(request_id, blocks)
            known += evicted.requests
            tokens += evicted.tokens
        return Evicted(min(known, 1), tokens, () if known else (request_id,))

    def statistics(self) -> IndexStatistics:
        """Return the size of all indexes together."""
        nodes = tokens = requests = 0
        for index in self._indexes():
            statistics = index.statistics()
            nodes += statistics.nodes
            tokens += statistics.tokens
            requests += statistics.requests
        return IndexStatistics(nodes, tokens, requests)

    def _indexes(self) -> Iterator[ContextIndex]:
        return (state.index for state in self._states.values())
