"""Planning finished prompts: what a wrapper around a language model does before it sends them.

A prompt's messages are text. It is parsed once into pieces, text and contexts that we rendered; the
contexts are planned from left to right, and what is sent is the pieces joined again, so every other
character stays as it is. All prompts that wait together are planned as one batch and put into the
order in which to send them.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from ctxreuse.adapters.context_search import FoundContext, Piece
from ctxreuse.adapters.rendered_contexts import (
    Claimed,
    ContextRegistry,
    Sighting,
    Standing,
    Unplanned,
    context_registry,
)
from ctxreuse.context.blocks import ContextRequest, Message, encoded, text_digest
from ctxreuse.context.checks import checked_kind
from ctxreuse.context.fork_safety import ForkSafeLock
from ctxreuse.context.lru_map import PartSize, TenantLRUMap
from ctxreuse.context.rendering import Templates, render_turn
from ctxreuse.context.scope import NO_SCOPE, RequestScope
from ctxreuse.ordering.batch import prefix_order
from ctxreuse.planner import ReusePlanner, Strategy, check_strategy
from ctxreuse.planning.plan import Plan

_REMEMBERED_CHARACTERS = 16_000_000
_ENTRY_CHARACTERS = 100
_MOST_CONTEXTS = 64
_log = logging.getLogger("ctxreuse")


@dataclass(frozen=True, slots=True)
class PromptPart:
    """One part of a prompt: a message's content, or a part of it.

    Attributes:
        role: The message's role, as OpenAI names it.
        text: The text.
    """

    role: str
    text: str

    @classmethod
    def of_value(cls, role: str, value: object) -> PromptPart:
        """Return a part for what is no text, such as a tool call: equal for equal JSON values."""
        written = json.dumps(value, sort_keys=True, default=repr)
        return cls(role, text_digest(written).hex())


@dataclass(frozen=True, slots=True)
class ScopedPrompt:
    """A prompt that is about to be sent.

    Attributes:
        parts: Its texts in order.
        scope: Whose request it is.
    """

    parts: tuple[PromptPart, ...]
    scope: RequestScope = NO_SCOPE


@dataclass(frozen=True, slots=True)
class PlannedPrompt:
    """A prompt with its contexts planned.

    Attributes:
        position: Its position among the prompts that were planned together.
        texts: The text to send for each part.
        plans: The plans of the contexts that were planned now.
    """

    position: int
    texts: tuple[str, ...]
    plans: tuple[Plan, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptStatistics:
    """What became of the contexts in prompts, and what a `PromptPlanner` remembers.

    Attributes:
        planned: Contexts that were planned.
        left_alone: Texts that are equal to a rendered context and were sent as given, because it is
            not certain that the application put them there: it was rendered less often than prompts
            show it, or stands in another one, or twice in one prompt.
        planned_before: Contexts whose blocks a retriever, a memory or an agent has planned.
        in_history: Contexts that were answered before; they are sent as they were sent then, or as
            given where that is not known.
        in_other_scope: Prompts without a context of their tenant that show what was rendered in
            another scope.
        not_recognised: Prompts that show the first two labels, and neither a context of their
            tenant nor one of another scope: it was rendered in another process, or altered since.
        too_long: Texts and prompts sent as given because they take too much work to plan.
        sent_texts: Contexts as they were sent that are remembered for later turns.
        sent_characters: How long these are together.
        parts: How much of what is bounded is remembered: `sent_characters`, where each context
            counts 100 characters more than it has.
    """

    planned: int = 0
    left_alone: int = 0
    planned_before: int = 0
    in_history: int = 0
    in_other_scope: int = 0
    not_recognised: int = 0
    too_long: int = 0
    sent_texts: int = 0
    sent_characters: int = 0
    parts: Mapping[str, PartSize] = field(default_factory=dict, compare=False)


class PromptPlanner:
    """Plans the contexts inside prompts and schedules the prompts.

    A context that stands before a message of the assistant was sent before: it is shown again as it
    was sent then, byte for byte, or as it stands where that is not known any more. Applications
    put a new one into the system message of a later turn, though, and before a message of the
    assistant at the end, which the model is to go on with: there a new one is planned.

    Labels are given out once in a prompt: with another context in it that stays as given, and shows
    labels, a context keeps the retriever's order and gets the labels after these.

    Time is linear in the prompts: texts are searched in linear time, and a prompt with more than 64
    contexts to plan is sent as given. At most 16,000,000 characters of contexts as they were sent
    are remembered, each context counting 100 characters more than it has; the tenant that holds
    most loses first.

    Args:
        planner: Plans the contexts; None makes one.
        strategy: "reuse", "paper" or "none".
        registry: Where rendered contexts are remembered; None takes the one of this process.

    Raises:
        InvalidRequestError: wrong type.
        UnknownStrategyError: no such strategy.
    """

    def __init__(
        self,
        planner: ReusePlanner | None = None,
        strategy: Strategy = "reuse",
        registry: ContextRegistry | None = None,
    ) -> None:
        self._planner = planner_or_new(planner)
        check_strategy(strategy)
        self._strategy: Strategy = strategy
        self._registry = context_registry(registry)
        self._counts: Counter[str] = Counter()
        self._lock = ForkSafeLock(self._forget_sent_texts)  # of _sent_texts and _counts
        self._forget_sent_texts()

    def _forget_sent_texts(self) -> None:
        self._sent_texts: TenantLRUMap[bytes, str] = TenantLRUMap(
            _REMEMBERED_CHARACTERS // _ENTRY_CHARACTERS,
            max_weight=_REMEMBERED_CHARACTERS,
            weight_of=lambda text: len(text) + _ENTRY_CHARACTERS,
        )

    def statistics(self) -> PromptStatistics:
        """Return what became of contexts so far, and how much is remembered."""
        with self._lock:
            sent_texts = len(self._sent_texts)
            return PromptStatistics(
                **self._counts,
                sent_texts=sent_texts,
                sent_characters=self._sent_texts.weight - sent_texts * _ENTRY_CHARACTERS,
                parts={"sent_characters": self._sent_texts.weight_size},
            )

    def plan(self, prompts: Sequence[ScopedPrompt]) -> list[PlannedPrompt]:
        """Return the prompts in the order in which to send them, each once.

        Args:
            prompts: The prompts that wait to be sent, in the order of arrival.
        """
        drafts = [_Draft(prompt, self._registry) for prompt in prompts]
        self._claim(drafts)
        waiting = [
            (draft, request) for draft in drafts if (request := self._advance(draft)) is not None
        ]
        plans = plans_together(self._planner, [one for _, one in waiting], self._strategy)
        for (draft, _), plan in zip(waiting, plans, strict=True):
            next_request = self._advance(draft, plan)
            while next_request is not None:
                plan = self._planner.plan(next_request, self._strategy)
                next_request = self._advance(draft, plan)
        whole = []  # what the engine will see, for comparing prompts; tenants share nothing
        for draft in drafts:
            texts = zip(draft.prompt.parts, draft.texts(), strict=True)
            shown = [f"{part.role}\n{text}\n" for part, text in texts]
            whole.append("".join([f"{draft.tenant}\n", *shown]))
        return [
            PlannedPrompt(position, drafts[position].texts(), tuple(drafts[position].plans))
            for position in prefix_order(whole)
        ]

    def forget(self, plans: Iterable[Plan]) -> None:
        """Take back plans whose prompts never reached the engine."""
        for plan in plans:
            self._planner.evict([plan.request_id], plan.request.tenant)

    def _claim(self, drafts: Sequence[_Draft]) -> None:
        """Leave alone what the application did not put there, and what is too much to plan."""
        counts: Counter[str] = Counter()
        by_tenant: dict[str, list[_Draft]] = {}
        for draft in drafts:
            by_tenant.setdefault(draft.tenant, []).append(draft)
        for tenant, of_tenant in by_tenant.items():
            sightings = [
                sighting
                for number, draft in enumerate(of_tenant)
                for sighting in draft.sightings(number)
            ]
            met = [digest for draft in of_tenant for digest in draft.met]
            claimed = iter(self._registry.claim(tenant, sightings, met))
            for draft in of_tenant:
                counts.update(draft.settle(claimed, self._sent_text))
        first_labels = self._planner.templates.block_labels([1, 2])
        for draft in drafts:
            if draft.has_contexts:
                continue
            texts = draft.new_texts()
            if self._registry.is_rendered_elsewhere(texts, draft.tenant):
                counts["in_other_scope"] += 1
                _log_other_scope()
            elif any(all(label in text for label in first_labels) for text in texts):
                counts["not_recognised"] += 1
        if counts["left_alone"]:
            _log_left_alone()
        if counts:
            with self._lock:
                self._counts += counts

    def _advance(self, draft: _Draft, plan: Plan | None = None) -> ContextRequest | None:
        """Go on to the draft's next context that needs a plan; show again what was sent.

        Args:
            draft: The draft.
            plan: The plan of the context that the draft has come to; it is shown first.
        """
        if plan is not None:
            text = render_turn(plan.parts, plan.order_annotation, "", plan.templates)
            with self._lock:
                self._sent_texts.put(draft.tenant, draft.sent_key(draft.pieces[0].key), text)
            draft.plans.append(plan)
            draft.show(text)
        while draft.pieces:
            number, piece, _, _ = draft.pieces[0]
            if not isinstance(piece, str):
                return draft.request(number, piece, self._planner.templates)
            draft.show(piece)
        return None

    def _sent_text(self, tenant: str, key: bytes) -> str | None:
        """Return a context as it was sent, if that is known."""
        with self._lock:
            return self._sent_texts.get(tenant, key)


@cache
def _log_other_scope() -> None:
    """Say once that contexts are rendered for another tenant than that of their prompts."""
    _log.warning(
        "a prompt shows a context that was rendered outside of its tenant's scope; it is sent as "
        "given. Call format_context where the tenant of the model call is known: inside the chain, "
        'or inside "with ctxreuse.request_context(tenant=...)". Further cases are only counted.'
    )


@cache
def _log_left_alone() -> None:
    """Say once that a rendering is shown at more places than it was rendered for."""
    _log.warning(
        "a prompt shows a rendered context where it is not certain that the application put it "
        "there: one rendering was used in several prompts, or twice in one; it is sent as given. "
        "Call format_context for each prompt anew. Further cases are only counted, as left_alone."
    )


def as_given(prompts: Sequence[ScopedPrompt]) -> list[PlannedPrompt]:
    """Return the prompts as they are, in the order of arrival: what to do where planning failed."""
    return [
        PlannedPrompt(position, tuple(part.text for part in prompt.parts))
        for position, prompt in enumerate(prompts)
    ]


def planner_or_new(planner: object) -> ReusePlanner:
    """Return the planner that was given, or a new one for None.

    Raises:
        InvalidRequestError: wrong type.
    """
    if planner is None:
        return ReusePlanner()
    wanted = "a ctxreuse.ReusePlanner; pass planner=ReusePlanner(), or leave it out"
    return checked_kind("planner", planner, ReusePlanner, wanted)


def plans_together(
    planner: ReusePlanner,
    requests: Sequence[ContextRequest],
    strategy: Strategy = "reuse",
    **options: Any,
) -> list[Plan]:
    """Return the plans of requests that came together, in the order given.

    A tenant's only one is planned as if it had come alone: a batch is ordered in another way, and
    would show that others asked at the same time.

    Args:
        planner: Plans them.
        requests: The requests.
        strategy: As for `ReusePlanner.plan`.
        options: As for `ReusePlanner.plan`.
    """
    of_tenant = Counter(request.tenant for request in requests)
    in_batch = [n for n, request in enumerate(requests) if of_tenant[request.tenant] > 1]
    plans: dict[int, Plan] = {}
    if in_batch:
        batch = [requests[n] for n in in_batch]
        planned = planner.plan_batch(batch, strategy, **options)
        plans = dict(zip(in_batch, planned.in_input_order(), strict=True))
    return [
        plans[n] if n in plans else planner.plan(request, strategy, **options)
        for n, request in enumerate(requests)
    ]


class _PlacedPiece(NamedTuple):
    """A piece of a prompt.

    Attributes:
        part: Which part it belongs to.
        piece: A context to plan, or text.
        key: Of what is sent for a context.
        is_context: Whether it is a context, planned now or before.
    """

    part: int
    piece: Piece
    key: bytes = b""
    is_context: bool = False

    @property
    def is_unplanned(self) -> bool:
        """Whether it is a context that is not planned now."""
        return bool(self.key) and isinstance(self.piece, str)

    @property
    def text(self) -> str:
        """The text as it stands."""
        return self.piece if isinstance(self.piece, str) else self.piece.text


class _Draft:
    """A prompt in the making, from the first piece to the last.

    Attributes:
        prompt: The prompt as given.
        tenant: Whose it is.
        pieces: The pieces that are still to come.
        met: Digests of contexts that stand in the prompt and are no pieces.
        plans: The plans of the contexts so far.
        has_contexts: Whether contexts of the tenant stand where new ones may.
    """

    def __init__(self, prompt: ScopedPrompt, registry: ContextRegistry) -> None:
        self.prompt = prompt
        self.tenant = prompt.scope.tenant or ""
        self.pieces: deque[_PlacedPiece] = deque()
        self.met: list[bytes] = []
        self.plans: list[Plan] = []
        self.has_contexts = False
        self._standings = _standings(prompt.parts)
        self._unsearched = 0
        self._unplanned: list[tuple[int, _PlacedPiece]] = []  # and how many pieces stand behind
        self._shown: set[int] = set()  # the parts that show a context
        self._texts: list[list[str]] = [[] for _ in prompt.parts]  # sent for each, up to here
        before = _hash([self.tenant])  # tenant and everything before, as given
        for number, part in enumerate(prompt.parts):
            parsed = registry.parse(part.text, self.tenant)
            self._unsearched += not parsed.is_searched
            self.met += parsed.met
            here = _hash([part.role], before)
            for piece in parsed.pieces:
                if isinstance(piece, str):
                    self.pieces.append(_PlacedPiece(number, piece))
                    here.update(encoded(piece))
                else:
                    key = _hash(["context", piece.digest.hex()], here).digest()
                    self.pieces.append(_PlacedPiece(number, piece, key, is_context=True))
                    here.update(encoded(piece.text))
            before = _hash([here.hexdigest()])

    def sightings(self, number: int) -> Iterator[Sighting]:
        """Yield the contexts that were found; `number` is the prompt's own."""
        for part, piece, key, _ in self.pieces:
            if not isinstance(piece, str):
                is_tool_result = self.prompt.parts[part] == PromptPart("tool", piece.text)
                yield Sighting(piece, key, number, self._standings[part], is_tool_result)

    def sent_key(self, key: bytes) -> bytes:
        """Return under which key a context as it is sent is remembered.

        Conversations that begin alike may have been sent it in different orders.
        """
        conversation_id = self.prompt.scope.conversation_id
        if conversation_id is None:
            return key
        return _hash([key.hex(), repr(conversation_id)]).digest()

    def texts(self) -> tuple[str, ...]:
        """Return what is sent for each part, up to the next piece."""
        return tuple(map("".join, self._texts))

    def new_texts(self) -> list[str]:
        """Return the texts, as given, in which a new context may stand."""
        parts = zip(self.prompt.parts, self._standings, strict=True)
        return [part.text for part, standing in parts if standing != "history"]

    def settle(
        self, claimed: Iterator[Claimed], sent_text: Callable[[str, bytes], str | None]
    ) -> Counter[str]:
        """Turn all but the contexts to plan into text, and count them.

        Args:
            claimed: What the registry says of each context of this prompt.
            sent_text: Returns what was sent for a context of a tenant, if that is known.
        """
        pieces: list[_PlacedPiece] = []
        counts = Counter(too_long=self._unsearched)
        behind = [*self.pieces, None][1:]
        for one, following in zip(self.pieces, behind, strict=True):
            if one.is_context:
                outcome = next(claimed)
                counts[_fate(outcome)] += 1
                self.has_contexts |= outcome is not Unplanned.IN_HISTORY
                piece: Piece = one.text
                if outcome is Unplanned.IN_HISTORY:
                    sent = sent_text(self.tenant, self.sent_key(one.key))
                    if sent is not None and not _is_shown(sent, one, following):
                        piece = sent
                elif isinstance(outcome, FoundContext) and outcome.spans:
                    piece = outcome
                is_context = outcome is not Unplanned.LEFT_ALONE
                one = one._replace(piece=piece, is_context=is_context)
            pieces.append(one)
        if counts["planned"] > _MOST_CONTEXTS:
            counts["planned"] = 0
            counts["too_long"] += 1
            pieces = [one._replace(piece=one.text) for one in pieces]
        self._unplanned = [
            (number, one) for number, one in enumerate(reversed(pieces)) if one.is_unplanned
        ]
        self.pieces = deque(pieces)
        return counts

    def show(self, text: str) -> None:
        """Send a text for the next piece."""
        number, _, _, is_context = self.pieces.popleft()
        self._texts[number].append(text)
        if is_context:
            self._shown.add(number)

    def request(self, number: int, found: FoundContext, templates: Templates) -> ContextRequest:
        """Return what to plan: the context's blocks behind everything that is sent before it."""
        parts, scope, texts = self.prompt.parts, self.prompt.scope, self.texts()
        role = parts[number].role
        first = number  # of the texts that open this turn: the parts of one message
        while first and parts[first - 1].role == role and first - 1 not in self._shown:
            first -= 1
        system: list[Message] = []
        turns: list[Message] = []
        for position in range(first):
            message = {"role": parts[position].role, "content": texts[position]}
            # a system message that shows a context uses labels, as a turn does
            is_turn = message["role"] != "system" or position in self._shown
            (turns if is_turn else system).append(message)
        openings = [{"role": role, "content": text} for text in texts[first : number + 1]]
        if number in self._shown:  # another context stands before this one in the same text
            turns.append(openings[-1])
            openings[-1] = {"role": role, "content": ""}
        labels = self._labels_in_use(templates)
        history: list[Message] | None = None
        if scope.conversation_id is not None or (turns and self._shown) or labels:
            history = turns
        else:
            system += turns  # the same for many, such as examples
        preamble = [text for message in [*system, *openings] for text in message.values()]
        if labels and history is not None:
            preamble += labels
            # each a text of its own: no block stands behind it
            content = [{"type": "text", "text": label} for label in labels]
            history = [{"role": "system", "content": content}, *turns]
        return ContextRequest(
            found.blocks,
            system=_hash(preamble).hexdigest(),
            history=history,
            conversation_id=scope.conversation_id,
            tenant=self.tenant,
        )

    def _labels_in_use(self, templates: Templates) -> list[str]:
        """Return the labels of contexts that stay as they are and that no turn before shows."""
        to_come = len(self.pieces) - 1
        texts = [
            one.text for behind, one in self._unplanned if behind < to_come or not one.is_context
        ]
        found = (label[0] for text in texts for label in templates.label_pattern.finditer(text))
        return list(dict.fromkeys(found))


