"""What a planner remembers of each tenant, within bounds that all tenants share.

Each tenant's state has a lock, so that a plan waits for its own tenant only; the map of states and
the sizes have a common one, taken for a few assignments. No deadlock: who holds the common lock
takes no other one, and who holds a tenant's lock takes the common one only.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from operator import add, gt, sub
from typing import NamedTuple, TypeAlias

from ctxreuse.context.blocks import id_size
from ctxreuse.context.fork_safety import ForkSafeLock
from ctxreuse.context.lru_map import PartSize, TenantShares
from ctxreuse.context.rendering import DEFAULT_TEMPLATES
from ctxreuse.index.radix_tree import ContextIndex, Evicted, IndexStatistics
from ctxreuse.index.removal import Removal
from ctxreuse.index.request_ends import RequestId
from ctxreuse.ordering.marks import MarkPrices
from ctxreuse.planning.journal import Noted
from ctxreuse.planning.tenant_state import DROP_OLDEST, PARTS, Bounds, TenantState, sizes_of

_LIMITS = (
    *("cached_paths", "greedy_paths", "continuations", "paper_orders"),
    *("shown_blocks", "overlaps"),
)
"""The bounds on the work of a plan; see `IndexStatistics.limits_reached`."""

_STEPS_A_HOLD = 64
_LEAVES_A_CALL = 150


_NoteLost: TypeAlias = Callable[[str, RequestId, int | None], object]


def _say_nothing(*_: object) -> None:
    pass


def _holder(request_id: RequestId, states: Iterable[TenantState]) -> TenantState | None:
    """Return the only one of some tenants whose index holds a request; None if there is none."""
    holding = [state for state in states if request_id in state.index]
    return holding[0] if len(holding) == 1 else None


class _Hold:
    """A tenant's state, held for as long as the context lasts; then the bounds are enforced."""

    __slots__ = ("_is_untidy", "_state", "_tenants")

    def __init__(self, tenants: Tenants, state: TenantState) -> None:
        self._tenants = tenants
        self._state = state

    def __enter__(self) -> TenantState:
        self._state.lock.acquire()
        self._is_untidy = self._state.index.needs_tidying
        return self._state

    def __exit__(self, *error: object) -> None:
        needs_tidying = self._release()
        # in holds of a few steps; what was untidy before is left to who has caused it
        while needs_tidying and not self._is_untidy:
            time.sleep(0)  # as in `Tenants._remove`
            self._state.lock.acquire()
            needs_tidying = self._release()
        self._tenants.enforce_bounds()

    def _release(self) -> bool:
        """Give the state back; return whether its index needs tidying still."""
        try:
            needs_tidying = self._state.index.tidy()
            self._tenants.measure(self._state)
        finally:
            self._state.lock.release()
        return needs_tidying


class _ReadOnlyHold:
    """A tenant's state, held to look at it only, which leaves nothing to tidy or measure."""

    __slots__ = ("_state", "_tenants")

    def __init__(self, tenants: Tenants, state: TenantState) -> None:
        self._tenants = tenants
        self._state = state

    def __enter__(self) -> TenantState:
        self._state.lock.acquire()
        return self._state

    def __exit__(self, *error: object) -> None:
        self._state.lock.release()
        self._tenants.enforce_bounds()  # others may have left to us what we held


class _EvictedOldest(NamedTuple):
    """What left the indexes, least recently used first."""

    tokens: int
    busy: TenantState | None  # the tenant that was next
    is_empty: bool = False


