"""Planning with what is known about each tenant, and with nothing of another tenant's."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import count
from typing import Any, NamedTuple

from ctxreuse.context.blocks import (
    BlockId,
    BlockKey,
    ContextBlock,
    ContextRequest,
    Message,
    text_digest,
)
from ctxreuse.context.fork_safety import process_name, renew_after_fork
from ctxreuse.context.lru_map import LRUMap
from ctxreuse.context.rendering import Templates
from ctxreuse.context.tokens import as_token_counter, estimate_tokens
from ctxreuse.errors import InvalidRequestError
from ctxreuse.memory.conversations import EMPTY_HISTORY, History, without_blocks
from ctxreuse.memory.points import Looked
from ctxreuse.memory.prefix_index import Evicted, IndexStatistics, RequestId, Root, SearchBudget
from ctxreuse.memory.sent_log import (
    MOST_BLOCK_TOKENS,
    EditEntry,
    IndexNames,
    KeyedDigests,
    LoggedPrompt,
    LostEntry,
    Ranks,
    SentEntry,
    SentWords,
    Sharing,
    ToldEntry,
    named_by,
)
from ctxreuse.memory.tenants import Tenants, TenantState, TokenRatio
from ctxreuse.planning.plan import BatchPlan, Plan, PreparedRequest
from ctxreuse.policy.batch import arrange
from ctxreuse.policy.view import Policy, View
from ctxreuse.rules.cache_rules import CacheRules
from ctxreuse.rules.marks import marks_of_batch

_KEPT_WORDS = 1_024
_MOST_RATIOS = 16
_LABELLED_TOKENS = 64
"""Blocks that are shorter on average stand without labels, which would cost a tenth and more."""


@dataclass(frozen=True)
class PlannerSettings:
    """How a planner plans; the arguments of `ReusePlanner`, checked."""

    alpha: float
    token_counter: Any
    capacity_tokens: int | None
    templates: Templates
    deduplicate: bool
    annotate: bool
    labels: bool | None
    cache: CacheRules
    keep_best: bool

    def words(self, number: int, is_labelled: bool) -> int:
        """Return about how many tokens it takes to say how a number of moved blocks rank."""
        if not self.annotate:
            return 0
        return self.templates.order_tokens(number, is_labelled=is_labelled)


class PlanOptions(NamedTuple):
    """How requests are planned; see `ReusePlanner.plan`."""

    deduplicate: bool | None = None
    now: float | None = None
    marks: tuple[int, ...] | None = None  # of first turns; None has them chosen
    primes: bool = False


class _TurnMarks(NamedTuple):
    """Where a turn is marked, where its conversation's first turn was, and what it reads so."""

    marks: tuple[int, ...] = ()
    opening: int | None = None  # see `Plan`
    looked: Looked | None = None


class _SentTurn(NamedTuple):
    ranks: Ranks
    keys: list[BlockKey]
    named: list[BlockKey]
    weights: list[int]


