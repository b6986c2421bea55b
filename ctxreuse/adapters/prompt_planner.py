"""Planning finished prompts: what a wrapper around a language model does before it sends them.

A prompt's messages are text. It is parsed once into pieces, text and contexts that we rendered; the
contexts are planned from left to right, and what is sent is the pieces joined again, so every other
character stays as it is. All prompts that wait together are planned as one batch and put into the
order in which to send them.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

from ctxreuse.adapters.rendered_contexts import (
    ContextRegistry,
    FoundContext,
    Piece,
    context_registry,
)
from ctxreuse.context.blocks import ContextRequest, Message
from ctxreuse.context.checks import checked_kind
from ctxreuse.context.lru_map import LRUMap
from ctxreuse.context.rendering import render_turn
from ctxreuse.context.scope import NO_SCOPE, RequestScope
from ctxreuse.ordering.batch import prefix_order
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


class PromptPlanner:
    """Plans the contexts inside prompts and schedules the prompts.

    A context that stands before a message of the assistant was sent before: it is shown again as it
    was sent then, byte for byte, or as it stands where that is not known any more.

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
        self._sent_texts: LRUMap[bytes, str] = LRUMap(
            max_weight=_REMEMBERED_CHARACTERS, weight_of=len
        )
        self._lock = Lock()  # of _sent_texts

    def plan(self, prompts: Sequence[ScopedPrompt]) -> list[PlannedPrompt]:
        """Return the prompts in the order in which to send them, each once.

        Args:
            prompts: The prompts that wait to be sent, in the order of arrival.
        """
        drafts = [_Draft(prompt, self._registry) for prompt in prompts]
        waiting = [
            (draft, request) for draft in drafts if (request := self._advance(draft)) is not None
        ]
        if len(waiting) == 1:
            plans = [self._planner.plan(waiting[0][1], self._strategy)]
        elif waiting:
            requests = [request for _, request in waiting]
            plans = list(self._planner.plan_batch(requests, self._strategy).in_input_order())
        else:
            plans = []
        for (draft, _), plan in zip(waiting, plans, strict=True):
            next_request = self._advance(draft, plan)
            while next_request is not None:
                plan = self._planner.plan(next_request, self._strategy)
                next_request = self._advance(draft, plan)
        whole = []  # what the engine will see, for comparing prompts; tenants share nothing
        for draft in drafts:
            texts = zip(draft.prompt.parts, draft.texts, strict=True)
            shown = [f"{part.role}\n{text}\n" for part, text in texts]
            whole.append("".join([f"{draft.prompt.scope.tenant or ''}\n", *shown]))
        return [
            PlannedPrompt(position, tuple(drafts[position].texts), tuple(drafts[position].plans))
            for position in prefix_order(whole)
        ]

    def forget(self, plans: Iterable[Plan]) -> None:
        """Take back plans whose prompts never reached the engine."""
        self._planner.evict([plan.request_id for plan in plans])

    def _advance(self, draft: _Draft, plan: Plan | None = None) -> ContextRequest | None:
        """Go on to the draft's next context that needs a plan; show again what was sent.

        Args:
            draft: The draft.
            plan: The plan of the context that the draft has come to; it is shown first.
        """
        if plan is not None:
            text = render_turn(plan.parts, plan.order_annotation, "", plan.templates)
            with self._lock:
                self._sent_texts.put(draft.pieces[0].key, text)
            draft.plans.append(plan)
            draft.show(text)
        while draft.pieces:
            number, piece, key = draft.pieces[0]
            if isinstance(piece, str):
                draft.show(piece)
            elif not piece.blocks:  # planned before
                draft.show(piece.text)
            elif number <= draft.answered:  # what the assistant itself says stays, too
                with self._lock:
                    sent = self._sent_texts.get(key)
                draft.show(piece.text if sent is None else sent)
            else:
                return draft.request(number, piece)
        return None


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


class _PlacedPiece(NamedTuple):
    """A piece of a prompt: which part it belongs to, and the key of what is sent for it."""

    part: int
    piece: Piece
    key: bytes = b""


class _Draft:
    """A prompt in the making, from the first piece to the last.

    Attributes:
        prompt: The prompt as given.
        pieces: The pieces that are still to come.
        texts: What is sent for each part, up to the next piece.
        plans: The plans of the contexts so far.
        answered: The number of the last part that the assistant said; -1 if there is none.
    """

    def __init__(self, prompt: ScopedPrompt, registry: ContextRegistry) -> None:
        self.prompt = prompt
        self.pieces: deque[_PlacedPiece] = deque()
        self.texts = [""] * len(prompt.parts)
        self.plans: list[Plan] = []
        self.answered = -1
        self._shown: set[int] = set()  # the parts that show a context
        before = _hash([prompt.scope.tenant or ""])  # tenant and everything before, as given
        for number, part in enumerate(prompt.parts):
            if part.role == "assistant":
                self.answered = number
            given = ""
            for piece in registry.parse(part.text):
                if isinstance(piece, str):
                    self.pieces.append(_PlacedPiece(number, piece))
                    given += piece
                else:
                    key = _hash([part.role, given, piece.digest.hex()], before).digest()
                    self.pieces.append(_PlacedPiece(number, piece, key))
                    given += piece.text
            before = _hash([part.role, part.text], before)

    def show(self, text: str) -> None:
        """Send a text for the next piece."""
        number, piece, _ = self.pieces.popleft()
        self.texts[number] += text
        if not isinstance(piece, str):
            self._shown.add(number)

    def request(self, number: int, found: FoundContext) -> ContextRequest:
        """Return what to plan: the context's blocks behind everything that is sent before it."""
        parts, scope = self.prompt.parts, self.prompt.scope
        role = parts[number].role
        first = number  # of the texts that open this turn: the parts of one message
        while first and parts[first - 1].role == role and first - 1 not in self._shown:
            first -= 1
        system: list[Message] = []
        turns: list[Message] = []
        for position in range(first):
            message = {"role": parts[position].role, "content": self.texts[position]}
            # a system message that shows a context uses labels, as a turn does
            is_turn = message["role"] != "system" or position in self._shown
            (turns if is_turn else system).append(message)
        openings = [{"role": role, "content": text} for text in self.texts[first : number + 1]]
        if number in self._shown:  # another context stands before this one in the same text
            turns.append(openings[-1])
            openings[-1] = {"role": role, "content": ""}
        history: list[Message] | None = None
        if scope.conversation_id is not None or (turns and self._shown):
            history = turns
        else:
            system += turns  # the same for many, such as examples
        preamble = [text for message in [*system, *openings] for text in message.values()]
        return ContextRequest(
            found.blocks,
            system=_hash(preamble).hexdigest(),
            history=history,
            conversation_id=scope.conversation_id,
            tenant=scope.tenant or "",
        )


def _hash(texts: Iterable[str], before: hashlib.blake2b | None = None) -> hashlib.blake2b:
    """Return a hash of 16 bytes that identifies a list of texts, behind those hashed before."""
    whole = hashlib.blake2b(digest_size=16) if before is None else before.copy()
    for text in texts:
        encoded = text.encode("utf-8", "surrogatepass")
        whole.update(len(encoded).to_bytes(8, "big") + encoded)
    return whole
