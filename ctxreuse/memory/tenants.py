"""What a planner remembers of each tenant, within bounds that all tenants share.

Each tenant's state has a lock, so that a plan waits for its own tenant only; the map of states and
the sizes have a common one, taken for a few assignments. No deadlock: who holds the common lock
takes no other one, and who holds a tenant's lock takes the common one only.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from operator import add, gt, itemgetter, sub
from typing import Final

from ctxreuse.context.blocks import BlockKey, id_size
from ctxreuse.context.fork_safety import ForkSafeLock
from ctxreuse.context.lru_map import LRUMap, PartSize, TenantShares
from ctxreuse.memory.conversations import Conversations
from ctxreuse.memory.points import Looked, Points
from ctxreuse.memory.prefix_index import Evicted, IndexStatistics, Inserted, PrefixIndex, RequestId
from ctxreuse.memory.sent_log import Cooccurrence, EditEntry, SentEntry, SentLog, ToldEntry
from ctxreuse.rules.cache_rules import DEFAULT_CACHE, CacheRules


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
    sent_messages: int = 100_000
    token_counts: int = 100_000


_FORGETTING = 0.99
_LEAST_WEIGHT = 14.0  # of some 16 prompts
_SPREAD = 0.05
_LEAST_FIT = 0.8  # of the squared correlation: so much too small the slope is at most
_STEP = 1 / 8
_LEAST, _MOST = 1 / 4, 4.0


@dataclass(slots=True)
class TokenRatio:
    """How many tokens an engine counts where one is estimated: about 2 for tables, 1 for prose.

    Question and instructions are about as long whatever the blocks. So it is the slope of the line
    that fits reported to estimated lengths best (least squares); older prompts count less. Where
    lengths are nearly equal, as of chunks of a splitter, the slope says nothing.
    """

    value: float = 1.0
    number: float = 0.0
    estimated: float = 0.0  # on average, as the next one
    reported: float = 0.0
    variance: float = 0.0  # times the number, as the next two
    covariance: float = 0.0
    variance_reported: float = 0.0

    def note(self, estimated: int, reported: int) -> None:
        """Learn of a prompt."""
        self.number = 1 + _FORGETTING * self.number
        more, longer = estimated - self.estimated, reported - self.reported  # than on average
        self.estimated += more / self.number
        self.reported += longer / self.number
        new = 1 - 1 / self.number
        self.variance = _FORGETTING * self.variance + new * more * more
        self.covariance = _FORGETTING * self.covariance + new * more * longer
        self.variance_reported = _FORGETTING * self.variance_reported + new * longer * longer
        least = self.number * (_SPREAD * self.estimated) ** 2
        fit = _LEAST_FIT * self.variance * self.variance_reported
        if self.number < _LEAST_WEIGHT or self.variance <= least or self.covariance**2 < fit:
            return
        slope = min(max(self.covariance / self.variance, _LEAST), _MOST)
        # in steps, since known blocks keep the weight that they were sent with
        if abs(slope - self.value) >= _STEP:
            self.value = round(slope / _STEP) * _STEP


class TenantState:
    """What is remembered of one tenant; who reads or changes it holds `lock`."""

    def __init__(
        self,
        name: str,
        capacity_tokens: int | None,
        max_nodes: int,
        rules: CacheRules = DEFAULT_CACHE,
    ) -> None:
        self.name = name
        self._capacity_tokens = capacity_tokens
        self._max_nodes = max_nodes
        self._rules = rules
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
        self.points = None if self._rules.serves_all else Points(self._rules)
        self.ratios: LRUMap[bytes | None, TokenRatio] | None = None  # by the system text
        self.unnamed_requests = 0

    def commit(
        self, sent: SentEntry, tick: int, looked: Looked | None = None, behind: int = 0
    ) -> Inserted:
        """Note what was sent, a later turn behind an end; return what of it was kept."""
        assert not isinstance(sent.system, str), "the index has digests"
        root, path, name = (sent.system, sent.is_labelled), sent.keys, sent.request_id
        weights = [tokens or 1 for tokens in sent.tokens]  # at least 1, for a label
        if sent.is_later_turn:
            return self.index.extend(behind, root, path, weights, name, tick)
        points = self.points
        if points is not None and looked is None:
            looked = points.look(self.index, root, sent.front_tokens, path, weights, sent.time_s)
        inserted = self.index.insert(root, path, weights, name, tick)
        self.recent.add(path)
        if points is None or looked is None:
            return inserted
        return Inserted(inserted.end, points.note(self.index, inserted, sent, looked))

    def forget(self, request_id: RequestId, blocks: int | None = None) -> int | None:
        """Expect nothing of a request behind so many blocks; return the tokens that leave."""
        end = self.index.end_of(request_id)
        if end is None:
            return None
        for before, node in self.index.nodes_to(end):
            if node.point is not None and (blocks is None or before > blocks):
                node.point.take_back(request_id)
        if blocks is None:
            return self.index.evict(request_id)
        return self.index.trim(request_id, blocks)


DROP_OLDEST: Final[dict[str, Callable[[TenantState], object]]] = {
    "index_nodes": lambda state: state.index.evict_oldest(math.inf),
    "index_blocks": lambda state: state.index.evict_oldest(math.inf),
    "index_tokens": lambda state: state.index.evict_oldest(1),
    "request_ids": lambda state: state.index.forget_oldest_request(),
    "recent_blocks": lambda state: state.recent.forget_oldest(),
    "conversations": lambda state: state.conversations.forget_oldest(),
    "shown_blocks": lambda state: state.conversations.forget_oldest(),
    "logged_blocks": lambda state: state.log.forget_oldest(),
    "sent_messages": lambda state: state.log.edits.pop_oldest(),
    "token_counts": lambda state: state.token_counts.popitem(last=False),
}
"""How the oldest entry of each part of `Bounds` goes, but for the number of tenants."""

PARTS = tuple(DROP_OLDEST)


_LIMITS = "cached_paths", "greedy_paths", "continuations", "paper_orders", "shown_blocks"
"""The bounds on the work of a plan; see `IndexStatistics.limits_reached`."""

_STEPS_A_HOLD = 64


class Hold:
    """A tenant's state, held for as long as the context lasts; then the bounds are enforced."""

    __slots__ = ("_state", "_tenants")

    def __init__(self, tenants: Tenants, state: TenantState) -> None:
        self._tenants = tenants
        self._state = state

    def __enter__(self) -> TenantState:
        self._state.lock.__enter__()
        return self._state

    def __exit__(self, *error: object) -> None:
        try:
            self._tenants.measure(self._state)
        finally:
            self._state.lock.__exit__(*error)
        while self._tenants.are_over and self._tenants.shrink():
            pass


