"""Planning with what is known about each tenant, and with nothing of another tenant's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from ctxreuse.context.blocks import BlockKey, ContextBlock, ContextRequest, text_digest
from ctxreuse.context.fork_safety import ForkSafeLock, process_name
from ctxreuse.context.rendering import Reference, SentBlock, Templates, TurnPart, replace_overlaps
from ctxreuse.context.tokens import ENGINE_BLOCK_TOKENS, TokenCounter
from ctxreuse.index.explain import MOST_BLOCK_TOKENS, LoggedPrompt, SentPrompt
from ctxreuse.index.path_search import heaviest_path, sent_prefix
from ctxreuse.index.radix_tree import Evicted, IndexStatistics
from ctxreuse.index.shown_blocks import EMPTY_HISTORY, History, shown_in
from ctxreuse.ordering.batch import BatchContext, arrange
from ctxreuse.ordering.paper import paper_order
from ctxreuse.planning.plan import BatchPlan, Plan, Strategy
from ctxreuse.planning.tenants import Tenants, TenantState


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

    `system` is the digest of the system text; `shown` holds the blocks to leave out, with the
    labels under which the history shows them.
    """

    request: ContextRequest
    state: TenantState
    system: bytes | None
    tokens: Mapping[BlockKey, int]
    weights: Mapping[BlockKey, int]
    history: History
    shown: Mapping[BlockKey, str]


