"""What comes out: plans and the calls that they are sent in, as frozen values."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from types import EllipsisType
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

from ctxreuse.context.blocks import (
    BlockId,
    BlockKey,
    ContextBlock,
    ContextRequest,
    OpenAIMessage,
    encoded,
    id_name,
    text_digest,
)
from ctxreuse.context.checks import checked_integer, checked_kind
from ctxreuse.context.content_parts import ContentPart, joined, turn_parts, without_blank_parts
from ctxreuse.context.fork_safety import ForkSafeLock, cached_property
from ctxreuse.context.lru_map import LRUMap
from ctxreuse.context.rendering import (
    Notice,
    Reference,
    SentBlock,
    Templates,
    TurnPart,
    render_messages,
)
from ctxreuse.context.reported_usage import reported_miss
from ctxreuse.context.tokens import estimate_tokens
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.memory.conversations import EMPTY_HISTORY, History
from ctxreuse.memory.explanations import Explanation, explain
from ctxreuse.memory.prefix_index import Root
from ctxreuse.memory.sent_log import LoggedPrompt, Ranks
from ctxreuse.rules.billed_tokens import BilledTokens, billed_if_sent
from ctxreuse.rules.cache_rules import DEFAULT_CACHE, CacheRules
from ctxreuse.rules.prompt_forms import PromptForm, mark_opening, mark_turn_before, prompt_body

_MINUTE_S = 60.0
_MOST_GROUPS = 10_000

Strategy: TypeAlias = Literal["reuse", "paper", "none"]
"""This package's order, the papers' order, or the retriever's."""


class PreparedRequest(NamedTuple):
    """A request with the sizes of its blocks and, of an open turn, what its history shows."""

    request: ContextRequest
    tenant: str  # as `IndexNames` names it
    tokens: Mapping[BlockKey, int]
    weights: Mapping[BlockKey, int]  # at least 1 each, in the retriever's order
    named: Mapping[BlockKey, int]  # the same, by the names that the index has for the blocks
    front_tokens: int  # in front of the blocks; 0 where the cache has no minimum
    root: Root  # what its root in the index is named after; whether it shows labels
    blocks: Mapping[BlockKey, ContextBlock]
    history: History = EMPTY_HISTORY
    shown: Mapping[BlockKey, str] = {}  # blocks to leave out, with their labels there, or ""
    outdated: Sequence[str] = ()  # labels of what no longer holds, and is not yet said
    withdrawn: Sequence[str] = ()  # words on those without a label


