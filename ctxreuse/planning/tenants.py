"""What a planner remembers of each tenant, within bounds that all tenants share.

An order reveals what others asked, so nothing here is common to two tenants but the bounds.

Each tenant's state has a lock, so that a plan waits for its own tenant only. What tenants share,
the map of states and the sizes, has a common lock, which is taken for a few assignments at a time.
No thread can wait for itself: who holds the common lock takes no other one, and who holds a
tenant's lock takes the common one only, never a second tenant's.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from itertools import count
from typing import NamedTuple

from ctxreuse.context.blocks import BlockKey, id_size
from ctxreuse.context.fork_safety import ForkSafeLock
from ctxreuse.context.lru_map import PartSize
from ctxreuse.index.explain import PromptLog
from ctxreuse.index.radix_tree import ContextIndex, Evicted, IndexStatistics
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


class TenantState:
    """What is remembered of one tenant.

    Args:
        name: The tenant.
        capacity_tokens: What the engine's cache holds, or None.
        max_nodes: Bound on the nodes of its index.

    Attributes:
        lock: Who reads or changes what follows holds it.
        index: What was sent.
        online: The order of arriving requests.
        conversations: What conversations were shown.
        log: The latest prompts.
        token_counts: Tokens of the blocks that were counted for this tenant. Another tenant's
            counts would tell by time which texts it has.
        request_numbers: Numbers for requests without an id. A common count would tell how many
            requests others send.
        cut_short: How many searches, those of `online` left out, ended at the bound on their work.
        measured: The sizes when the lock was last released; the common lock guards them.
    """

    def __init__(self, name: str, capacity_tokens: int | None, max_nodes: int) -> None:
        self.name = name
        self._capacity_tokens = capacity_tokens
        self._max_nodes = max_nodes
        self.lock = ForkSafeLock(self._forget)
        self.cut_short = 0
        self.measured = _Measured(dict.fromkeys(_DROP_OLDEST, 0))
        self._forget()

    def _forget(self) -> None:
        """Forget all, but not what was measured: the totals hold it still."""
        self.index = ContextIndex(self._capacity_tokens, self._max_nodes)
        self.online = OnlineOrder(Cooccurrence())
        self.conversations = Conversations()
        self.log = PromptLog()
        self.token_counts: OrderedDict[BlockKey, int] = OrderedDict()
        self.request_numbers: Iterator[int] = count()


class _Measured(NamedTuple):
    """The sizes of a tenant's state at one time.

    Attributes:
        parts: Of each part of `Bounds`, the number of tenants apart.
        nodes: Nodes of the index.
        tokens: Block tokens of the index.
        requests: Request ids of the index.
        oldest_use: When the least recently used leaf of the index was used; None without one.
        cut_short: How many searches ended at the bound on their work.
    """

    parts: dict[str, int]
    nodes: int = 0
    tokens: int = 0
    requests: int = 0
    oldest_use: int | None = None
    cut_short: int = 0


def _measured(state: TenantState) -> _Measured:
    index = state.index
    return _Measured(
        _sizes(state),
        index.node_count,
        index.tokens,
        index.request_count,
        index.oldest_use(),
        state.cut_short + state.online.cut_short,
    )


def _sizes(state: TenantState) -> dict[str, int]:
    """Return the size of each part of `Bounds`; every plan asks several times, so in one go."""
    index, online, conversations = state.index, state.online, state.conversations
    return {
        "index_nodes": index.node_count + online.node_count,
        "index_blocks": index.block_count + online.block_count,
        "request_ids": index.request_size,
        "recent_blocks": online.recent.entries,
        "conversations": conversations.size,
        "shown_blocks": conversations.shown_size,
        "logged_blocks": state.log.size,
        "token_counts": len(state.token_counts),
    }


def _shrink_index(state: TenantState) -> None:
    if state.index.node_count:
        state.index.evict_oldest_leaf()
    else:
        state.online.forget_trials()


_DROP_OLDEST: dict[str, Callable[[TenantState], object]] = {
    "index_nodes": _shrink_index,
    "index_blocks": _shrink_index,
    "request_ids": lambda state: state.index.forget_oldest_request(),
    "recent_blocks": lambda state: state.online.recent.forget_oldest(),
    "conversations": lambda state: state.conversations.forget_oldest(),
    "shown_blocks": lambda state: state.conversations.forget_oldest(),
    "logged_blocks": lambda state: state.log.forget_oldest(),
    "token_counts": lambda state: state.token_counts.popitem(last=False),
}
"""How the oldest entry of each part of `Bounds` goes, the number of tenants apart."""

_STEPS_A_HOLD = 64


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
        self._lock = ForkSafeLock(self._forget)
        self._cut_short = 0  # of all tenants, forgotten ones included
        self._forget()

    def _forget(self) -> None:
        """Forget all tenants."""
        self._states: OrderedDict[str, TenantState] = OrderedDict()
        self._names = 0  # the sizes of the tenants' names
        self._totals = dict.fromkeys(_DROP_OLDEST, 0)  # of what was measured of these states

    def holding(self, tenant: str) -> AbstractContextManager[TenantState]:
        """Hold a tenant's state, a new one if it is not known, for as long as the context lasts.

        All parts are brought back within their bounds behind it. A tenant that is forgotten
        meanwhile is so for others only: what is recorded is gone with the state.
        """
        return self._hold(self.state(tenant))

    def state(self, tenant: str) -> TenantState:
        """Return a tenant's state, a new one if it is not known; its lock is not held."""
        with self._lock:
            state = self._states.get(tenant)
            if state is not None:
                self._states.move_to_end(tenant)
                return state
            state = TenantState(tenant, self._capacity_tokens, self._bounds["index_nodes"])
            self._states[tenant] = state
            self._names += id_size(tenant)
            while self._names > self._bounds["tenants"] and len(self._states) > 1:
                self._forget_oldest()
            return state

    def known(self, tenant: str) -> TenantState | None:
        """Return a tenant's state if there is one, without counting that as activity."""
        return self._states.get(tenant)

    def _forget_oldest(self) -> None:
        with self._lock:
            tenant, state = self._states.popitem(last=False)
            self._names -= id_size(tenant)
            for name, size in state.measured.parts.items():
                self._totals[name] -= size

    @contextmanager
    def _hold(self, state: TenantState) -> Iterator[TenantState]:
        with state.lock:
            try:
                yield state
            finally:
                self._measure(state)
        self._enforce_bounds()

    def _measure(self, state: TenantState) -> None:
        """Bring the totals up to date with a state whose lock is held, unless it is forgotten."""
        measured = _measured(state)
        if measured == state.measured:
            return
        with self._lock:
            before, state.measured = state.measured, measured
            self._cut_short += measured.cut_short - before.cut_short
            if self._states.get(state.name) is state:
                for name, size in measured.parts.items():
                    self._totals[name] += size - before.parts[name]

    def _enforce_bounds(self) -> None:
        """Bring all parts back within their bounds; no tenant's lock is held.

        Waits for nobody: the tenant that has most is left alone while its state is held, since who
        holds it comes here next.
        """
        for name in _DROP_OLDEST:
            while self._totals[name] > self._bounds[name]:
                with self._lock:
                    states = list(self._states.values())
                most = max(states, key=lambda state: state.measured.parts[name])
                if not most.lock.acquire(blocking=False):
                    break
                try:
                    self._shrink(name, most, self._bounds[name] // len(states))
                    self._measure(most)
                finally:
                    most.lock.release()

    def _shrink(self, name: str, state: TenantState, share: int) -> None:
        """Drop the oldest entries of a part of a state that is held; a few, for others may wait."""
        excess = self._totals[name] - self._bounds[name]
        # down to an equal share; another one is the largest then
        enough = max(share, _sizes(state)[name] - excess)
        for _ in range(_STEPS_A_HOLD):
            if _sizes(state)[name] <= enough:
                return
            _DROP_OLDEST[name](state)

    def evict(self, request_ids: Iterable[str | int], tenant: str | None = None) -> Evicted:
        """Forget a tenant's requests; see `ReusePlanner.evict`."""
        asked = tuple(dict.fromkeys(request_ids))
        requests = tokens = 0
        unknown: list[str | int] = []
        for request_id in asked:
            holder = self._holder(request_id, tenant)
            if holder is None:
                unknown.append(request_id)
                continue
            with self._hold(holder) as state:
                evicted = state.index.evict([request_id])
            requests += evicted.requests
            tokens += evicted.tokens
            unknown += evicted.unknown
        return Evicted(requests, tokens, tuple(unknown))

    def _holder(self, request_id: str | int, tenant: str | None) -> TenantState | None:
        """Return whose index holds a request: the tenant's or, for None, the only one that does.

        An index is asked without its tenant's lock: that is one look-up in a dictionary.
        """
        if tenant is None:
            with self._lock:
                states = list(self._states.values())
            holding = [state for state in states if request_id in state.index]
            return holding[0] if len(holding) == 1 else None
        state = self.known(tenant)
        return state if state is not None and request_id in state.index else None

    def evict_tokens(self, tokens: int) -> Evicted:
        """Shorten the least recently used leaves of all tenants: the engine's cache is one.

        Waits for the tenants that have these leaves, for one at a time.
        """
        with self._lock:
            heap = [
                (oldest, number, state)
                for number, state in enumerate(self._states.values())
                if (oldest := state.measured.oldest_use) is not None
            ]
        heapq.heapify(heap)
        gone = 0
        while heap and gone < tokens:
            _, number, oldest_used = heapq.heappop(heap)
            with self._hold(oldest_used) as state:
                gone += state.index.evict_oldest(tokens - gone)
                oldest = state.index.oldest_use()
            if oldest is not None:
                heapq.heappush(heap, (oldest, number, state))
        return Evicted(0, gone, ())

    def trim(self, request_id: str | int, blocks: int, tenant: str | None = None) -> Evicted:
        """Cut a request's path behind its first `blocks` blocks; see `ReusePlanner.trim`."""
        holder = self._holder(request_id, tenant)
        if holder is None:
            return Evicted(0, 0, (request_id,))
        with self._hold(holder) as state:
            return state.index.trim(request_id, blocks)

    def forget_conversation(self, conversation_id: str | int, tenant: str) -> bool:
        """Forget what a conversation was shown; return whether it was known."""
        known = self.known(tenant)
        if known is None:
            return False
        with self._hold(known) as state:
            return state.conversations.forget(conversation_id)

    def statistics(self) -> IndexStatistics:
        """Return the size of all indexes together, and of every part that is bounded.

        Waits for no tenant: what one is doing at the moment does not count yet.
        """
        with self._lock:
            measured = [state.measured for state in self._states.values()]
            entries = {"tenants": self._names, **self._totals}
            cut_short = self._cut_short
        return IndexStatistics(
            sum([one.nodes for one in measured]),
            sum([one.tokens for one in measured]),
            sum([one.requests for one in measured]),
            parts={name: PartSize(size, self._bounds[name]) for name, size in entries.items()},
            cut_short=cut_short,
        )