class TenantPlanner:
    """Plans requests, each with what its own tenant sent before.

    A tenant's state is held for short steps only: to order a request and to record it. Meanwhile
    others change what is expected in the cache, never which blocks a plan has.
    """

    def __init__(self, settings: PlannerSettings, keyed: KeyedDigests | None = None) -> None:
        self._settings = settings
        self.count_tokens = as_token_counter(settings.token_counter)
        cache = settings.cache
        self._tenants = Tenants(settings.capacity_tokens, rules=cache)
        self._clock = count(1)
        self._words = lru_cache(_KEPT_WORDS)(settings.words)
        self._most_ranked = settings.templates.most_ranked or sys.maxsize
        # asked for with each request
        self._least_tokens, self._has_minimum = cache.least_tokens, cache.has_minimum
        self._forks_pay = bool(cache.worth(1, 2))  # else most have no third use
        # what ends at a mark is read whole
        self._is_cut = cache.has_minimum and (cache.step_tokens > 1 or cache.serves_all)
        self._sharing = keyed if isinstance(keyed, Sharing) else None
        self._is_keyed = keyed is not None
        self._names = IndexNames(keyed)
        self._begun_behind = b""  # the uid of what this planner started from
        self._note_process()
        renew_after_fork(self._note_process)

    def _note_process(self) -> None:
        self._process = process_name()

    def plan(
        self,
        request: ContextRequest,
        policy: Policy,
        options: PlanOptions,
        *,
        is_preview: bool = False,
    ) -> Plan:
        """Plan one request; see `ReusePlanner.plan`."""
        turn = self._counted(request, options.deduplicate)
        if request.history:  # behind it there is nothing to gain
            turn = self._open_turn(turn, options.deduplicate)
            ranks: Ranks = tuple(range(len(turn.weights)))
        else:
            ranks = checked_ranks(policy, policy.order(self._view(turn, options.now)), turn)
        with self._tenants.holding(turn.tenant) as state:
            if is_preview:
                return self._plan(turn, ranks, _marks(turn, state, _sent(turn, ranks), options))
            return self._record(turn, state, ranks, options)

    def plan_batch(
        self, requests: Sequence[ContextRequest], policy: Policy, options: PlanOptions
    ) -> BatchPlan:
        """Plan requests that are known together; see `ReusePlanner.plan_batch`."""
        deduplicate, now, given_marks, primes = options
        # all tokens are counted before anything is recorded
        counted = [self._counted(one, deduplicate) for one in requests]
        if not primes and not self._forks_pay:
            plans = [self.plan(one, policy, options) for one in requests]
            return BatchPlan(tuple(plans), tuple(range(len(plans))))
        # one for each tenant: what others send with it changes nothing for a request
        budgets: defaultdict[str, SearchBudget] = defaultdict(SearchBudget)
        views = {
            position: self._view(one, now, budgets[one.tenant])
            for position, one in enumerate(counted)
            if not one.request.history
        }
        arranged = arrange(requests, views, policy)
        ranks = [tuple(range(len(one.weights))) for one in counted]
        for position in views:
            ranks[position] = checked_ranks(policy, arranged.orders[position], counted[position])
        marks: Mapping[int, tuple[int, ...]] = {}
        if given_marks is not None:
            marks = dict.fromkeys(views, given_marks)
        elif self._settings.cache.marks or (primes and not self._settings.cache.serves_all):
            marks = self._marks_together(counted, ranks, arranged.execution, options)
        plans = []
        for position in arranged.execution:
            turn = counted[position]
            if turn.request.history:
                turn = self._open_turn(turn, deduplicate)
            recorded = PlanOptions(deduplicate, now, marks.get(position))
            with self._tenants.holding(turn.tenant) as state:
                plans.append(self._record(turn, state, ranks[position], recorded))
        return BatchPlan(tuple(plans), tuple(arranged.execution))

    def evict(
        self, request_ids: Sequence[str | int], tenant: str | None = None, blocks: int | None = None
    ) -> Evicted:
        """Forget requests, or what stands behind their first blocks; see `ReusePlanner.trim`."""
        name = None if tenant is None else self._names.tenant(tenant)
        return self._tenants.evict(request_ids, name, self._tell_lost, blocks)

    def evict_tokens(self, tokens: int) -> Evicted:
        """Forget the least recently used tokens; see `ReusePlanner.evict_tokens`."""
        return self._tenants.evict_tokens(tokens)

    def block_tokens(
        self, blocks: Iterable[ContextBlock], tenant: str, system: str | None = None
    ) -> int:
        """Return how many tokens the index counts for blocks."""
        name = self._names.tenant(tenant)
        tokens = self._tokens(blocks, name, self._names.system(system))
        return sum([number or 1 for number in tokens.values()])

    def note_length(self, plan: Plan, prompt_tokens: int) -> None:
        """Learn how long a prompt is in the engine's tokens, where they are estimated."""
        request = plan.request
        # what stands before a later turn is no part of its plan
        if request.history or self._settings.token_counter is not None:
            return
        estimated = sum(estimate_tokens(one.text) for one in plan.blocks if one.tokens is None)
        prompt_tokens -= sum(one.tokens or 0 for one in plan.blocks)
        if estimated and prompt_tokens > 0:
            with self._tenants.holding(self._names.tenant(request.tenant)) as state:
                state.ratios = state.ratios or LRUMap(_MOST_RATIOS)
                ratio = state.ratios.get_or_make(self._names.system(request.system), TokenRatio)
                ratio.note(estimated, prompt_tokens)

    def shown_blocks(self, request: ContextRequest) -> dict[str, ContextBlock]:
        """Return the blocks that a turn's history shows; see `ReusePlanner.shown_blocks`."""
        return self._history(request, self._names.tenant(request.tenant)).blocks

    def without_blocks(
        self,
        messages: Sequence[Message],
        block_ids: Iterable[BlockId],
        conversation_id: str | int,
        tenant: str,
    ) -> list[dict[str, Any]]:
        """Return messages without some blocks' texts; see `ReusePlanner.without_blocks`."""
        with self._tenants.holding(self._names.tenant(tenant)) as state:
            recorded = state.conversations.recorded(conversation_id)
        return without_blocks(messages, recorded, list(block_ids), self._settings.templates)

    def cached_tokens(self, request: ContextRequest, *, in_order: bool = False) -> int:
        """Return the block tokens expected in the cache; see `ReusePlanner.cached_tokens`."""
        tenant = self._names.tenant(request.tenant)
        known = self._tenants.known(tenant)
        if known is None:
            return 0
        counted = self._counted(request, None)
        weights, index = counted.named, known.index
        with self._tenants.holding(tenant):
            if not in_order:
                match = index.search(counted.root, weights)
                for name in match.limits:
                    self._tenants.note_limit(name)
                return match.weight
            sent = index.sent_prefix(counted.root, list(weights))
        return sum(list(weights.values())[:sent])

    def end_conversation(self, conversation_id: str | int, tenant: str) -> bool:
        """Forget what a conversation was shown; return whether it was known."""
        name = self._names.tenant(tenant)
        if self._tenants.known(name) is None:
            return False
        with self._tenants.holding(name) as state:
            return state.conversations.forget(conversation_id)

    def statistics(self) -> IndexStatistics:
        """Return the size of the index and of all else that is remembered."""
        return self._tenants.statistics()

    def _tokens(
        self, blocks: Iterable[ContextBlock], tenant: str, system: bytes | None
    ) -> dict[BlockKey, int]:
        tokens: dict[BlockKey, int] = {}
        uncounted: dict[BlockKey, str] = {}
        for block in blocks:
            key, number = block.key, block.tokens
            if key in tokens:
                continue
            if number is None:
                uncounted[key], number = block.text, 0
            tokens[key] = number if number < MOST_BLOCK_TOKENS else MOST_BLOCK_TOKENS
        if not uncounted:
            return tokens
        state = self._tenants.state(tenant)
        known = state.token_counts
        learnt = None if state.ratios is None else state.ratios.peek(system)
        ratio = 1.0 if learnt is None else learnt.value
        counted: dict[BlockKey, int] = {}
        for key, text in uncounted.items():
            number = known.get(key)  # one step, which needs no lock
            if number is None:
                number = counted[key] = min(self.count_tokens(text), MOST_BLOCK_TOKENS)
            if ratio != 1.0 and number:
                number = min(max(round(ratio * number), 1), MOST_BLOCK_TOKENS)
            tokens[key] = number
        if counted:  # the tenant is held only now, because a counter may take its time
            with self._tenants.holding(tenant) as state:
                state.token_counts.update(counted)
        return tokens

    def _counted(self, request: ContextRequest, deduplicate: bool | None) -> PreparedRequest:
        """Return a request with its blocks counted; labels stand where something needs them."""
        tenant, settings = request.tenant, self._settings
        system = None if request.system is None else text_digest(request.system)
        if self._is_keyed:
            tenant, system = self._names.tenant(tenant), self._names.system(request.system)
        blocks = request.unique_blocks
        tokens = self._tokens(blocks.values(), tenant, system)
        # at least 1, for a label
        weights = {key: number or 1 for key, number in tokens.items()}
        named = self._names.weights(weights) if self._is_keyed else weights
        front_tokens = 0
        if request.system and self._has_minimum:
            front = [ContextBlock(text=request.system)]
            [front_tokens] = self._tokens(front, tenant, system).values()
        labels = settings.labels if request.labels is None else request.labels
        if labels is None:
            labels = not settings.templates.is_plain or (
                (request.history is not None or request.conversation_id is not None)
                and (settings.deduplicate if deduplicate is None else deduplicate)
                and sum(tokens.values()) >= _LABELLED_TOKENS * len(tokens)
            )
        root = system, labels
        return PreparedRequest(request, tenant, tokens, weights, named, front_tokens, root, blocks)

    def _view(
        self, counted: PreparedRequest, now: float | None, budget: SearchBudget | None = None
    ) -> View:
        settings, weights = self._settings, counted.named
        least = max(1, self._least_tokens - counted.front_tokens)
        return View(
            self._tenants.state(counted.tenant),
            least,
            budget,
            counted.request,
            weights,
            counted.root,
            counted.front_tokens,
            settings.cache,
            now,
            words=self._words(min(len(weights), self._most_ranked), counted.root[1]),
            first=next(iter(weights), None) if settings.keep_best else None,
            missing=least if self._has_minimum else 0,
            is_too_short=sum(weights.values()) < least,
            note_limit=self._tenants.note_limit,
        )

    def _history(self, request: ContextRequest, tenant: str) -> History:
        """Return what the messages before a turn show of its blocks, whoever planned them."""
        if not request.history:
            return EMPTY_HISTORY
        with self._tenants.holding(tenant) as state:
            recorded = state.conversations.recorded(request.conversation_id)
            reading = state.conversations.take_reading(request.conversation_id)
        templates = self._settings.templates
        own = [block for block in request.unique_blocks.values() if block.text]
        history = reading.read(request.history, recorded, templates, own, request.outdated)
        with self._tenants.holding(tenant) as state:
            state.conversations.put_reading(request.conversation_id, reading)
        return history

    def _open_turn(self, counted: PreparedRequest, deduplicate: bool | None) -> PreparedRequest:
        request, tokens, unique = counted.request, counted.tokens, counted.blocks
        history = self._history(request, counted.tenant)
        if deduplicate is None:
            deduplicate = self._settings.deduplicate
        shown: Mapping[BlockKey, str] = {}
        if deduplicate:
            shown = history.label_of
            # no label tells where these stand: where something may refer to them, they come again
            if history.unlabelled and not counted.root[1]:
                shown = {**dict.fromkeys(history.unlabelled & tokens.keys(), ""), **shown}
        withdrawn = _withdrawn(request, history, self._settings.templates)
        outdated: list[str] = []
        said = history.said_outdated
        # what an earlier turn has said of a block counts, although it may hold again
        if request.outdated or (said and not shown.keys().isdisjoint(tokens)):
            holding = {
                label: row[0] for label, (row, _, _) in history.places.items() if label not in said
            }
            gone = {block.key for block in request.outdated} - unique.keys()
            outdated = [label for label, key in holding.items() if key in gone]
            current = {key: label for label, key in reversed(holding.items())}
            shown = {
                key: current.get(key, "")
                for key in shown
                if key in current or key in history.unlabelled
            }
        return counted._replace(
            history=history,
            shown=self._certain(shown, unique),
            outdated=outdated,
            withdrawn=withdrawn,
        )

    def _certain(
        self, shown: Mapping[BlockKey, str], blocks: Mapping[BlockKey, ContextBlock]
    ) -> Mapping[BlockKey, str]:
        """Return the blocks to leave out whose labels no other text that is sent has, or holds."""
        sent = [block for key, block in blocks.items() if key not in shown]
        digests = {shown[key]: one.digest for key, one in blocks.items() if shown.get(key)}
        label_of = self._settings.templates.label_of
        others = {label_of(one) for one in sent if digests.get(label_of(one)) != one.digest}
        labels = {
            one for one in digests.keys() - others if not any(one in block.text for block in sent)
        }
        return {key: one for key, one in shown.items() if not one or one in labels}

    def _marks_together(
        self,
        counted: Sequence[PreparedRequest],
        ranks: Sequence[Ranks],
        execution: Sequence[int],
        options: PlanOptions,
    ) -> dict[int, tuple[int, ...]]:
        """Return the marks or primes of a batch's first turns, by their positions."""
        groups: dict[tuple[str, Root], list[int]] = {}
        for position in execution:
            one = counted[position]
            if not one.request.history:
                groups.setdefault((one.tenant, one.root), []).append(position)
        marks: dict[int, tuple[int, ...]] = {}
        for (tenant, root), positions in groups.items():
            sent = [_sent(counted[position], ranks[position]) for position in positions]
            keys, weights = [one.named for one in sent], [one.weights for one in sent]
            front = counted[positions[0]].front_tokens
            with self._tenants.holding(tenant) as state:
                assert state.points is not None, "it has marks, or states at junctions"
                looks = partial(state.points.look, state.index, root, front, now=options.now)
                readable = [looks(*one).readable[-1] for one in zip(keys, weights, strict=True)]
            chosen = marks_of_batch(keys, weights, front, readable, self._settings.cache)
            marks.update(zip(positions, chosen, strict=True))
        return marks

    def _record(
        self, turn: PreparedRequest, state: TenantState, ranks: Ranks, options: PlanOptions
    ) -> Plan:
        """Record what a turn sends, and return its plan; without marks, they are chosen here."""
        request, index, conversations = turn.request, state.index, state.conversations
        tick = next(self._clock)
        sent = _sent(turn, ranks)
        chosen = _marks(turn, state, sent, options)
        request_id = request.request_id
        while request_id is None or (request.request_id is None and request_id in index):
            request_id = f"request-{self._process}{state.unnamed_requests}"
            state.unnamed_requests += 1
        conversation = request.conversation_id
        entry = SentEntry(
            request_id=request_id,
            tenant=turn.tenant,
            system=turn.root[0],
            keys=tuple(sent.named),
            tokens=tuple([turn.tokens[key] for key in sent.keys]),
            ranks=sent.ranks,
            ids=tuple([turn.blocks[key].id for key in sent.keys]),
            is_labelled=turn.root[1],
            is_later_turn=bool(request.history),
            front_tokens=turn.front_tokens,
            marks=chosen.marks,
            time_s=options.now,
            is_alone=options.marks is None,
            conversation=None if conversation is None else text_digest(repr(conversation)),
            history=len(request.history or ()),
        )
        behind = conversations.end_of(conversation, turn.root) if request.history else 0
        inserted = state.commit(entry, tick, chosen.looked, behind)
        if self._sharing is not None and not request.history:
            self._sharing.tell_own(entry)
        if conversation is not None:
            label_of = self._settings.templates.label_of
            shown = [(label_of(turn.blocks[key]), turn.blocks[key]) for key in sent.keys]
            opening = None if request.history else max(chosen.marks, default=-1)
            conversations.remember(conversation, shown, inserted.end.place, turn.root, opening)
        state.log.add(tick, entry)
        if turn.history.is_cut_short:
            self._tenants.note_limit("shown_blocks")
        logged = LoggedPrompt(entry, state.log, tick, counted=[])
        read = inserted.blocks_before
        cached = sum(entry.tokens[: max(0, read)])
        if self._is_cut:
            cached = self._settings.cache.served(turn.front_tokens, cached)
        is_marked = state.points is not None and state.points.most_marks and chosen.looked
        blocks = read if is_marked else None
        return self._plan(turn, ranks, chosen, request_id, cached, blocks, logged)

    def _plan(
        self,
        turn: PreparedRequest,
        ranks: Ranks,
        chosen: _TurnMarks,
        request_id: str | int = "",
        cached_tokens: int = 0,
        read_blocks: int | None = None,
        logged: LoggedPrompt | None = None,
    ) -> Plan:
        """Return the plan for an order; without a record, that of a preview."""
        settings, cache = self._settings, self._settings.cache
        return Plan(
            request_id,
            turn,
            ranks,
            settings.templates,
            cached_tokens,
            settings.annotate,
            marks=chosen.marks if cache.marks else (),
            primes=() if cache.marks else chosen.marks,
            opening_mark=chosen.opening,
            cache=cache,
            read_blocks=read_blocks,
            logged=logged,
        )

    def replay(self, keyed: KeyedDigests) -> list[ToldEntry]:
        """Return what was sent of late, as keyed digests, oldest first."""
        names = IndexNames(keyed)
        entries: list[ToldEntry] = [
            entry
            if isinstance(entry, EditEntry)
            else named_by(entry, names.uid(entry.tenant, entry.request_id, self._begun_behind))
            for entry in self._tenants.replay()
        ]
        return entries if self._is_keyed else [*map(names.renamed, entries)]

    def restore(self, entries: Iterable[ToldEntry]) -> None:
        """Learn what a planner has sent that this one, still empty, goes on for."""
        for entry in entries:
            self.take_in(entry)
            if isinstance(entry, EditEntry):
                continue
            assert isinstance(entry.request_id, bytes)
            self._begun_behind = entry.request_id
            with self._tenants.holding(entry.tenant) as state:
                state.log.add(next(self._clock), entry)

    def words_of(self, tenant: str) -> SentWords:
        """Return what a tenant's prompts say around contexts."""
        log = self._tenants.state(self._names.tenant(tenant)).log
        log.words = log.words or SentWords()
        return log.words

    def edit_of(self, tenant: str, message: bytes) -> bytes | None:
        """Return how a message was sent, as `Edit` has it; None if that is not known."""
        state = self._tenants.known(self._names.tenant(tenant))
        if state is None:
            return None
        name = self._names.message(message)
        with self._tenants.holding(state.name) as held:
            edit = held.log.edits.get(name)
        return None if edit is None else self._names.sealed(name, edit)

    def note_edit(self, tenant: str, messages: Iterable[bytes], edit: bytes) -> None:
        """Remember how a message is sent that has some names, and tell others of it."""
        for message in map(self._names.message, messages):
            sealed = self._names.sealed(message, edit)
            entry = EditEntry(message, self._names.tenant(tenant), sealed)
            self.take_in(entry)
            if self._sharing is not None:
                self._sharing.tell(entry)

    def take_in(self, entry: ToldEntry) -> None:
        """Learn what another planner has sent, or what its engine has lost."""
        if isinstance(entry, EditEntry):
            with self._tenants.holding(entry.tenant) as state:
                state.log.edits.put(entry.request_id, entry.edit)
            return
        if isinstance(entry, LostEntry):
            self._tenants.evict([entry.request_id], entry.tenant, blocks=entry.blocks)
            return
        with self._tenants.holding(entry.tenant) as state:
            state.commit(entry, next(self._clock))

    def _tell_lost(self, tenant: str, request_id: RequestId, blocks: int | None) -> None:
        entry = LostEntry(request_id, tenant, blocks)
        if self._sharing is not None:
            self._sharing.tell_own(entry)
        else:
            with self._tenants.holding(tenant) as state:
                state.log.add(next(self._clock), entry)


