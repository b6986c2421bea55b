"""What a planner remembers of each tenant, within bounds that all tenants share.

An order reveals what others asked, so nothing here is common to two tenants but the bounds.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import NamedTuple

from ctxreuse.context.blocks import BlockKey, id_size
from ctxreuse.index.explain import PromptLog
from ctxreuse.index.radix_tree import ContextIndex, Evicted, IndexStatistics, PartSize
from ctxreuse.index.shown_blocks import Conversations
from ctxreuse.ordering.online import Cooccurrence, OnlineOrder


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much a planner remembers of all tenants together.

    A long id counts once for every 64 characters (`id_size`). docs/guides/security.md says what
    each entry weighs in bytes.

    Attributes:
        tenants: Tenants, by their names.
        index_nodes: Nodes of the context index, and of the trials of how to continue an order.
        index_blocks: Blocks that these nodes hold.
        request_ids: Ids of requests, for eviction.
        recent_blocks: Blocks of the recent requests that arriving ones are ordered by.
        conversations: Conversations, by their ids.
        shown_blocks: Blocks that conversations were shown.
        logged_blocks: Blocks of the prompts that `Plan.explain` compares with.
        token_counts: Blocks whose tokens were counted.
    """

    tenants: int = 1_000
    index_nodes: int = 1_000_000
    index_blocks: int = 4_000_000
    request_ids: int = 1_000_000
    recent_blocks: int = 1_000_000
    conversations: int = 100_000
    shown_blocks: int = 200_000
    logged_blocks: int = 500_000
    token_counts: int = 100_000


@dataclass(slots=True)
class TenantState:
    """What is remembered of one tenant.

    Attributes:
        name: The tenant.
        index: What was sent.
        online: The order of arriving requests.
        conversations: What conversations were shown.
        log: The latest prompts.
        token_counts: Tokens of the blocks that were counted for this tenant. Another tenant's
            counts would tell by time which texts it has.
        request_numbers: Numbers for requests without an id. A common count would tell how many
            requests others send.
        sizes: The size of each part, as last measured.
    """

    name: str
    index: ContextIndex
    online: OnlineOrder
    conversations: Conversations
    log: PromptLog
    token_counts: dict[BlockKey, int] = field(default_factory=dict)
    request_numbers: Iterator[int] = field(default_factory=count)
    sizes: dict[str, int] = field(default_factory=dict)


class _Part(NamedTuple):
    """A part of a tenant's state that grows: how large it is, and how its oldest entry goes."""

    size: Callable[[TenantState], int]
    drop_oldest: Callable[[TenantState], object]


def _shrink_index(state: TenantState) -> None:
    if state.index.node_count:
        state.index.evict_oldest_leaf()
    else:
        state.online.forget_trials()


_PARTS = {
    "index_nodes": _Part(
        lambda state: state.index.node_count + state.online.node_count, _shrink_index
    ),
    "index_blocks": _Part(
        lambda state: state.index.block_count + state.online.block_count, _shrink_index
    ),
    "request_ids": _Part(
        lambda state: state.index.request_size, lambda state: state.index.forget_oldest_request()
    ),
    "recent_blocks": _Part(
        lambda state: state.online.recent.entries,
        lambda state: state.online.recent.forget_oldest(),
    ),
    "conversations": _Part(
        lambda state: state.conversations.size, lambda state: state.conversations.forget_oldest()
    ),
    "shown_blocks": _Part(
        lambda state: state.conversations.shown_size,
        lambda state: state.conversations.forget_oldest(),
    ),
    "logged_blocks": _Part(lambda state: state.log.size, lambda state: state.log.forget_oldest()),
    "token_counts": _Part(
        lambda state: len(state.token_counts),
        lambda state: state.token_counts.pop(next(iter(state.token_counts))),
    ),
}
"""The parts of `Bounds`, the number of tenants apart."""