def _is_shown(sent: str, context: _PlacedPiece, following: _PlacedPiece | None) -> bool:
    """Return whether a history shows a context as it was sent: as given, annotations behind it."""
    if following is None or following.part != context.part or not sent.startswith(context.text):
        return False
    return following.text.startswith(sent[len(context.text) :])


def _standings(parts: Sequence[PromptPart]) -> list[Standing]:
    """Return for each part how a context in it stands to the answers."""
    end = len(parts)  # of what stands before the beginning of an answer
    while end and parts[end - 1].role == "assistant":
        end -= 1
    answered = max((n for n in range(end) if parts[n].role == "assistant"), default=-1)
    standings: list[Standing] = []
    for number, part in enumerate(parts):
        if part.role == "assistant":
            standings.append("history")
        elif number > answered:
            standings.append("new" if end == len(parts) else "renewed")
        else:
            standings.append("renewed" if part.role == "system" else "history")
    return standings


def _fate(outcome: Claimed) -> str:
    """Return the name under which statistics count what became of a context."""
    if isinstance(outcome, Unplanned):
        return outcome.name.lower()
    return "planned" if outcome.spans else "planned_before"


def _hash(texts: Iterable[str], before: hashlib.blake2b | None = None) -> hashlib.blake2b:
    """Return a hash of 16 bytes that identifies a list of texts, behind those hashed before."""
    whole = hashlib.blake2b(digest_size=16) if before is None else before.copy()
    for text in texts:
        whole.update(len(encoded(text)).to_bytes(8, "big") + encoded(text))
    return whole