@dataclass(frozen=True)
class Plan:
    """What to send instead of the context as it was retrieved.

    `blocks` and `references` together are exactly the request's blocks, each once.

    Attributes:
        request_id: The request's own id, or the planner's count.
        turn: The request, and what its history shows.
        ranks: The order of its blocks, left-out ones included.
        templates: The words around the blocks.
        expected_cached_tokens: Block tokens of this turn expected to be served from the cache.
        annotates: Whether a first turn says how its blocks rank.
        words: What it says of the order; None is nothing, and `...` the words of `templates`.
        marks: After how many of `blocks` a mark stands, ascending; 0 is behind the system text.
        opening_mark: Of a later turn: after how many blocks of the conversation's first one a mark
            stands; None for none.
        cache: The rules of the cache that it was planned for.
        shards: Into how many parts its prefix group is divided.
        primes: After how many of `blocks` a prime ends, ascending: a call with the prompt up to
            there, to be sent before it.
        read_blocks: After how many blocks ends what is expected to be read, where a cache keeps
            what is marked; negative is nothing. None for other caches, and for later turns.
        logged: The planner's record of it, for `explain`.

    Raises:
        InvalidRequestError: by its methods: wrong type, or an option that needs another one.
    """

    request_id: str | int
    turn: PreparedRequest
    ranks: Ranks
    templates: Templates
    expected_cached_tokens: int
    annotates: bool = True
    words: str | EllipsisType | None = ...
    marks: tuple[int, ...] = ()
    opening_mark: int | None = None
    cache: CacheRules = DEFAULT_CACHE
    shards: int = 1
    primes: tuple[int, ...] = ()
    read_blocks: int | None = field(default=None, compare=False)
    logged: LoggedPrompt | None = field(default=None, repr=False, compare=False)

    @property
    def request(self) -> ContextRequest:
        """The request that was planned."""
        return self.turn.request

    @property
    def expected_bill(self) -> BilledTokens | None:
        """The tokens of its system text and blocks, by whether they are read, written or neither.

        None where `read_blocks` is.
        """
        if self.read_blocks is None or self.logged is None:
            return None
        sent = self.logged.prompt
        ends = list(sent.marks or ())
        if sent.conversation is not None:  # its next turn reads all of it
            ends.append(len(sent.tokens))
        read = self.read_blocks
        return billed_if_sent(self.cache, sent.front_tokens, sent.tokens, ends, read)

    @cached_property
    def _shown(self) -> tuple[tuple[TurnPart, ...], dict[str, BlockId]]:
        """The parts of its turn in order, and the labels in its prompt."""
        turn, templates = self.turn, self.templates
        shown, keys = turn.shown, list(turn.weights)
        order = [keys[rank] for rank in self.ranks]
        label_of = {key: templates.label_of(turn.blocks[key]) for key in order if key not in shown}
        parts: list[TurnPart] = [Notice("", words) for words in turn.withdrawn]
        labels = dict(turn.history.labels)
        replaced: dict[BlockId, list[str]] = {}
        if turn.outdated:
            replaced = {block.id: [] for block in turn.blocks.values()}
            for old in turn.outdated:
                if labels[old] in replaced:
                    replaced[labels[old]].append(old)
                else:
                    parts.append(Notice(old, templates.outdated_annotation(old, None)))
        left_out = [key for key in order if key in shown]
        first = {shown[key]: key for key in reversed(left_out) if shown[key]}
        named = [key for key in left_out if first.get(shown[key]) == key]  # each label once
        locations = templates.location_annotations([shown[key] for key in named])
        words_of = dict(zip(named, locations, strict=True))
        if templates.has_location_line:  # it stands behind the blocks
            order = [*label_of, *left_out]
        for key in order:
            block, label = turn.blocks[key], label_of.get(key)
            earlier = replaced.pop(block.id, ())
            if label is not None and label in earlier:  # it is named after its id
                parts.append(Notice(label, templates.outdated_annotation(label)))
            if label is None:
                parts.append(Reference(shown[key], block.id, words_of.get(key, "")))
            else:
                parts.append(SentBlock(label, block))
                labels[label] = block.id
            for old in earlier:
                new = label or shown[key] if turn.root[1] else shown.get(key)
                if old != label:
                    parts.append(Notice(old, templates.outdated_annotation(old, new or None)))
        return tuple(parts), labels

    @property
    def parts(self) -> tuple[TurnPart, ...]:
        """What this turn shows, in order: sent blocks, references and notices."""
        return self._shown[0]

    @property
    def labels(self) -> Mapping[str, BlockId]:
        """Label -> block id, for every label in the prompt, earlier turns included."""
        return self._shown[1] if self.is_labelled else self.turn.history.labels

    @property
    def order_annotation(self) -> str | None:
        """The retriever's ranking in words; None if there is nothing to say."""
        if not isinstance(self.words, EllipsisType):
            return self.words
        best = self.templates.most_ranked  # further ones are not named
        order, retrieved = self.ranks[:best], tuple(range(len(self.ranks)))[:best]
        if not self.annotates or self.turn.request.history or order == retrieved:
            return None
        keys = list(self.turn.weights)[:best]
        if self.turn.root[1]:
            named = [self.templates.label_of(self.turn.blocks[key]) for key in keys]
        else:
            named = [str(self.sent.index(key) + 1) for key in keys]
        return self.templates.order_annotation(named)

    @cached_property
    def sent(self) -> list[BlockKey]:
        """The keys of `blocks`."""
        keys, shown = list(self.turn.weights), self.turn.shown
        return [keys[rank] for rank in self.ranks if keys[rank] not in shown]

    @property
    def is_labelled(self) -> bool:
        """Whether the message shows the blocks under their labels."""
        return self.turn.root[1]

    def with_order_annotation(self, words: str | None) -> Plan:
        """Return a plan that says something else of the order, or nothing."""
        return replace(self, words=words)

    @property
    def blocks(self) -> tuple[ContextBlock, ...]:
        """The blocks to send, in order."""
        return tuple([self.turn.blocks[key] for key in self.sent])

    @property
    def references(self) -> tuple[BlockId, ...]:
        """The ids of the blocks left out, in the retriever's order."""
        return tuple(part.id for part in self.parts if isinstance(part, Reference))

    @property
    def location_annotations(self) -> tuple[str, ...]:
        """Where left-out blocks stand, in words: a line for all, or words for each."""
        said = (part.annotation for part in self.parts if isinstance(part, Reference))
        return tuple(filter(None, said))

    @property
    def label_of(self) -> dict[BlockKey, str]:
        """The label of each block of the request; of a left-out one the label where it stands."""
        shown, label_of = self.turn.shown, self.templates.label_of
        return {
            key: shown[key] if key in shown else label_of(block)
            for key, block in self.turn.blocks.items()
        }

    @property
    def content(self) -> str:
        """This turn's user message: blocks, annotations, question."""
        return self.rendered(self.request.query)

    def rendered(self, query: str = "", *, with_order: bool = True) -> str:
        """Return this turn's blocks and annotations, with the order's or not, before a question."""
        checked_kind("query", query, str, "a string")
        order = self.order_annotation if with_order else None
        is_labelled = self.is_labelled
        return joined(turn_parts(self.parts, order, query, self.templates, is_labelled=is_labelled))

    def affinity_id(self, key: str = "") -> str:
        """Return the id by which caches and routers keep requests with a common prefix together.

        Args:
            key: A secret, without which nobody can tell tenant and documents from the id.
        """
        return affinity_id(shard_of(self), checked_kind("key", key, str, "a string"))

    @property
    def prompt_cache_key(self) -> str:
        """The affinity id without a secret, for OpenAI's `prompt_cache_key`."""
        return self.affinity_id()

    def content_parts(self, query: str | None = None) -> tuple[ContentPart, ...]:
        """Return `content` cut into parts, which add up to it: each block is a part of its own.

        Prompts that begin with the same blocks begin with the same parts. A part is marked where a
        mark stands behind its block; so is the last part of a conversation's turn.

        Args:
            query: Another question than the request's; "" for none. The turn ends in front of it.
        """
        asked = self.request.query if query is None else checked_kind("query", query, str, "a str")
        order, words, marks = self.order_annotation, self.templates, self.marks
        parts = turn_parts(self.parts, order, asked, words, marks, is_labelled=self.is_labelled)
        if self.request.history:  # for who asks that turn again, if there is room
            parts = [part.as_spare() if part.is_marked else part for part in parts]
        if parts and query is None and self._is_in_conversation:
            parts[-1] = parts[-1].as_end()
        return tuple(without_blank_parts(parts))

    @property
    def _is_in_conversation(self) -> bool:
        """Whether a cache with marks should keep the whole turn, for the one behind it."""
        request = self.request
        in_conversation = request.conversation_id is not None or bool(request.history)
        return in_conversation and self.cache.marks > 0

    def messages(
        self, *, parts: bool = False, form: PromptForm = "openai", citations: bool = False
    ) -> list[OpenAIMessage]:
        """Return the prompt as chat messages: system, history, this turn.

        Args:
            parts: Whether this turn is a list of content parts, one a block, with the plan's marks,
                as far as the provider takes them. The history stays as it is.
            form: With parts, the protocol: "openai" (chat completions), "responses" (OpenAI's),
                "anthropic" (messages) or "bedrock" (Converse). In the last two the system text is
                no message; `body` has it.
            citations: With parts and "anthropic": whether blocks become search results, to be
                cited.
        """
        checked_kind("parts", parts, bool, "True or False")
        if not parts:
            if form != "openai" or citations:
                raise InvalidRequestError(
                    f"form={describe(form)} and citations={describe(citations)} need parts=True"
                )
            return render_messages(self.request.system, self.request.history, self.content)
        body = self.body(form, citations=citations)
        written: list[dict[str, Any]] = body["input" if form == "responses" else "messages"]
        return written

    def front(self, end: int) -> list[OpenAIMessage]:
        """Return the prompt up to behind so many blocks, for a prime: the last message is open."""
        checked_integer("end", end, 1)
        parts = turn_parts(self.parts, None, "", self.templates, (), is_labelled=self.is_labelled)
        ends = [n for n, part in enumerate(parts, start=1) if part.block is not None]
        text = joined(parts[: ends[:end][-1]]) if ends else ""
        return render_messages(self.request.system, self.request.history, text)

    def body(
        self, form: PromptForm = "openai", *, citations: bool = False, tools: Sequence[Any] = ()
    ) -> dict[str, Any]:
        """Return the fields of a request that carry the prompt, with content parts and marks.

        Args:
            form: The protocol, as in `messages`.
            citations: As in `messages`.
            tools: The request's tools, in the form of the protocol; their marks count, too.

        Returns:
            `messages`, `input`, or `system` and `messages`; `tools` if there are any (`toolConfig`
            for Bedrock); for OpenAI also `prompt_cache_options` and `prompt_cache_key`, where it
            has them.

        Example:
            >>> from ctxreuse import ContextRequest, ReusePlanner
            >>> planner = ReusePlanner()
            >>> planner.plan(ContextRequest(["first", "second"], "Which?")).body("anthropic")
            {'messages': [{'role': 'user', 'content': [{'type': 'text', 'text': 'first'}, ...]}]}
        """
        request = self.request
        messages = render_messages(None, request.history)
        if self._is_in_conversation:
            mark_turn_before(messages)
            mark_opening(messages, self.opening_mark or 0)
        if request.system:
            system = ContentPart(request.system, is_marked=0 in self.marks)
            system = system.as_spare() if self.opening_mark == 0 else system
            messages.insert(0, {"role": "system", "content": [system]})
        own = list(self.content_parts())
        messages.append({"role": "user", "content": own or self.content})
        key = self.prompt_cache_key
        return prompt_body(messages, self.cache, form, tools, citations=citations, key=key)

    def explain(self, response: object = None) -> Explanation:
        """Return why it hits or misses, compared with the tenant's 256 before it from this planner.

        Args:
            response: The provider's answer, or its diagnostics alone, as a dict or an object: what
                it says of the miss then stands beside the planner's reason.

        Raises:
            InvalidRequestError: no planner made this plan.
        """
        if self.logged is None:
            raise InvalidRequestError(
                "this plan was made by hand; only a planner knows what was sent before it"
            )
        prompt, system = self.logged.prompt, self.request.system or ""
        explanation = explain(
            replace(prompt, front_tokens=prompt.front_tokens or estimate_tokens(system)),
            self.logged.earlier(),
            self.expected_cached_tokens,
            cache=self.cache,
        )
        return replace(explanation, reported=reported_miss(response))


