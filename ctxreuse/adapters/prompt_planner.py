"""Planning finished prompts: what a wrapper around a language model does with its calls.

A call's messages are text. Contexts that were rendered by us are found in it and planned; every
other character stays as it is. All calls that wait together are planned as one batch and put into
the order in which they should be sent.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from threading import Lock

from ctxreuse.adapters.rendered_contexts import RENDERED, FoundContext, Renderings
from ctxreuse.context.blocks import ContextRequest, Message
from ctxreuse.context.checks import checked_kind
from ctxreuse.context.rendering import render_turn
from ctxreuse.context.scope import NO_SCOPE, RequestScope
from ctxreuse.ordering.schedule import prefix_order
from ctxreuse.planner import ReusePlanner, Strategy, check_strategy
from ctxreuse.planning.plan import Plan

_REMEMBERED_CHARACTERS = 16_000_000


@dataclass(frozen=True, slots=True)
class PromptPart:
    """One text of a prompt: a message's content, or a text part of it.

    Attributes:
        role: The message's role, as OpenAI names it.
        text: The text.
    """

    role: str
    text: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt that is about to be sent.

    Attributes:
        segments: Its texts in order.
        scope: Whose it is.
    """

    segments: tuple[PromptPart, ...]
    scope: RequestScope = NO_SCOPE


@dataclass(frozen=True, slots=True)
class PlannedPrompt:
    """A call with its contexts planned.

    Attributes:
        position: Its position among the calls that were planned together.
        texts: The text to send for each segment.
        plans: The plans of the contexts that were planned now.
    """

    position: int
    texts: tuple[str, ...]
    plans: tuple[Plan, ...] = ()


class PromptPlanner:
    """Plans the contexts inside prompts and schedules the prompts.

    A context that stands before a message of the assistant was sent before: it is shown again as it
    was sent then, byte for byte, or as it stands where that is not known any more.

    Args:
        planner: Plans the contexts.
        strategy: "reuse", "paper" or "none".
        renderings: Where rendered contexts are remembered.

    Raises:
        InvalidRequestError: If `planner` is no ReusePlanner.
        UnknownStrategyError: If there is no such strategy.
    """

    def __init__(
        self,
        planner: ReusePlanner,
        strategy: Strategy = "reuse",
        renderings: Renderings = RENDERED,
    ) -> None:
        self._planner = checked_planner(planner)
        check_strategy(strategy)
        self._strategy: Strategy = strategy
        self._renderings = renderings
        self._sent = _SentForms()

    def plan(self, calls: Sequence[Prompt]) -> list[PlannedPrompt]:
        """Return the calls in the order in which to send them, each once.

        Args:
            calls: What waits to be sent, in the order of arrival.
        """
        drafts = [_Draft(position, call) for position, call in enumerate(calls)]
        waiting: list[tuple[_Draft, _Place]] = []
        for draft in drafts:
            self._look_for_contexts(draft)
            place = self._next_place(draft)
            if place is not None:
                waiting.append((draft, place))
        if len(waiting) == 1:
            draft, place = waiting[0]
            self._put(draft, place, self._planner.plan(place.request, self._strategy))
        elif waiting:
            batch = self._planner.plan_batch(
                [place.request for _, place in waiting], self._strategy
            )
            for (draft, place), plan in zip(waiting, batch.in_input_order(), strict=True):
                self._put(draft, place, plan)
        for draft, _ in waiting:
            while (place := self._next_place(draft)) is not None:
                self._put(draft, place, self._planner.plan(place.request, self._strategy))
        order = prefix_order([draft.prompt() for draft in drafts])
        return [
            PlannedPrompt(position, tuple(drafts[position].texts), tuple(drafts[position].plans))
            for position in order
        ]

    def forget(self, plans: Iterable[Plan]) -> None:
        """Take back plans whose prompts never reached the engine."""
        self._planner.evict([plan.request_id for plan in plans])

    def _look_for_contexts(self, draft: _Draft) -> None:
        for number, segment in enumerate(draft.call.segments):
            for found in self._renderings.find(segment.text):
                draft.contexts.append((number, found))

    def _next_place(self, draft: _Draft) -> _Place | None:
        """Return the draft's next context that has to be planned; show again what was sent."""
        answered = max(
            (
                number
                for number, segment in enumerate(draft.call.segments)
                if segment.role == "assistant"
            ),
            default=-1,
        )
        while draft.contexts:
            number, found = draft.contexts.pop(0)
            if not found.blocks:  # planned before
                draft.shown.add(number)
                continue
            key = draft.key_before(number, found)
            if number <= answered:  # what the assistant itself says stands, too
                sent = self._sent.get(key)
                if sent is not None:
                    draft.replace(number, found, sent)
                draft.shown.add(number)
                continue
            return _Place(number, found, key, draft.request(number, found))
        return None

    def _put(self, draft: _Draft, place: _Place, plan: Plan) -> None:
        text = render_turn(plan.parts, plan.order_annotation, "", plan.templates)
        draft.replace(place.number, place.found, text)
        draft.shown.add(place.number)
        draft.plans.append(plan)
        self._sent.put(place.key, text)