class Tenants:
    """The states of all tenants, within common bounds.

    Of a part that is over its bound, the tenant that has most gives up the oldest entries: who has
    no more than an equal share loses nothing.
    """

    def __init__(
        self,
        capacity_tokens: int | None,
        bounds: Bounds = Bounds(),
        rules: CacheRules = DEFAULT_CACHE,
    ) -> None:
        self._capacity_tokens = capacity_tokens
        self._rules = rules
        self._max_names = bounds.tenants
        capacity = math.inf if capacity_tokens is None else capacity_tokens
        bound_of = {"index_tokens": capacity, **asdict(bounds)}
        self._bounds = [bound_of[part] for part in PARTS]
        self._max_nodes = bounds.index_nodes
        self._lock = ForkSafeLock(self._forget)
        self._limits = dict.fromkeys(_LIMITS, 0)  # of all tenants, forgotten ones included
        self._forget()

    def _forget(self) -> None:
        self._states: OrderedDict[str, TenantState] = OrderedDict()
        self._names = 0  # the sizes of the tenants' names
        self._senders = 0  # how many tenants have sent something, forgotten ones included
        self._totals = [0] * len(PARTS)  # of the sizes of these states
        self.are_over = False  # whether one of them may be over its bound
        self._shares: dict[int, TenantShares[tuple[int, str]]] = {}  # of the parts that have been

    def holding(self, tenant: str) -> Hold:
        """Hold a tenant's state, a new one if it is not known, for as long as the context lasts."""
        return Hold(self, self.state(tenant))

    def state(self, tenant: str) -> TenantState:
        """Return a tenant's state, a new one if it is not known; its lock is not held."""
        forgotten = []  # freed behind the common lock: all tenants would wait for that
        with self._lock:
            state = self._states.get(tenant)
            if state is not None:
                self._states.move_to_end(tenant)
                return state
            state = TenantState(tenant, self._capacity_tokens, self._max_nodes, self._rules)
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
        with self._lock:
            tenant, state = self._states.popitem(last=False)
            self._names -= id_size(tenant)
            self._totals = [*map(sub, self._totals, state.sizes)]
            for shares in self._shares.values():
                shares.note(state.name_in_order, 0)
            return state

    def measure(self, state: TenantState) -> None:
        """Bring sizes and totals up to date with a state that is held; every plan asks."""
        index, conversations = state.index, state.conversations
        sizes = (
            index.node_count,
            index.block_count,
            index.tokens,
            index.ids_size,
            state.recent.entries,
            conversations.size,
            conversations.shown_size,
            state.log.size,
            len(state.log.edits),
            len(state.token_counts),
        )
        if sizes == state.sizes:
            return
        with self._lock:
            before, state.sizes = state.sizes, sizes
            if self._states.get(state.name) is state:
                self._totals = [*map(add, self._totals, map(sub, sizes, before))]
                if index.node_count and not state.name_in_order[0]:
                    for shares in self._shares.values():
                        shares.note(state.name_in_order, 0)
                    self._senders += 1
                    state.name_in_order = self._senders, state.name
                for part, shares in self._shares.items():
                    shares.note(state.name_in_order, sizes[part])
                self.are_over = any(map(gt, self._totals, self._bounds))

    def shrink(self) -> bool:
        """Shrink each part that is over its bound; return whether a state was held for that."""
        has_held = False
        for part, bound in enumerate(self._bounds):
            while self._totals[part] > bound:
                with self._lock:
                    if self._totals[part] <= bound:  # somebody else has seen to it
                        break
                    shares = self._shares.get(part)
                    if shares is None:
                        shares = self._shares[part] = TenantShares(bound)
                        for state in self._states.values():
                            shares.note(state.name_in_order, state.sizes[part])
                    _, name = shares.largest()
                    most = self._states[name]
                if not most.lock.acquire(blocking=False):
                    break  # whoever holds it comes here next
                has_held = True
                try:
                    self._shrink(part, most, shares.equal)
                finally:
                    most.lock.release()
        return has_held

    def _shrink(self, part: int, state: TenantState, share: float) -> None:
        """Drop a few of the oldest entries of a part of a state that is held."""
        self.measure(state)  # a child of a fork may have forgotten it
        excess = self._totals[part] - self._bounds[part]
        # down to an equal share; another one is the largest then
        enough = max(share, state.sizes[part] - excess)
        for _ in range(_STEPS_A_HOLD):
            if state.sizes[part] <= enough:
                return
            DROP_OLDEST[PARTS[part]](state)
            self.measure(state)

    def evict(
        self,
        request_ids: Iterable[RequestId],
        tenant: str | None = None,
        note: Callable[[str, RequestId, int | None], object] = lambda *_: None,
        blocks: int | None = None,
    ) -> Evicted:
        """Forget a tenant's requests, or all of them behind their first `blocks` blocks."""
        requests = tokens = 0
        unknown: list[RequestId] = []
        states = self._asked(tenant)
        for request_id in dict.fromkeys(request_ids):
            gone, holders = None, [state for state in states if request_id in state.index]
            if len(holders) == 1:  # without a tenant, the only one that has such a request
                with Hold(self, holders[0]) as holder:
                    gone = holder.forget(request_id, blocks)
            if gone is None:
                unknown.append(request_id)
            else:
                note(holders[0].name, request_id, blocks)
                requests += 1
                tokens += gone
        return Evicted(requests, tokens, tuple(unknown))

    def _asked(self, tenant: str | None) -> list[TenantState]:
        """Return the state of a tenant, if it is known; for None all states."""
        if tenant is None:
            with self._lock:
                return list(self._states.values())
        state = self.known(tenant)
        return [] if state is None else [state]

    def evict_tokens(self, tokens: int) -> Evicted:
        """Shorten the least recently used leaves of all tenants: the engine's cache is one."""
        heap = [
            (oldest, number, state)
            for number, state in enumerate(self._asked(None))
            if (oldest := state.index.oldest_queued()) is not None  # one step, which needs no lock
        ]
        heapq.heapify(heap)
        gone = 0
        while heap and gone < tokens:
            _, number, state = heapq.heappop(heap)
            until = heap[0][0] if heap else math.inf
            with Hold(self, state):
                index, oldest = state.index, state.index.oldest_use()
                for _ in range(_STEPS_A_HOLD):
                    if oldest is None or oldest > until or gone >= tokens:
                        break
                    gone += index.evict_oldest(tokens - gone)
                    oldest = index.oldest_use()
            if oldest is not None:
                heapq.heappush(heap, (oldest, number, state))
        return Evicted(tokens=gone)

    def replay(self) -> list[ToldEntry]:
        """Return what all tenants' logs hold, by time, without conversations' later turns."""
        logged, edits = list[tuple[int, ToldEntry]](), list[ToldEntry]()
        for state in self._asked(None):
            with Hold(self, state):
                logged += state.log.replay()
                edits += [EditEntry(key, state.name, one) for key, one in state.log.edits.items()]
        logged.sort(key=itemgetter(0))
        return [*(entry for _, entry in logged), *edits]

    def statistics(self) -> IndexStatistics:
        """Return the size of all indexes together, and of every part that is bounded."""
        with self._lock:
            indexes = [state.index for state in self._states.values()]
            nodes = sum([index.node_count for index in indexes])
            requests = sum([index.request_count for index in indexes])
            sizes = [self._names, *self._totals]
            tokens = self._totals[PARTS.index("index_tokens")]
            limits = dict(self._limits)
        bounds = [self._max_names, *self._bounds]
        parts = {
            part: PartSize(size, int(bound))
            for part, size, bound in zip(("tenants", *PARTS), sizes, bounds, strict=True)
            if bound < math.inf
        }
        return IndexStatistics(nodes, tokens, requests, parts, limits)
