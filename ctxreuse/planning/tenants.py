"""Planning with what is known about each tenant, and with nothing of another tenant's.

An order reveals what others asked, so index, recent requests and conversations are kept apart.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from threading import RLock

from ctxreuse.context.blocks import BlockKey, ContextBlock, ContextRequest, text_digest
from ctxreuse.context.rendering import Reference, SentBlock, Templates, TurnPart, replace_overlaps
from ctxreuse.context.tokens import ENGINE_BLOCK_TOKENS, TokenCounter
from ctxreuse.index.explain import MOST_BLOCK_TOKENS, LoggedPrompt, PromptLog, SentPrompt
from ctxreuse.index.path_search import heaviest_path, sent_prefix
from ctxreuse.index.radix_tree import ContextIndex, Evicted, IndexStatistics
from ctxreuse.index.shown_blocks import EMPTY_HISTORY, Conversations, History
from ctxreuse.ordering.batch import BatchContext, arrange
from ctxreuse.ordering.online import Cooccurrence, OnlineOrder
from ctxreuse.ordering.paper import paper_order
from ctxreuse.planning.plan import BatchPlan, Plan, Strategy

_REMEMBERED_COUNTS = 100_000


@dataclass(slots=True)
class TenantState:
    """One tenant's index, the order of arriving requests, conversations, and log."""

    index: ContextIndex
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
            state = self._states[tenant] = TenantState(
                ContextIndex(self._capacity_tokens, self._max_nodes),
                OnlineOrder(Cooccurrence()),
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
        nodes = state.index.node_count + state.online.node_count
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


@dataclass(frozen=True, slots=True)
class PlannerSettings:
    """How a planner plans; the arguments of `ReusePlanner`, checked."""

    alpha: float
    count_tokens: TokenCounter
    capacity_tokens: int | None
    templates: Templates
    deduplicate: bool
    annotate: bool
    trim_overlaps: bool


@dataclass(frozen=True, slots=True)
class _Turn:
    """A request with what the planner knows about it.

    `shown` holds the blocks to leave out, with the labels under which the history shows them.
    """

    request: ContextRequest
    state: TenantState
    tokens: Mapping[BlockKey, int]
    weights: Mapping[BlockKey, int]
    history: History
    shown: Mapping[BlockKey, str]


class TenantPlanner:
    """Plans requests, each with what its own tenant sent before.

    It holds its lock for a short step only: one turn, or the token counts of a batch.

    Args:
        settings: How it plans.
    """

    def __init__(self, settings: PlannerSettings) -> None:
        self._settings = settings
        self._tenants = Tenants(settings.capacity_tokens)
        self._counts: dict[BlockKey, int] = {}
        self._request_number = count()
        self._clock = count(1)
        self._lock = RLock()

    def plan(
        self, request: ContextRequest, strategy: Strategy, deduplicate: bool | None = None
    ) -> Plan:
        """Plan one request; see `ReusePlanner.plan`."""
        with self._lock:
            turn = self._open_turn(request, deduplicate)
            return self._send(turn, self._order(turn, strategy))

    def preview(
        self, request: ContextRequest, strategy: Strategy, deduplicate: bool | None = None
    ) -> Plan:
        """Return what `plan` would return, and record nothing; see `ReusePlanner.preview`."""
        with self._lock:
            turn = self._open_turn(request, deduplicate)
            return self._send(turn, self._order(turn, strategy, preview=True), preview=True)

    def plan_batch(
        self,
        requests: Sequence[ContextRequest],
        strategy: Strategy,
        deduplicate: bool | None = None,
    ) -> BatchPlan:
        """Plan requests that are known together; see `ReusePlanner.plan_batch`."""
        contexts: list[BatchContext] = []
        with self._lock:  # counts all tokens too, before anything is recorded
            for request in requests:
                _, weights = self._weigh(request.blocks)
                cached: tuple[BlockKey, ...] = ()
                if not request.history:
                    index = self._tenants.state(request.tenant).index
                    match = heaviest_path(index.root(request.system), weights)
                    if match.weight >= ENGINE_BLOCK_TOKENS:
                        cached = match.path
                contexts.append(BatchContext(request, weights, cached))
        if strategy == "none":
            plans = [self.plan(request, strategy, deduplicate) for request in requests]
            return BatchPlan(tuple(plans), tuple(range(len(plans))))
        # without the lock: a large batch takes seconds, and others only add to what is cached
        arrangement = arrange(contexts, strategy, self._settings.alpha)
        plans = []
        for position in arrangement.execution:
            with self._lock:
                turn = self._open_turn(requests[position], deduplicate)
                plans.append(self._send(turn, arrangement.orders[position]))
        return BatchPlan(tuple(plans), tuple(arrangement.execution))

    def evict(self, request_ids: Sequence[str | int]) -> Evicted:
        """Forget requests; see `ReusePlanner.evict`."""
        with self._lock:
            return self._tenants.evict(request_ids)

    def evict_tokens(self, tokens: int) -> Evicted:
        """Forget the least recently used tokens; see `ReusePlanner.evict_tokens`."""
        with self._lock:
            return self._tenants.evict_tokens(tokens)

    def trim(self, request_id: str | int, blocks: int) -> Evicted:
        """Forget the end of a request; see `ReusePlanner.trim`."""
        with self._lock:
            return self._tenants.trim(request_id, blocks)

    def count_tokens(self, text: str) -> int:
        """Return a text's length in tokens; the counter is never asked twice at a time."""
        with self._lock:
            return self._settings.count_tokens(text)

    def block_tokens(self, blocks: Iterable[ContextBlock]) -> int:
        """Return how many tokens the index counts for blocks."""
        with self._lock:
            unique = {block.key: block for block in blocks}
            return sum(self._weigh(unique.values())[1].values())

    def shown_tokens(self, request: ContextRequest, deduplicate: bool | None) -> int:
        """Return how many block tokens of a turn its history shows already."""
        with self._lock:
            turn = self._open_turn(request, deduplicate)
            return sum(weight for key, weight in turn.weights.items() if key in turn.shown)

    def cached_tokens(self, request: ContextRequest, *, in_order: bool = False) -> int:
        """Return the block tokens expected in the cache; see `ReusePlanner.cached_tokens`."""
        with self._lock:
            _, weights = self._weigh(request.blocks)
            state = self._tenants.known(request.tenant)
            if state is None:
                return 0
            root = state.index.root(request.system)
            if not in_order:
                return heaviest_path(root, weights).weight
            sent = sent_prefix(root, list(weights))
            return sum(list(weights.values())[:sent])

    def end_conversation(self, conversation_id: str | int, tenant: str) -> bool:
        """Forget what a conversation was shown; return whether it was known."""
        with self._lock:
            return self._tenants.state(tenant).conversations.forget(conversation_id)

    def statistics(self) -> IndexStatistics:
        """Return the size of the index, all tenants together."""
        with self._lock:
            return self._tenants.statistics()

    def _open_turn(self, request: ContextRequest, deduplicate: bool | None) -> _Turn:
        state = self._tenants.state(request.tenant)
        history = EMPTY_HISTORY
        if request.history:
            history = state.conversations.read(
                request.conversation_id, request.history, self._settings.templates
            )
        if deduplicate is None:
            deduplicate = self._settings.deduplicate
        shown = history.label_of if deduplicate else {}
        tokens, weights = self._weigh(request.blocks)
        return _Turn(request, state, tokens, weights, history, shown)

    def _order(self, turn: _Turn, strategy: Strategy, *, preview: bool = False) -> list[BlockKey]:
        """Return the order of an arriving turn; behind a history there is nothing to gain."""
        if strategy == "none" or turn.request.history:
            return list(turn.weights)
        root = turn.state.index.root(turn.request.system)
        if strategy == "paper":
            return paper_order(turn.weights, root, self._settings.alpha)
        assert strategy == "reuse", f"there is no order for {strategy!r} here"
        order = turn.state.online.order(turn.weights, root)
        if not preview:
            turn.state.online.learn(turn.weights, turn.request.system)
        return order

    def _send(self, turn: _Turn, order: list[BlockKey], *, preview: bool = False) -> Plan:
        """Make the plan for an order, and record that it is sent unless it is a preview."""
        request, shown, templates = turn.request, turn.shown, self._settings.templates
        sent = [key for key in order if key not in shown]
        ordinals: Sequence[int] = range(1, len(sent) + 1)
        if request.history:
            ordinals = turn.history.next_ordinals(len(sent))
        label_of = {
            key: templates.block_label(ordinal) for ordinal, key in zip(ordinals, sent, strict=True)
        }
        annotation = None
        if self._settings.annotate and not request.history and order != list(turn.weights):
            annotation = templates.order_annotation([label_of[key] for key in turn.weights])
        request_id = "" if preview else request.request_id
        while request_id is None or (request.request_id is None and request_id in turn.state.index):
            request_id = f"request-{next(self._request_number)}"
        block_of = {block.key: block for block in reversed(request.blocks)}  # the first of a key
        parts: list[TurnPart] = []
        labels = dict(turn.history.labels)
        for key in order:
            block, label = block_of[key], label_of.get(key)
            if label is None:
                words = templates.location_annotation(shown[key])
                parts.append(Reference(shown[key], block.id, words))
            else:
                parts.append(SentBlock(label, block))
                labels[label] = block.id
        if self._settings.trim_overlaps:
            parts = replace_overlaps(parts, turn.history.texts)
        logged, cached = None, 0
        if not preview:
            logged, cached = self._record(turn, request_id, parts, ordinals)
        return Plan(
            request=request,
            request_id=request_id,
            parts=tuple(parts),
            labels=labels,
            order_annotation=annotation,
            expected_cached_tokens=cached,
            templates=templates,
            logged=logged,
        )

    def _record(
        self, turn: _Turn, request_id: str | int, parts: list[TurnPart], ordinals: Sequence[int]
    ) -> tuple[LoggedPrompt, int]:
        """Record what a turn sends; return the record, and block tokens that were sent before."""
        request, index, conversations = turn.request, turn.state.index, turn.state.conversations
        now = next(self._clock)
        shown = [part for part in parts if isinstance(part, SentBlock)]
        sent = [part.block.key for part in shown]
        weights = [turn.weights[key] for key in sent]
        if request.history:
            end = conversations.end_of(request.conversation_id, request.system)
            if end is None or not index.holds(end):
                end = index.root(request.system)
            inserted = index.extend(end, sent, weights, request_id, now)
        else:
            root = index.root(request.system)
            inserted = index.insert(root, sent, weights, request_id, now)
            turn.state.online.recent.add(sent)
        self._tenants.enforce_bounds(turn.state)
        if request.conversation_id is not None:
            whole = [
                (ordinal, part.block)
                for ordinal, part in zip(ordinals, shown, strict=True)
                if not part.repeated
            ]
            conversations.remember(request.conversation_id, whole, inserted.node, request.system)
        tokens = tuple([turn.tokens[key] for key in sent])
        prompt = SentPrompt(
            request_id=request_id,
            tenant=request.tenant,
            system=None if request.system is None else text_digest(request.system),
            is_later_turn=bool(request.history),
            after=None,
            keys=tuple(sent),
            ids=tuple(part.block.id for part in shown),
            tokens=tokens,
        )
        turn.state.log.append((now, prompt))
        return LoggedPrompt(prompt, turn.state.log, now), sum(tokens[: inserted.blocks_before])

    def _weigh(
        self, blocks: Iterable[ContextBlock]
    ) -> tuple[dict[BlockKey, int], dict[BlockKey, int]]:
        """Return each block's tokens, and its weight: the same, but at least 1 for its label."""
        tokens: dict[BlockKey, int] = {}
        for block in blocks:
            key = block.key
            if key in tokens:
                continue
            number = self._counts.get(key) if block.tokens is None else block.tokens
            if number is None:
                number = self._counts[key] = self._settings.count_tokens(block.text)
                if len(self._counts) > _REMEMBERED_COUNTS:
                    del self._counts[next(iter(self._counts))]
            tokens[key] = min(number, MOST_BLOCK_TOKENS)
        return tokens, {key: number or 1 for key, number in tokens.items()}