class TenantPlanner:
    """Plans requests, each with what its own tenant sent before.

    It holds its lock for short steps only: tokens are counted, histories read and batches arranged
    without it. What others send or evict meanwhile changes what is expected in the cache, never
    which blocks a plan has.

    Args:
        settings: How it plans.
    """

    def __init__(self, settings: PlannerSettings) -> None:
        self._settings = settings
        self._clock = count(1)
        self._lock = ForkSafeLock(self._forget)
        self._forget()

    def _forget(self) -> None:
        """Forget what was sent."""
        self._tenants = Tenants(self._settings.capacity_tokens)

    def plan(
        self, request: ContextRequest, strategy: Strategy, deduplicate: bool | None = None
    ) -> Plan:
        """Plan one request; see `ReusePlanner.plan`."""
        tokens = self._tokens(request.blocks, request.tenant)
        history = self._history(request)
        with self._lock:
            turn = self._open_turn(request, tokens, history, deduplicate)
            return self._send(turn, self._order(turn, strategy))

    def preview(
        self, request: ContextRequest, strategy: Strategy, deduplicate: bool | None = None
    ) -> Plan:
        """Return what `plan` would return, and record nothing; see `ReusePlanner.preview`."""
        tokens = self._tokens(request.blocks, request.tenant)
        history = self._history(request)
        with self._lock:
            turn = self._open_turn(request, tokens, history, deduplicate)
            return self._send(turn, self._order(turn, strategy, preview=True), preview=True)

    def plan_batch(
        self,
        requests: Sequence[ContextRequest],
        strategy: Strategy,
        deduplicate: bool | None = None,
    ) -> BatchPlan:
        """Plan requests that are known together; see `ReusePlanner.plan_batch`."""
        # all tokens are counted before anything is recorded
        tokens = [self._tokens(request.blocks, request.tenant) for request in requests]
        if strategy == "none":
            orders = [list(counted) for counted in tokens]
            execution = list(range(len(requests)))
        else:
            contexts = [
                self._context(request, counted)
                for request, counted in zip(requests, tokens, strict=True)
            ]
            arrangement = arrange(contexts, strategy, self._settings.alpha)
            orders, execution = arrangement.orders, arrangement.execution
        plans = []
        for position in execution:
            request = requests[position]
            history = self._history(request)
            with self._lock:
                turn = self._open_turn(request, tokens[position], history, deduplicate)
                plans.append(self._send(turn, orders[position]))
        return BatchPlan(tuple(plans), tuple(execution))

    def evict(self, request_ids: Sequence[str | int], tenant: str | None = None) -> Evicted:
        """Forget requests; see `ReusePlanner.evict`."""
        with self._lock:
            return self._tenants.evict(request_ids, tenant)

    def evict_tokens(self, tokens: int) -> Evicted:
        """Forget the least recently used tokens; see `ReusePlanner.evict_tokens`."""
        with self._lock:
            return self._tenants.evict_tokens(tokens)

    def trim(self, request_id: str | int, blocks: int, tenant: str | None = None) -> Evicted:
        """Forget the end of a request; see `ReusePlanner.trim`."""
        with self._lock:
            return self._tenants.trim(request_id, blocks, tenant)

    def count_tokens(self, text: str) -> int:
        """Return a text's length in tokens."""
        return self._settings.count_tokens(text)

    def block_tokens(self, blocks: Iterable[ContextBlock], tenant: str) -> int:
        """Return how many tokens the index counts for blocks."""
        unique = {block.key: block for block in blocks}
        return sum(_weights(self._tokens(unique.values(), tenant)).values())

    def shown_tokens(self, request: ContextRequest, deduplicate: bool | None) -> int:
        """Return how many block tokens of a turn its history shows already."""
        tokens = self._tokens(request.blocks, request.tenant)
        history = self._history(request)
        with self._lock:
            turn = self._open_turn(request, tokens, history, deduplicate)
        return sum(weight for key, weight in turn.weights.items() if key in turn.shown)

    def cached_tokens(self, request: ContextRequest, *, in_order: bool = False) -> int:
        """Return the block tokens expected in the cache; see `ReusePlanner.cached_tokens`."""
        with self._lock:
            if self._tenants.known(request.tenant) is None:
                return 0
        weights = _weights(self._tokens(request.blocks, request.tenant))
        system = _system_digest(request.system)
        with self._lock:
            root = self._tenants.state(request.tenant).index.root(system)
            if not in_order:
                return heaviest_path(root, weights).weight
            sent = sent_prefix(root, list(weights))
            return sum(list(weights.values())[:sent])

    def end_conversation(self, conversation_id: str | int, tenant: str) -> bool:
        """Forget what a conversation was shown; return whether it was known."""
        with self._lock:
            return self._tenants.forget_conversation(conversation_id, tenant)

    def statistics(self) -> IndexStatistics:
        """Return the size of the index and of all else that is remembered."""
        with self._lock:
            return self._tenants.statistics()

    def _tokens(self, blocks: Iterable[ContextBlock], tenant: str) -> dict[BlockKey, int]:
        """Return each block's tokens, in order; those without a count are counted.

        The lock is held only to look up and to keep counts, because a counter may take its time.
        """
        tokens: dict[BlockKey, int] = {}
        uncounted: dict[BlockKey, str] = {}
        for block in blocks:
            key = block.key
            if key in tokens:
                continue
            if block.tokens is None:
                uncounted[key] = block.text
            tokens[key] = min(block.tokens or 0, MOST_BLOCK_TOKENS)
        if not uncounted:
            return tokens
        with self._lock:
            known = self._tenants.state(tenant).token_counts
            tokens.update({key: known[key] for key in uncounted if key in known})
            uncounted = {key: text for key, text in uncounted.items() if key not in known}
        if uncounted:
            count_tokens = self._settings.count_tokens
            counted = {
                key: min(count_tokens(text), MOST_BLOCK_TOKENS) for key, text in uncounted.items()
            }
            tokens.update(counted)
            with self._lock:
                state = self._tenants.state(tenant)
                state.token_counts.update(counted)
                self._tenants.enforce_bounds(state)
        return tokens

    def _context(self, request: ContextRequest, tokens: Mapping[BlockKey, int]) -> BatchContext:
        """Return what is arranged of a request: of a first turn, behind what is cached of it."""
        weights = _weights(tokens)
        cached: tuple[BlockKey, ...] = ()
        if not request.history:
            system = _system_digest(request.system)
            with self._lock:
                index = self._tenants.state(request.tenant).index
                match = heaviest_path(index.root(system), weights)
            if match.weight >= ENGINE_BLOCK_TOKENS:
                cached = match.path
        return BatchContext(request, weights, cached)

    def _history(self, request: ContextRequest) -> History:
        """Return what the messages before a turn show of the blocks that were sent there."""
        if not request.history:
            return EMPTY_HISTORY
        with self._lock:
            conversations = self._tenants.state(request.tenant).conversations
            recorded = conversations.recorded(request.conversation_id)
        return shown_in(request.history, recorded, self._settings.templates)

    def _open_turn(
        self,
        request: ContextRequest,
        tokens: Mapping[BlockKey, int],
        history: History,
        deduplicate: bool | None,
    ) -> _Turn:
        if deduplicate is None:
            deduplicate = self._settings.deduplicate
        return _Turn(
            request=request,
            state=self._tenants.state(request.tenant),
            system=_system_digest(request.system),
            tokens=tokens,
            weights=_weights(tokens),
            history=history,
            shown=history.label_of if deduplicate else {},
        )

    def _order(self, turn: _Turn, strategy: Strategy, *, preview: bool = False) -> list[BlockKey]:
        """Return the order of an arriving turn; behind a history there is nothing to gain."""
        if strategy == "none" or turn.request.history:
            return list(turn.weights)
        root = turn.state.index.root(turn.system)
        if strategy == "paper":
            return paper_order(turn.weights, root, self._settings.alpha)
        assert strategy == "reuse", f"there is no order for {strategy!r} here"
        order = turn.state.online.order(turn.weights, root)
        if not preview:
            turn.state.online.learn(turn.weights, turn.system)
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
            request_id = f"request-{process_name()}{next(turn.state.request_numbers)}"
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
            end = conversations.end_of(request.conversation_id, turn.system)
            if end is None or not index.holds(end):
                end = index.root(turn.system)
            inserted = index.extend(end, sent, weights, request_id, now)
        else:
            root = index.root(turn.system)
            inserted = index.insert(root, sent, weights, request_id, now)
            turn.state.online.recent.add(sent)
        if request.conversation_id is not None:
            whole = [
                (ordinal, part.block)
                for ordinal, part in zip(ordinals, shown, strict=True)
                if not part.repeated
            ]
            conversations.remember(request.conversation_id, whole, inserted.node, turn.system)
        tokens = tuple([turn.tokens[key] for key in sent])
        prompt = SentPrompt(
            request_id=request_id,
            tenant=turn.state.name,
            system=turn.system,
            is_later_turn=bool(request.history),
            after=None,
            keys=tuple(sent),
            ids=tuple(part.block.id for part in shown),
            tokens=tokens,
        )
        turn.state.log.add(now, prompt)
        self._tenants.enforce_bounds(turn.state)
        return LoggedPrompt(prompt, turn.state.log, now), sum(tokens[: inserted.blocks_before])


def _weights(tokens: Mapping[BlockKey, int]) -> dict[BlockKey, int]:
    """Return each block's weight: its tokens, but at least 1 for its label."""
    return {key: number or 1 for key, number in tokens.items()}


def _system_digest(system: str | None) -> bytes | None:
    """Return what stands for a system text: roots of the index are kept as long as they hold."""
    return None if system is None else text_digest(system)