def as_given(calls: Sequence[Prompt]) -> list[PlannedPrompt]:
    """Return the calls as they are, in the order of arrival: what to do where planning failed."""
    return [
        PlannedPrompt(position, tuple(segment.text for segment in call.segments))
        for position, call in enumerate(calls)
    ]


def checked_planner(planner: object) -> ReusePlanner:
    """Return the planner that was given.

    Raises:
        InvalidRequestError: wrong type.
    """
    remedy = "a ctxreuse.ReusePlanner; pass planner=ReusePlanner(), or leave it out"
    return checked_kind("planner", planner, ReusePlanner, remedy)


def planner_or_new(planner: object) -> ReusePlanner:
    """Return the planner that was given, or a new one for None.

    Raises:
        InvalidRequestError: wrong type.
    """
    return ReusePlanner() if planner is None else checked_planner(planner)


@dataclass(frozen=True, slots=True)
class _Place:
    """A context that waits for its plan: in which segment, and the request that it makes."""

    number: int
    found: FoundContext
    key: bytes
    request: ContextRequest


@dataclass(slots=True)
class _Draft:
    """A call whose texts are being replaced, from the first to the last context.

    `shown` holds the segments that show a context; `shift` says which segment is at hand and how
    much longer it has become, left of the next context.
    """

    position: int
    call: Prompt
    texts: list[str] = field(default_factory=list)
    contexts: list[tuple[int, FoundContext]] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    shift: tuple[int, int] = (0, 0)
    shown: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.texts = [segment.text for segment in self.call.segments]

    def prompt(self) -> str:
        """Return what the engine will see, for comparing prompts; tenants share nothing."""
        texts = zip(self.call.segments, self.texts, strict=True)
        whole = [f"{segment.role}\n{text}\n" for segment, text in texts]
        return "".join([f"{self.call.scope.tenant or ''}\n", *whole])

    def key_before(self, number: int, found: FoundContext) -> bytes:
        """Return a digest of tenant, everything before the context, and the context, as given."""
        here = self.call.segments[number]
        before = [*self.call.segments[:number], PromptPart(here.role, here.text[: found.start])]
        texts = (text for segment in before for text in (segment.role, segment.text))
        return _digest([self.call.scope.tenant or "", *texts, found.digest.hex()])

    def replace(self, number: int, found: FoundContext, text: str) -> None:
        shift = self.shift[1] if self.shift[0] == number else 0
        old = self.texts[number]
        self.texts[number] = old[: found.start + shift] + text + old[found.end + shift :]
        self.shift = (number, shift + len(text) - (found.end - found.start))

    def request(self, number: int, found: FoundContext) -> ContextRequest:
        """Return what to plan: the context's blocks behind everything that stands before it."""
        shift = self.shift[1] if self.shift[0] == number else 0
        role = self.call.segments[number].role
        opening = self.texts[number][: found.start + shift]
        first = number  # of the texts that open this turn: the parts of one message
        while first and self.call.segments[first - 1].role == role and first - 1 not in self.shown:
            first -= 1
        openings = [{"role": role, "content": text} for text in self.texts[first:number]]
        earlier = [
            {"role": segment.role, "content": text}
            for segment, text in zip(self.call.segments[:first], self.texts, strict=False)
        ]
        scope = self.call.scope
        # a system message that shows a context uses labels, as a turn does
        turns = [
            message
            for position, message in enumerate(earlier)
            if message["role"] != "system" or position in self.shown
        ]
        system = [
            message
            for position, message in enumerate(earlier)
            if message["role"] == "system" and position not in self.shown
        ]
        if number in self.shown:  # another context stands before this one in the same text
            turns.append({"role": role, "content": opening})
            opening = ""
        history: list[Message] | None = None
        if turns and (scope.conversation_id is not None or self.shown):
            history = list(turns)
        elif scope.conversation_id is not None:
            history = []
        else:
            system += turns  # the same for many, such as examples
        preamble = [*system, *openings, {"role": role, "content": opening}]
        return ContextRequest(
            found.blocks,
            system=_digest(text for message in preamble for text in message.values()).hex(),
            history=history,
            conversation_id=scope.conversation_id,
            tenant=scope.tenant or "",
        )


def _digest(texts: Iterable[str]) -> bytes:
    """Return 16 bytes that identify a list of texts."""
    digest = hashlib.blake2b(digest_size=16)
    for text in texts:
        encoded = text.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "big") + encoded)
    return digest.digest()


class _SentForms:
    """What contexts were replaced by, the latest ones."""

    def __init__(self) -> None:
        self._texts: OrderedDict[bytes, str] = OrderedDict()
        self._characters = 0
        self._lock = Lock()

    def get(self, key: bytes) -> str | None:
        with self._lock:
            if key in self._texts:
                self._texts.move_to_end(key)
            return self._texts.get(key)

    def put(self, key: bytes, text: str) -> None:
        with self._lock:
            self._characters += len(text) - len(self._texts.pop(key, ""))
            self._texts[key] = text
            while self._characters > _REMEMBERED_CHARACTERS and len(self._texts) > 1:
                self._characters -= len(self._texts.popitem(last=False)[1])