class Tenants:
    """The states of all tenants, within common bounds.

    The least recently active tenant is forgotten when there are too many. Where a part of all
    states together is over its bound, the tenant that has most of it gives up its oldest entries:
    who has no more than an equal share loses nothing to another tenant.

    Each tenant's index is bounded by the whole capacity on its own. A common bound would let one
    tenant's requests push out another's, and so change its plans; the price is that tenants who
    share an engine expect more to be cached than is, until the engine reports evictions.

    Args:
        capacity_tokens: What the engine's cache holds, or None.
        bounds: How much is remembered.
    """

    def __init__(self, capacity_tokens: int | None, bounds: Bounds | None = None) -> None:
        self._capacity_tokens = capacity_tokens
        self._bounds = asdict(bounds or Bounds())
        self._states: OrderedDict[str, TenantState] = OrderedDict()
        self._names = 0  # the sizes of the tenants' names
        self._totals = dict.fromkeys(_PARTS, 0)

    def state(self, tenant: str) -> TenantState:
        """Return a tenant's state, a new one if it is not known."""
        state = self._states.get(tenant)
        if state is None:
            state = self._states[tenant] = TenantState(
                tenant,
                ContextIndex(self._capacity_tokens, self._bounds["index_nodes"]),
                OnlineOrder(Cooccurrence()),
                Conversations(),
                PromptLog(),
            )
            self._names += id_size(tenant)
            while self._names > self._bounds["tenants"] and len(self._states) > 1:
                self._forget_oldest()
        else:
            self._states.move_to_end(tenant)
        return state

    def known(self, tenant: str) -> TenantState | None:
        """Return a tenant's state if there is one, without counting that as activity."""
        return self._states.get(tenant)

    def enforce_bounds(self, state: TenantState) -> None:
        """Bring all parts back within their bounds after a tenant's state has changed."""
        self._measure(state)
        for name, total in self._totals.items():
            if total > self._bounds[name]:
                self._shrink(name)

    def _shrink(self, name: str) -> None:
        """Take a part's oldest entries from the tenant that has most, until it is in bounds."""
        part, bound = _PARTS[name], self._bounds[name]
        share = bound // len(self._states)
        while (excess := self._totals[name] - bound) > 0:
            most = max(self._states.values(), key=lambda state: state.sizes.get(name, 0))
            # down to an equal share; another one is the largest then
            enough = max(share, part.size(most) - excess)
            while part.size(most) > enough:
                part.drop_oldest(most)
            self._measure(most)

    def _measure(self, state: TenantState) -> None:
        """Bring the totals up to date with a state."""
        for name, part in _PARTS.items():
            size, before = part.size(state), state.sizes.get(name, 0)
            if size != before:
                self._totals[name] += size - before
                state.sizes[name] = size

    def _forget_oldest(self) -> None:
        tenant, state = self._states.popitem(last=False)
        self._names -= id_size(tenant)
        for name, size in state.sizes.items():
            self._totals[name] -= size

    def evict(self, request_ids: Iterable[str | int], tenant: str | None = None) -> Evicted:
        """Forget a tenant's requests; see `ReusePlanner.evict`."""
        asked = tuple(dict.fromkeys(request_ids))
        requests = tokens = 0
        unknown = []
        for request_id in asked:
            state = self._holder(request_id, tenant)
            if state is None:
                unknown.append(request_id)
                continue
            evicted = state.index.evict([request_id])
            self._measure(state)
            requests += evicted.requests
            tokens += evicted.tokens
        return Evicted(requests, tokens, tuple(unknown))

    def _holder(self, request_id: str | int, tenant: str | None) -> TenantState | None:
        """Return whose index holds a request: the tenant's or, for None, the only one that does."""
        if tenant is None:
            holding = [state for state in self._states.values() if request_id in state.index]
            return holding[0] if len(holding) == 1 else None
        state = self._states.get(tenant)
        return state if state is not None and request_id in state.index else None

    def evict_tokens(self, tokens: int) -> Evicted:
        """Shorten the least recently used leaves of all tenants: the engine's cache is one."""
        heap = [
            (oldest, number, state)
            for number, state in enumerate(self._states.values())
            if (oldest := state.index.oldest_use()) is not None
        ]
        heapq.heapify(heap)
        gone = 0
        while heap and gone < tokens:
            _, number, state = heapq.heappop(heap)
            gone += state.index.evict_oldest(tokens - gone)
            self._measure(state)
            oldest = state.index.oldest_use()
            if oldest is not None:
                heapq.heappush(heap, (oldest, number, state))
        return Evicted(0, gone, ())

    def trim(self, request_id: str | int, blocks: int, tenant: str | None = None) -> Evicted:
        """Cut a request's path behind its first `blocks` blocks; see `ReusePlanner.trim`."""
        state = self._holder(request_id, tenant)
        if state is None:
            return Evicted(0, 0, (request_id,))
        evicted = state.index.trim(request_id, blocks)
        self._measure(state)
        return evicted

    def forget_conversation(self, conversation_id: str | int, tenant: str) -> bool:
        """Forget what a conversation was shown; return whether it was known."""
        state = self._states.get(tenant)
        if state is None or not state.conversations.forget(conversation_id):
            return False
        self._measure(state)
        return True

    def statistics(self) -> IndexStatistics:
        """Return the size of all indexes together, and of every part that is bounded."""
        tokens = requests = nodes = 0
        for state in self._states.values():
            statistics = state.index.statistics()
            nodes += statistics.nodes
            tokens += statistics.tokens
            requests += statistics.requests
        entries = {"tenants": self._names, **self._totals}
        return IndexStatistics(
            nodes,
            tokens,
            requests,
            parts={name: PartSize(size, self._bounds[name]) for name, size in entries.items()},
        )