class Prime(NamedTuple):
    """A call that makes a fork readable: a plan's prompt up to behind so many blocks."""

    plan: Plan
    blocks: int


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The plans of a batch, in the order in which they should be sent.

    Attributes:
        plans: One plan a request, in execution order.
        order: `order[i]` is the position of `plans[i]`'s request in the input: a permutation.
    """

    plans: tuple[Plan, ...]
    order: tuple[int, ...]

    @property
    def primes(self) -> tuple[Prime, ...]:
        """The calls to send besides, each right before its plan's own."""
        return tuple(Prime(plan, blocks) for plan in self.plans for blocks in plan.primes)

    def in_input_order(self) -> tuple[Plan, ...]:
        """Return the plans in the order of the input."""
        plans = dict(zip(self.order, self.plans, strict=True))
        return tuple(plans[position] for position in range(len(plans)))


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredCall:
    """An answered call of a model; None is unknown."""

    plans: tuple[Plan, ...] = ()  # of the contexts in its prompt
    prompt_tokens: int | None = None  # as the engine counts them
    cached_tokens: int | None = None  # those that came from the prefix cache
    completion_tokens: int | None = None
    seconds: float | None = None
    written_tokens: int | None = None  # into the cache
    through: str | None = None
    """Names of the frameworks and SDKs that sent it, in one text; "" is `EngineClient`."""

    @property
    def expected_cached_tokens(self) -> int:
        """Block tokens that were expected in the cache."""
        return sum(plan.expected_cached_tokens for plan in self.plans)


