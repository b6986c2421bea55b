"""The one door of the core: requests in, plans out.

The planner itself only calls the rest: conversations (what is shown already), ordering and
clustering (what goes first), scheduling (what runs next), the index (what was sent).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import count
from threading import RLock
from typing import Any, Literal, TypeAlias, get_args

from ctxreuse.context.blocks import BlockKey, ContextBlock, ContextRequest, text_digest
from ctxreuse.context.rendering import Part, Reference, SentBlock
from ctxreuse.context.templates import DEFAULT_TEMPLATES, Templates
from ctxreuse.context.tokens import ENGINE_BLOCK_TOKENS, as_token_counter, estimate_tokens
from ctxreuse.errors import InvalidRequestError, UnknownStrategyError, describe
from ctxreuse.index.explain import HEAVIEST, LoggedPrompt, SentPrompt
from ctxreuse.index.path_search import heaviest_path, sent_prefix
from ctxreuse.index.radix_tree import Evicted, IndexStatistics
from ctxreuse.index.shown_blocks import EMPTY_HISTORY, History
from ctxreuse.ordering.batch import BatchContext, arrange
from ctxreuse.ordering.overlaps import replace_overlaps
from ctxreuse.ordering.paper.online_order import paper_order
from ctxreuse.planning.conversation import Conversation
from ctxreuse.planning.plan import BatchPlan, Plan, Strategy
from ctxreuse.planning.shadow_mode import Arrived, Savings, Shadow
from ctxreuse.planning.tenants import Tenants, TenantState

__all__ = ["Mode", "ReusePlanner", "Strategy", "check_strategy"]

Mode: TypeAlias = Literal["active", "shadow"]
"""Whether plans are carried out, or only counted."""

_REMEMBERED_COUNTS = 100_000


class ReusePlanner:
    r"""Plans what to send so that the engine's prefix cache hits.

    Deterministic: the same requests in the same order give the same plans in any process. One
    planner may be shared by threads and asyncio tasks: a call never waits for anything but a short
    step of another call. A large `plan_batch` takes seconds; run it in a thread of its own.

    Args:
        alpha: Weight of the ranks in the papers' distance (Equation 1); only for "paper".
        token_counter: How to count blocks without a token count: a function from text to tokens, a
            tokenizer, or None for an estimate (`ctxreuse.context.tokens.estimate_tokens`).
        capacity_tokens: Tokens that the engine's cache holds. Give it where the engine does not
            report evictions; the index then forgets the least recently used as the engine does.
        templates: The words of labels and annotations.
        deduplicate: Whether blocks that a conversation shows already become references.
        annotate: Whether a changed order is told to the model, by an order annotation.
        trim_overlaps: Whether the rendering of a block leaves out a beginning that repeats the end
            of a block before it, as splitters with an overlap make them. Blocks stay whole.
        mode: "active", or "shadow": everything is sent as it was retrieved, and `savings` says what
            planning would have saved.

    Raises:
        InvalidRequestError: If an argument is of the wrong kind.

    Example:
        >>> planner = ReusePlanner()
        >>> request = ContextRequest(blocks=["first text", "second text"], query="Which?")
        >>> planner.plan(request).messages()[-1]["content"]
        '[Doc_1] first text\n\n[Doc_2] second text\n\nWhich?'
    """

    def __init__(
        self,
        alpha: float = 0.001,
        token_counter: Any = None,
        capacity_tokens: int | None = None,
        *,
        templates: Templates = DEFAULT_TEMPLATES,
        deduplicate: bool = True,
        annotate: bool = True,
        trim_overlaps: bool = False,
        mode: Mode = "active",
    ) -> None:
        if mode not in get_args(Mode):
            raise InvalidRequestError(
                f"there is no mode {describe(mode)}; choose 'active' or 'shadow'"
            )
        if not isinstance(alpha, (int, float)) or not 0 <= alpha < float("inf"):
            raise InvalidRequestError(f"alpha must be a number from 0, not {describe(alpha)}")
        if capacity_tokens is not None and (
            not isinstance(capacity_tokens, int) or capacity_tokens < 0
        ):
            raise InvalidRequestError(
                f"capacity_tokens must be an integer from 0 or None, not "
                f"{describe(capacity_tokens)}"
            )
        if not isinstance(templates, Templates):
            raise InvalidRequestError(
                f"templates must be ctxreuse.Templates, not {describe(templates)}"
            )
        self._alpha = alpha
        self._capacity_tokens = capacity_tokens
        self._count_tokens = as_token_counter(token_counter)
        self._templates = templates
        self._deduplicate = deduplicate
        self._annotate = annotate
        self._trim_overlaps = trim_overlaps
        self._tenants = Tenants(capacity_tokens)
        self._counts: OrderedDict[BlockKey, int] = OrderedDict()
        self._request_number = count()
        self._clock = count(1)
        self._lock = RLock()
        self._shadow = Shadow(self._with_mode("active")) if mode == "shadow" else None

    @property
    def savings(self) -> Savings:
        """What planning would have saved so far.

        Raises:
            InvalidRequestError: If the planner's mode is not "shadow".
        """
        if self._shadow is None:
            raise InvalidRequestError(
                "only a planner in shadow mode counts what planning would save; "
                'make it with ReusePlanner(mode="shadow")'
            )
        return self._shadow.savings

    @property
    def templates(self) -> Templates:
        """The words of labels and annotations."""
        return self._templates

    @property
    def counts_tokens(self) -> bool:
        """Whether tokens are counted by the counter that was given, not estimated."""
        return self._count_tokens is not estimate_tokens

    def plan(
        self,
        request: ContextRequest,
        strategy: Strategy = "reuse",
        *,
        deduplicate: bool | None = None,
    ) -> Plan:
        """Plan one request that has just arrived.

        Args:
            request: What the application is about to send.
            strategy: "reuse", "paper" (Algorithms 1 and 2) or "none" (as retrieved).
            deduplicate: Whether blocks that the conversation shows already become references; None
                is what the planner was made with.

        Returns:
            What to send. Its blocks and references are exactly the request's blocks, each once.

        Raises:
            InvalidRequestError: If `request` is no ContextRequest.
            UnknownStrategyError: If there is no such strategy.
        """
        check_strategy(strategy)
        _check_request(request)
        if self._shadow is not None:
            return self._send_in_order([request], strategy, deduplicate)[0]
        with self._lock:
            turn = self._open_turn(request, deduplicate)
            return self._send(turn, self._order(turn, strategy))

    def preview(self, request: ContextRequest, *, deduplicate: bool | None = None) -> Plan:
        """Return what `plan` would return now, without recording it as sent.

        Its request id is "", and no tokens are expected in the cache.

        Args:
            request: What the application may send.
            deduplicate: As in `plan`.

        Raises:
            InvalidRequestError: `request` is not a ContextRequest.
        """
        _check_request(request)
        with self._lock:
            turn = self._open_turn(request, deduplicate)
            if self._shadow is not None:
                return self._send(replace(turn, shown={}), list(turn.blocks), preview=True)
            return self._send(turn, self._order(turn, "reuse", preview=True), preview=True)

    def plan_batch(
        self,
        requests: Iterable[ContextRequest],
        strategy: Strategy = "reuse",
        *,
        deduplicate: bool | None = None,
    ) -> BatchPlan:
        """Plan requests that are known together, and the order in which to send them.

        Args:
            requests: The batch; turns of one conversation in their order.
            strategy: "reuse", "paper" (Algorithms 4 and 5) or "none" (as retrieved, in the order
                given).
            deduplicate: As in `plan`.

        Returns:
            The plans in execution order.

        Raises:
            InvalidRequestError: If one of them is no ContextRequest; nothing is planned then.
            UnknownStrategyError: If there is no such strategy.
            BatchTooLargeError: If the papers' algorithm cannot hold the batch.
        """
        if isinstance(requests, ContextRequest) or not isinstance(requests, Iterable):
            raise InvalidRequestError(
                f"requests must be a list of ContextRequest, not {describe(requests)}; "
                "use plan() for a single one"
            )
        batch = list(requests)
        check_strategy(strategy)
        for position, request in enumerate(batch):
            _check_request(request, position)
        with self._lock:  # counts all tokens too, before anything is recorded
            contexts = [self._batch_context(request) for request in batch]
        if strategy == "none" or self._shadow is not None:
            plans = self._send_in_order(batch, strategy, deduplicate)
            return BatchPlan(tuple(plans), tuple(range(len(batch))))
        # without the lock: a large batch takes seconds, and others only add to what is cached
        arrangement = arrange(contexts, strategy, self._alpha)
        plans = []
        for position in arrangement.execution:
            with self._lock:
                turn = self._open_turn(batch[position], deduplicate)
                plans.append(self._send(turn, arrangement.orders[position]))
        return BatchPlan(tuple(plans), tuple(arrangement.execution))

    def evict(self, request_ids: Iterable[str | int]) -> Evicted:
        """Tell the planner that the engine dropped these requests from its cache.

        Args:
            request_ids: Ids as given to or returned by the planner. Unknown ones are reported.
        """
        if isinstance(request_ids, (str, bytes)) or not isinstance(request_ids, Iterable):
            raise InvalidRequestError(
                f"request_ids must be a list of ids, not {describe(request_ids)}"
            )
        ids = list(request_ids)
        for request_id in ids:
            if not isinstance(request_id, (str, int)):
                raise InvalidRequestError(
                    f"a request id must be a string or an integer, not {describe(request_id)}"
                )
        with self._lock:
            evicted = self._tenants.evict(ids)
        if self._shadow is not None:
            self._shadow.planner.evict(ids)
        return evicted

    def evict_tokens(self, tokens: int) -> Evicted:
        """Tell the planner that the engine dropped this many tokens, the least recently used.

        Args:
            tokens: Block tokens, from 0. Whole blocks leave the index, so it may be a few more.
        """
        if not isinstance(tokens, int) or tokens < 0:
            raise InvalidRequestError(f"tokens must be an integer from 0, not {describe(tokens)}")
        with self._lock:
            evicted = self._tenants.evict_tokens(tokens)
        if self._shadow is not None:
            self._shadow.planner.evict_tokens(tokens)
        return evicted

    def trim(self, request_id: str | int, blocks: int) -> Evicted:
        """Tell the planner that the engine holds only the beginning of a request's prompt.

        Args:
            request_id: The request, as given to or returned by the planner.
            blocks: How many of the blocks that it sent are held still, from its first one on.

        Returns:
            What left the index: the request's other blocks, and what other requests sent behind
            them; nothing if it sent no more.
        """
        if not isinstance(blocks, int) or blocks < 0:
            raise InvalidRequestError(f"blocks must be an integer from 0, not {describe(blocks)}")
        with self._lock:
            evicted = self._tenants.trim(request_id, blocks)
        if self._shadow is not None:
            self._shadow.planner.trim(request_id, blocks)
        return evicted

    def count_tokens(self, text: str) -> int:
        """Return a text's length in tokens, counted or estimated as blocks are."""
        with self._lock:  # a counter is never asked twice at a time
            return self._count_tokens(text)

    def block_tokens(self, blocks: Iterable[ContextBlock]) -> int:
        """Return how many tokens the index counts for blocks."""
        with self._lock:
            return sum(self._weights({block.key: block for block in blocks}).values())

    def cached_tokens(self, request: ContextRequest, *, in_order: bool = False) -> int:
        """Return how many block tokens of a request are expected in the cache; record nothing.

        Args:
            request: A request that may be planned here, or elsewhere. What a later turn finds
                depends on its history only, so it counts as 0.
            in_order: Whether the blocks stay in the request's order; else in the best one.

        Raises:
            InvalidRequestError: If `request` is no ContextRequest.
        """
        _check_request(request)
        if request.history:
            return 0
        with self._lock:
            weights = self._weights(request.unique_blocks)
            state = self._tenants.known(request.tenant)
            if state is None:
                return 0
            root = state.index.root(request.system)
            if not in_order and self._shadow is None:
                return heaviest_path(root, weights).weight
            sent = sent_prefix(root, list(weights))
            return sum(list(weights.values())[:sent])

    def sibling(self) -> ReusePlanner:
        """Return a planner with the same settings that has seen nothing yet."""
        return self._with_mode("active" if self._shadow is None else "shadow")

    def _with_mode(self, mode: Mode) -> ReusePlanner:
        return ReusePlanner(
            self._alpha,
            self._count_tokens if self.counts_tokens else None,
            self._capacity_tokens,
            templates=self._templates,
            deduplicate=self._deduplicate,
            annotate=self._annotate,
            trim_overlaps=self._trim_overlaps,
            mode=mode,
        )

    def conversation(
        self, conversation_id: str | int, tenant: str = "", system: str | None = None
    ) -> Conversation:
        """Start a conversation that keeps its own messages.

        Args:
            conversation_id: Its name within the tenant.
            tenant: Whose conversation it is.
            system: The system message's text.
        """
        return Conversation(self.plan, conversation_id, tenant, system)

    def end_conversation(self, conversation_id: str | int, tenant: str = "") -> bool:
        """Forget what a conversation was shown; return whether it was known."""
        with self._lock:
            return self._tenants.state(tenant).conversations.forget(conversation_id)

    def statistics(self) -> IndexStatistics:
        """Return the size of the context index, all tenants together."""
        with self._lock:
            return self._tenants.statistics()

    def _open_turn(self, request: ContextRequest, deduplicate: bool | None) -> _Turn:
        state = self._tenants.state(request.tenant)
        history = EMPTY_HISTORY
        if request.history:
            history = state.conversations.read(
                request.conversation_id, request.history, self._templates
            )
        blocks = request.unique_blocks
        shown = history.label_of
        if not (self._deduplicate if deduplicate is None else deduplicate):
            shown = {}
        return _Turn(request, state, blocks, self._weights(blocks), history, shown)

    def _order(self, turn: _Turn, strategy: Strategy, *, preview: bool = False) -> list[BlockKey]:
        """Return the order of an arriving turn; behind a history there is nothing to gain."""
        if strategy == "none" or turn.request.history:
            return list(turn.blocks)
        root = turn.state.index.root(turn.request.system)
        if strategy == "paper":
            return paper_order(turn.weights, root, self._alpha)
        order = turn.state.online.order(turn.weights, root)
        if not preview:
            turn.state.online.learn(turn.weights, turn.request.system)
        return order

    def _send_in_order(
        self, requests: list[ContextRequest], strategy: Strategy, deduplicate: bool | None
    ) -> list[Plan]:
        """Return plans with the retriever's order; in shadow mode nothing is left out either."""
        plans, arrived = [], []
        for request in requests:
            with self._lock:
                turn = self._open_turn(request, deduplicate)
                if self._shadow is None:
                    plans.append(self._send(turn, list(turn.blocks)))
                    continue
                plans.append(self._send(replace(turn, shown={}), list(turn.blocks)))
                left_out = sum(turn.weights[key] for key in turn.blocks if key in turn.shown)
                arrived.append(Arrived(plans[-1], sum(turn.weights.values()), left_out))
        if self._shadow is not None:
            self._shadow.note(arrived, strategy)
        return plans

    def _batch_context(self, request: ContextRequest) -> BatchContext:
        weights = self._weights(request.unique_blocks)
        cached: tuple[BlockKey, ...] = ()
        if not request.history:
            index = self._tenants.state(request.tenant).index
            match = heaviest_path(index.root(request.system), weights)
            if match.weight >= ENGINE_BLOCK_TOKENS:
                cached = match.path
        return BatchContext(request, weights, cached)

    def _send(self, turn: _Turn, order: list[BlockKey], *, preview: bool = False) -> Plan:
        """Make the plan for an order, and record that it is sent unless it is a preview."""
        request, templates, index = turn.request, self._templates, turn.state.index
        shown = turn.shown
        sent = [key for key in order if key not in shown]
        ordinals = turn.history.next_ordinals(len(sent))
        label_of = {
            key: templates.block_label(ordinal) for ordinal, key in zip(ordinals, sent, strict=True)
        }
        annotation = None
        if self._annotate and not request.history and order != list(turn.blocks):
            annotation = templates.order_annotation([label_of[key] for key in turn.blocks])
        request_id = "" if preview else request.request_id
        while request_id is None or (request.request_id is None and index.knows(request_id)):
            request_id = f"request-{next(self._request_number)}"
        parts: list[Part] = []
        labels = dict(turn.history.labels)
        for key in order:
            block, label = turn.blocks[key], label_of.get(key)
            if label is None:
                words = templates.location_annotation(shown[key])
                parts.append(Reference(shown[key], block.id, words))
            else:
                parts.append(SentBlock(label, block))
                labels[label] = block.id
        if self._trim_overlaps and self._shadow is None:
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
        self, turn: _Turn, request_id: str | int, parts: list[Part], ordinals: list[int]
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
            turn.state.recent.add(sent)
        self._tenants.enforce_bounds(turn.state)
        if request.conversation_id is not None:
            whole = [
                (ordinal, part.block)
                for ordinal, part in zip(ordinals, shown, strict=True)
                if not part.repeated
            ]
            conversations.remember(request.conversation_id, whole, inserted.node, request.system)
        tokens = tuple(min(self._tokens(part.block), HEAVIEST) for part in shown)
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
        return turn.state.log.add(prompt), sum(tokens[: inserted.blocks_before])

    def _weights(self, blocks: dict[BlockKey, ContextBlock]) -> dict[BlockKey, int]:
        """Return each block's weight: its tokens, at least 1, for it has a label."""
        return {key: min(self._tokens(block) or 1, HEAVIEST) for key, block in blocks.items()}

    def _tokens(self, block: ContextBlock) -> int:
        if block.tokens is not None:
            return block.tokens
        tokens = self._counts.get(block.key)
        if tokens is None:
            tokens = self._counts[block.key] = self._count_tokens(block.text)
            if len(self._counts) > _REMEMBERED_COUNTS:
                self._counts.popitem(last=False)
        return tokens


@dataclass(frozen=True, slots=True)
class _Turn:
    """A request with what the planner knows about it."""

    request: ContextRequest
    state: TenantState
    blocks: dict[BlockKey, ContextBlock]
    weights: dict[BlockKey, int]
    history: History
    shown: Mapping[BlockKey, str]


def check_strategy(strategy: object) -> None:
    """Raise UnknownStrategyError if there is no such strategy."""
    if strategy not in get_args(Strategy):
        raise UnknownStrategyError(
            f"there is no strategy {describe(strategy)}; "
            f"choose one of {', '.join(map(repr, get_args(Strategy)))}"
        )


def _check_request(request: object, position: int | None = None) -> None:
    if not isinstance(request, ContextRequest):
        where = "" if position is None else f" at position {position}"
        raise InvalidRequestError(
            f"a request{where} must be a ContextRequest, not {describe(request)}; "
            "build one with ContextRequest(blocks=[...], query='...')"
        )