class Tenants:
    """The states of all tenants, within common bounds.

    Where a part is over its bound, the tenant that has most of it gives up its oldest entries: who
    has no more than an equal share loses nothing to another tenant.
    """

    def __init__(
        self,
        capacity_tokens: int | None,
        bounds: Bounds | None = None,
        words: Callable[[int], int] = DEFAULT_TEMPLATES.order_tokens,
        prices: MarkPrices | None = None,
        *,
        keeps_best: bool = False,
    ) -> None:
        self._capacity_tokens = capacity_tokens
        self._words = words
        self._prices = prices
        self._keeps_best = keeps_best
        bounds = bounds or Bounds()
        self._max_names = bounds.tenants
        capacity = math.inf if capacity_tokens is None else capacity_tokens
        bound_of = {"index_tokens": capacity, **asdict(bounds)}
        self._bounds = [bound_of[part] for part in PARTS]
        self._max_nodes = bounds.index_nodes
        self._lock = ForkSafeLock(self._forget)
        self._limits = dict.fromkeys(_LIMITS, 0)  # of all tenants, forgotten ones included
        self._note_limit = self.note_limit  # one for all states
        self._forget()

    def _forget(self) -> None:
        """Forget all tenants."""
        self._states: OrderedDict[str, TenantState] = OrderedDict()
        self._names = 0  # the sizes of the tenants' names
        self._senders = 0  # how many tenants have sent something, forgotten ones included
        self._totals = [0] * len(PARTS)  # of the sizes of these states
        self._are_over = False  # whether one of them may be over its bound
        self._shares: dict[int, TenantShares[tuple[int, str]]] = {}  # of the parts that have been
        self._owed = 0  # tokens to be evicted once the tenant that is next is not busy
        # what frees the memory of indexes that were emptied, whose tenants may never come again
        self._dropped: deque[Iterator[None]] = deque()

    def holding(self, tenant: str) -> _Hold:
        """Hold a tenant's state, a new one if it is not known, for as long as the context lasts."""
        return _Hold(self, self.state(tenant))

    def reading(self, tenant: str) -> _ReadOnlyHold:
        """Hold a tenant's state as `holding` does, to change nothing in it."""
        return _ReadOnlyHold(self, self.state(tenant))

    def state(self, tenant: str) -> TenantState:
        """Return a tenant's state, a new one if it is not known; its lock is not held."""
        forgotten = []  # freed behind the common lock: all tenants would wait for that
        with self._lock:
            state = self._states.get(tenant)
            if state is not None:
                self._states.move_to_end(tenant)
                return state
            state = TenantState(
                tenant,
                self._capacity_tokens,
                self._max_nodes,
                self._note_limit,
                self._words,
                self._prices,
                self._keeps_best,
            )
            self._states[tenant] = state
            self._names += id_size(tenant)
            while self._names > self._max_names and len(self._states) > 1:
                forgotten.append(self._forget_oldest())
            return state

    def note_limit(self, name: str) -> None:
        """Count a search that ended at its bound; not under the common lock."""
        with self._lock:
            self._limits[name] += 1

    def known(self, tenant: str) -> TenantState | None:
        """Return a tenant's state if there is one, without counting that as activity."""
        return self._states.get(tenant)

    def _forget_oldest(self) -> TenantState:
        """Forget the least recently active tenant, and return its state."""
        with self._lock:
            tenant, state = self._states.popitem(last=False)
            self._names -= id_size(tenant)
            self._totals = [*map(sub, self._totals, state.sizes)]
            for shares in self._shares.values():
                shares.note(state.name_in_order, 0)
            return state

    def measure(self, state: TenantState) -> None:
        """Bring the totals up to date with a state whose lock is held, unless it is forgotten."""
        index, sizes = state.index, sizes_of(state)
        self._dropped += index.take_dropped()
        state.oldest_use = index.oldest_use()
        if sizes == state.sizes:
            return
        with self._lock:
            before, state.sizes = state.sizes, sizes
            if self._states.get(state.name) is state:
                self._totals = [*map(add, self._totals, map(sub, sizes, before))]
                if index.has_been_used and not state.name_in_order[0]:
                    self._number(state)
                for part, shares in self._shares.items():
                    shares.note(state.name_in_order, sizes[part])
                self._are_over = any(map(gt, self._totals, self._bounds))

    def _number(self, state: TenantState) -> None:
        """Let a tenant come behind all that have sent something; the common lock is held."""
        for shares in self._shares.values():
            shares.note(state.name_in_order, 0)
        self._senders += 1
        state.name_in_order = self._senders, state.name

    def enforce_bounds(self) -> None:
        """Bring all parts back within their bounds; hold no lock, and wait for nobody."""
        if self._dropped:
            self._free_some()
        if self._owed:
            self._evict_owed()
        while self._are_over and self._shrink_all():
            if self._owed:  # others may have left to us what we held
                self._evict_owed()

    def _free_some(self) -> None:
        """Take one step of what frees memory; two threads never take steps of the same."""
        try:
            dropped = self._dropped.popleft()
        except IndexError:  # another thread was faster
            return
        if next(dropped, self) is not self:
            self._dropped.append(dropped)

    def _shrink_all(self) -> bool:
        """Shrink each part that is over its bound; return whether a state was held for that."""
        has_held = False
        for part, bound in enumerate(self._bounds):
            while self._totals[part] > bound:
                with self._lock:
                    if self._totals[part] <= bound:  # somebody else has seen to it
                        break
                    shares = self._shares_of(part)
                    _, name = shares.largest()
                    most = self._states[name]
                if most.index.needs_tidying or not most.lock.acquire(blocking=False):
                    break  # whoever holds it, or tidies it, comes here next
                has_held = True
                try:
                    self._shrink(part, most, shares.equal)
                    self.measure(most)
                finally:
                    most.lock.release()
        return has_held

    def _shares_of(self, part: int) -> TenantShares[tuple[int, str]]:
        """Return how much of a part each tenant holds; the common lock is held."""
        shares = self._shares.get(part)
        if shares is None:
            shares = self._shares[part] = TenantShares(self._bounds[part])
            for state in self._states.values():
                shares.note(state.name_in_order, state.sizes[part])
        return shares

    def _shrink(self, part: int, state: TenantState, share: float) -> None:
        """Drop a few of the oldest entries of a part of a state that is held."""
        excess = self._totals[part] - self._bounds[part]
        # down to an equal share; another one is the largest then
        enough = max(share, sizes_of(state)[part] - excess)
        for _ in range(_STEPS_A_HOLD):
            if sizes_of(state)[part] <= enough:
                return
            DROP_OLDEST[PARTS[part]](state)

    def evict(
        self,
        request_ids: Iterable[RequestId],
        tenant: str | None = None,
        note: _NoteLost = _say_nothing,
    ) -> Evicted:
        """Forget a tenant's requests; see `ReusePlanner.evict`."""
        asked = tuple(dict.fromkeys(request_ids))
        requests = tokens = 0
        unknown: list[RequestId] = []
        states = self._asked(tenant)
        for request_id in asked:
            holder = _holder(request_id, states)
            if holder is None:
                unknown.append(request_id)
                continue
            removal = self._remove(holder, partial(ContextIndex.evict, request_id=request_id))
            if removal is None:
                unknown.append(request_id)
            else:
                note(holder.name, request_id, None)
                requests += 1
                tokens += removal.tokens
        return Evicted(requests, tokens, tuple(unknown))

    def _remove(
        self, state: TenantState, begin: Callable[[ContextIndex], Removal | None]
    ) -> Removal | None:
        """Take something out of a tenant's index, in holds of a few steps each."""
        removal: Removal | None = None
        has_begun = False
        while True:
            with _Hold(self, state):  # goes on with what has begun
                if not has_begun and not state.index.is_removing:
                    removal, has_begun = begin(state.index), True
            if has_begun and (removal is None or removal.is_done):
                return removal
            time.sleep(0)  # lets in who waits: a thread that goes on at once would take the lock

    def _asked(self, tenant: str | None) -> list[TenantState]:
        """Return the state of a tenant, if it is known; for None all states."""
        if tenant is None:
            with self._lock:
                return list(self._states.values())
        state = self.known(tenant)
        return [] if state is None else [state]

    def evict_tokens(self, tokens: int) -> Evicted:
        """Shorten the oldest leaves of all tenants; where one is busy, the next call goes on."""
        evicted = self._evict_oldest(tokens, _LEAVES_A_CALL)
        if evicted.tokens >= tokens or evicted.is_empty:
            self.enforce_bounds()  # others may have left to us what we held
            return Evicted(0, evicted.tokens, ())
        with self._lock:
            held = sum([state.index.tokens for state in self._states.values()])
            owed = max(0, min(tokens - evicted.tokens, held - self._owed))
            self._owed += owed
        self.enforce_bounds()  # the tenant may be done by now
        return Evicted(0, evicted.tokens + owed, ())

    def _evict_owed(self) -> None:
        """Go on with what `evict_tokens` has left to whoever comes; no tenant's lock is held."""
        while self._owed:
            with self._lock:
                owed, self._owed = self._owed, 0
            evicted = self._evict_oldest(owed, _STEPS_A_HOLD)
            if evicted.tokens >= owed or evicted.is_empty:
                continue  # others may have left to us what we held
            with self._lock:
                self._owed += owed - evicted.tokens
            if evicted.busy is None or not evicted.busy.lock.acquire(blocking=False):
                return  # it was enough for one call, or whoever is busy comes here next
            evicted.busy.lock.release()

    def _evict_oldest(self, tokens: int, most_leaves: int) -> _EvictedOldest:
        """Shorten the least recently used leaves until a tenant that is next is busy."""
        with self._lock:
            is_all = tokens >= sum([state.index.tokens for state in self._states.values()])
            heap = [
                (oldest, number, state)
                for number, state in enumerate(self._states.values())
                if (oldest := state.oldest_use) is not None
            ]
        heapq.heapify(heap)
        gone = leaves = 0
        while heap and gone < tokens and leaves < most_leaves:
            _, number, state = heapq.heappop(heap)
            if not state.lock.acquire(blocking=False):
                return _EvictedOldest(gone, state)
            try:
                index = state.index
                # who takes something out says how much that was, so it goes first
                is_whole = is_all and not index.is_removing
                gone += index.clear() if is_whole else index.evict_oldest(tokens - gone)
                oldest = state.index.oldest_use()
                self.measure(state)
            finally:
                state.lock.release()
            leaves += 1
            if oldest is not None:
                heapq.heappush(heap, (oldest, number, state))
        return _EvictedOldest(gone, None, is_empty=not heap)

    def trim(
        self,
        request_id: RequestId,
        blocks: int,
        tenant: str | None = None,
        note: _NoteLost = _say_nothing,
    ) -> Evicted:
        """Cut a request's path behind its first `blocks` blocks; see `ReusePlanner.trim`."""
        holder = _holder(request_id, self._asked(tenant))
        if holder is None:
            return Evicted(0, 0, (request_id,))
        removal = self._remove(
            holder, partial(ContextIndex.trim, request_id=request_id, blocks=blocks)
        )
        if removal is None:
            return Evicted(0, 0, (request_id,))
        note(holder.name, request_id, blocks)
        return Evicted(1, removal.tokens, ())

    def forget_conversation(self, conversation_id: str | int, tenant: str) -> bool:
        """Forget what a conversation was shown; return whether it was known."""
        known = self.known(tenant)
        if known is None:
            return False
        with _Hold(self, known) as state:
            return state.conversations.forget(conversation_id)

    def journal(self) -> list[tuple[str, Noted]]:
        """Return what all tenants' journals hold, by time, each with its tenant's name."""
        noted: list[tuple[str, Noted]] = []
        for state in self._asked(None):
            with _ReadOnlyHold(self, state):
                entries = state.journal.noted()
            noted += [(state.name, one) for one in entries]
        noted.sort(key=lambda one: one[1].time)
        return noted

    def ratios(self) -> list[tuple[str, bytes | None, tuple[float, ...]]]:
        """Return each ratio that was learnt, with its tenant's name and its system text's."""
        learnt: list[tuple[str, bytes | None, tuple[float, ...]]] = []
        for state in self._asked(None):
            with _ReadOnlyHold(self, state):
                ratios = [] if state.ratios is None else state.ratios.learnt()
            learnt += [(state.name, *one) for one in ratios]
        return learnt

    def statistics(self) -> IndexStatistics:
        """Return the size of all indexes together, and of every part that is bounded."""
        with self._lock:
            nodes = sum([state.index.node_count for state in self._states.values()])
            sizes = [self._names, *self._totals]
            total = dict(zip(PARTS, self._totals, strict=True))
            limits = dict(self._limits)
            owed = self._owed
        bounds = [self._max_names, *self._bounds]
        parts = {
            part: PartSize(size, int(bound))
            for part, size, bound in zip(("tenants", *PARTS), sizes, bounds, strict=True)
            if bound < math.inf
        }
        return IndexStatistics(
            nodes,
            max(0, total["index_tokens"] - owed),
            total["request_ids"],
            parts=parts,
            limits_reached=limits,
        )