class HearsAnswers(Protocol):
    """Is told of answered calls."""

    def answered(self, call: AnsweredCall) -> None:
        """Note that a call was answered, just now."""


@runtime_checkable
class Tracing(HearsAnswers, Protocol):
    """Writes down what a planner does; two methods, called in the thread or task of the request.

    What they raise is counted, logged once, and changes no answer.
    """

    def planned(self, plans: Sequence[Plan], seconds: float) -> None:
        """Note that some requests were planned together, just now, and how long it took."""


def group_of(plan: Plan) -> tuple[str, ...]:
    """Return the names of a plan's prefix group, the tenant first."""
    request, first = plan.request, _leading(plan)[:1]
    # edits carry these names, and no text
    system, conversation = text_digest(request.system or "").hex(), request.conversation_id
    if 0 not in plan.marks:
        # without labels, later turns cannot tell which block the first one began with
        is_told = plan.is_labelled and (first or not request.history)
        if conversation is not None and not is_told:
            return request.tenant, "conversation", id_name(conversation)
        if first:
            return request.tenant, "block", system, *first
    return request.tenant, "system", system


def shard_of(plan: Plan) -> tuple[str, ...]:
    """Return the names of a plan's prefix group and, where that is divided, its shard."""
    group = group_of(plan)
    if plan.shards == 1:
        return group
    leading = _leading(plan)
    below = leading[0 if group[1] == "system" else 1 :][:1] or [""]
    shard = int(keyed_digest("", *below)[:8], 16) % plan.shards
    return *group, str(shard)