def _sent(turn: PreparedRequest, ranks: Ranks) -> _SentTurn:
    """Return what is sent in an order: not the blocks that the history shows."""
    own, shown = turn.weights, turn.shown
    retrieved, names = list(own), list(turn.named)
    ranks = tuple([rank for rank in ranks if retrieved[rank] not in shown])
    keys, named = [retrieved[rank] for rank in ranks], [names[rank] for rank in ranks]
    return _SentTurn(ranks, keys, named, [own[key] for key in keys])


def _marks(
    turn: PreparedRequest, state: TenantState, sent: _SentTurn, options: PlanOptions
) -> _TurnMarks:
    """Return the marks of a turn: of a first one where it is read, or written for others."""
    points = state.points
    if points is None:
        return _TurnMarks()
    if turn.request.history:
        opening = state.conversations.opening_mark_of(turn.request.conversation_id, turn.root)
        # the whole turn is written for the next one, so this mark costs nothing
        ends = (len(sent.keys),) if sent.keys and points.most_marks else ()
        return _TurnMarks(ends, opening)
    path, now = (sent.named, sent.weights), options.now
    looked = points.look(state.index, turn.root, turn.front_tokens, *path, now)
    marks = options.marks
    if marks is None:
        marks = points.primes(looked) if options.primes else points.choose(looked)[0]
    return _TurnMarks(marks, None, looked)


def checked_ranks(policy: Policy, order: Sequence[BlockKey], counted: PreparedRequest) -> Ranks:
    """Return the ranks of a policy's order, which holds each block once."""
    rank = {key: place for place, key in enumerate(counted.named)}
    ranks = tuple([rank.pop(key, -1) for key in order])
    if rank or -1 in ranks:
        raise InvalidRequestError(
            f"the policy {policy.name!r} returned an order of {len(order)} keys that is no "
            f"permutation of the {len(counted.named)} blocks in view.weights; return "
            "each key once"
        )
    return ranks


def _withdrawn(request: ContextRequest, history: History, templates: Templates) -> list[str]:
    """Return the words on outdated blocks that a history shows without labels; none twice."""
    gone = (
        block
        for block in request.outdated
        if block.key in history.unlabelled and block.key not in request.unique_blocks
    )
    return list(dict.fromkeys(templates.quoted_outdated(block.text) for block in gone))