def _leading(plan: Plan) -> list[str]:
    """Return the names of the blocks that a prompt begins with, those of earlier turns included."""
    if plan.request.history:
        return [id_name(block_id) for block_id in plan.labels.values()]
    return [id_name(block.id) for block in plan.blocks]


def keyed_digest(key: str, *parts: str) -> str:
    """Return 32 hexadecimal digits that stand for texts; without the key nobody can tell them."""
    secret = hashlib.blake2b(encoded(key), digest_size=32).digest()
    digest = hashlib.blake2b(key=secret, digest_size=16)
    for part in parts:
        piece = encoded(part)
        digest.update(len(piece).to_bytes(8, "big") + piece)
    return digest.hexdigest()


def affinity_id(shard: tuple[str, ...], key: str) -> str:
    """Return the id of a prefix group, and of its shard if it is asked for too often."""
    return keyed_digest(key, "group", *shard)


class GroupRates:
    """Counts the requests a minute of each prefix group; threads may share it."""

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._lock = ForkSafeLock(self._forget)
        self._forget()

    def _forget(self) -> None:
        self._groups: LRUMap[tuple[str, ...], tuple[float, int, int]] = LRUMap(_MOST_GROUPS)

    def shards(self, group: tuple[str, ...], now: float) -> int:
        """Count a request; return into how many shards its group is divided: a power of two."""
        with self._lock:
            began, count, before = self._groups.get(group) or (now, 0, 0)
            if not began <= now < began + _MINUTE_S:
                is_next = began <= now < began + 2 * _MINUTE_S
                began, count, before = now, 0, count if is_next else 0
            self._groups.put(group, (began, count + 1, before))
        needed = ceil(max(count + 1, before) / self._rate)
        return 1 << (needed - 1).bit_length()
