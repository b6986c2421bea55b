"""A conversation and its next turn: from retrieved nodes to the prompt, within the window."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, LLMMetadata, MessageRole
from llama_index.core.schema import MetadataMode, NodeWithScore

from ctxreuse.context.blocks import ContextBlock, ContextRequest, texts_to_show
from ctxreuse.context.checks import checked_each
from ctxreuse.context.fail_open import FailOpen
from ctxreuse.context.scope import current_scope
from ctxreuse.context.thoughts import without_thoughts
from ctxreuse.context.tokens import as_token_counter, estimate_tokens, well_formed
from ctxreuse.pipeline.engine_options import planning_time
from ctxreuse.pipeline.prompt_turn import note_planned
from ctxreuse.planner import ReusePlanner
from ctxreuse.planning.plan import Plan
from llamaindex_ctxreuse.llm.planned_prompts import copied_message, message_as_openai
from llamaindex_ctxreuse.nodes.node_plans import checked_metadata_mode
from llamaindex_ctxreuse.nodes.run_nodes import as_retrieved, without_annotations

_log = logging.getLogger("ctxreuse")
_TOKENS_OF_AN_ANSWER = 256
_TOKENS_OF_A_MESSAGE = 8
"""What a chat template adds to a message, at most."""


@dataclass(frozen=True, slots=True)
class Utterance:
    """A message of the user or the assistant."""

    sent: ChatMessage  # as the model gets it, context included
    said: ChatMessage  # as the user knows it


@dataclass(frozen=True, slots=True)
class Transcript:
    """The utterances of a conversation, in order."""

    utterances: tuple[Utterance, ...] = ()

    def __len__(self) -> int:
        return len(self.utterances)

    def sent(self) -> list[ChatMessage]:
        """Return copies of the messages as they were sent."""
        return [copied_message(one.sent) for one in self.utterances]

    def said(self) -> list[ChatMessage]:
        """Return copies of the messages as they were said."""
        return [copied_message(one.said) for one in self.utterances]

    def with_turn(self, question: str, content: str, answer: str) -> Transcript:
        """Return the transcript with one more turn."""
        reply = ChatMessage(role=MessageRole.ASSISTANT, content=without_thoughts(answer))
        turn = (
            Utterance(
                ChatMessage(role=MessageRole.USER, content=content),
                ChatMessage(role=MessageRole.USER, content=well_formed(question)),
            ),
            Utterance(reply, reply),
        )
        return Transcript((*self.utterances, *turn))

    def newest(self, tokens: int, count: Callable[[str], int]) -> Transcript:
        """Return the transcript without its first turn, and without more until it fits."""
        first, length = len(self), 0  # the turns from `first` on fit
        for number in range(len(self) - 1, 0, -1):
            sent = self.utterances[number].sent
            length += count(sent.content or "")
            if length > tokens:
                break
            if sent.role == MessageRole.USER:
                first = number
        return Transcript(self.utterances[first:])

    def recalled(self, messages: Sequence[ChatMessage]) -> Transcript:
        """Return the transcript of a given history; its own messages stay as they were sent."""
        given = checked_each("chat_history", messages, ChatMessage, "a ChatMessage")
        kept = 0
        for known, message in zip(self.utterances, given, strict=False):
            both = [(one.role, one.blocks) for one in (known.said, known.sent)]
            if (message.role, message.blocks) not in both:
                break
            kept += 1
        new = map(copied_message, given[kept:])
        return Transcript((*self.utterances[:kept], *(Utterance(one, one) for one in new)))


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """A turn that is about to be sent."""

    question: str
    content: str
    history: Transcript
    begun: Transcript  # longer than `history` where that had to be cut
    nodes: list[NodeWithScore]
    plan: Plan | None  # None where planning failed


class ChatTurnPlanner:
    """Plans the turns of one conversation."""

    def __init__(
        self,
        planner: ReusePlanner,
        system_prompt: str | None,
        metadata_mode: MetadataMode,
        token_counter: Any,
        component: str,
    ) -> None:
        self._planner = planner
        self._system_prompt = ContextRequest((), system=system_prompt).system
        self._metadata_mode = checked_metadata_mode(metadata_mode)
        self._given_count = as_token_counter(token_counter)
        self._counting = FailOpen(component, "lengths are estimated", "the token_counter")
        self._conversation_id = uuid.uuid4().hex
        self._fail_open = FailOpen(
            component, "nodes go through as retrieved", tell=planner.note_failure
        )
        self._has_warned = False

    @property
    def faults(self) -> int:
        """How often planning has failed and nodes went through as retrieved, or counting has."""
        return self._fail_open.faults + self._counting.faults

    def turn(
        self, question: str, nodes: Sequence[NodeWithScore], begun: Transcript, model: LLMMetadata
    ) -> ChatTurn:
        """Return the next turn of a conversation, its history cut to what the model can take."""
        answer = model.num_output if model.num_output > 0 else _TOKENS_OF_AN_ANSWER
        window = max(model.context_window - answer, model.context_window // 2)
        planned: tuple[Transcript, Plan] | None = self._fail_open.attempt(
            lambda: self._planned(question, nodes, begun, window)
        )
        plan = None
        if planned is None:  # without labels
            given = without_annotations(nodes)
            blocks = self._fail_open.attempt(  # without metadata if that cannot be rendered
                lambda: _blocks(given, self._metadata_mode),
                lambda: _blocks(given, MetadataMode.NONE),
            )
            texts = [block.text for block in texts_to_show(blocks)]
            content = "\n\n".join([*texts, question])
            history = self._fitting(begun, window, lambda history: content)
        else:
            history, plan = planned
            content = plan.content
        if not len(history):
            self._warn_if_too_long(content, window, model)
        return ChatTurn(question, content, history, begun, list(nodes), plan)

    def forget(self, turn: ChatTurn) -> None:
        """Make the planner forget a turn that was not answered."""
        plan = turn.plan
        if plan is not None:
            self._fail_open.attempt(lambda: self._planner.forget(plan))

    # previews tell the turn's length behind each history, so that only one plan is made
    def _planned(
        self, question: str, nodes: Sequence[NodeWithScore], begun: Transcript, window: int
    ) -> tuple[Transcript, Plan]:
        """Return the history that fits, and the plan of the turn behind it."""
        planner, scope = self._planner, current_scope()
        # no text twice, and nothing of nodes without text, as of images
        shown = texts_to_show(_blocks(as_retrieved(nodes, planner), self._metadata_mode))
        conversation = scope.conversation_id

        def request(history: Transcript) -> ContextRequest:
            return ContextRequest(
                shown,
                question,
                system=self._system_prompt,
                history=[
                    message_as_openai(one.sent)
                    for one in history.utterances
                    if one.sent.role not in (MessageRole.SYSTEM, MessageRole.DEVELOPER)
                ],
                conversation_id=self._conversation_id if conversation is None else conversation,
                tenant=scope.tenant or "",
            )

        history = self._fitting(begun, window, lambda one: planner.preview(request(one)).content)
        plan = planner.plan(request(history), **planning_time(planner))
        note_planned(plan.request.tenant, "user", plan.content, plan)
        return history, plan

    def _fitting(
        self, history: Transcript, window: int, content_behind: Callable[[Transcript], str]
    ) -> Transcript:
        room = window
        while len(history) and self._length(history, content_behind(history)) > window:
            room //= 2  # so a context that is too long by itself is not tried behind every turn
            history = history.newest(room, self._tokens)
        return history

    def _warn_if_too_long(self, content: str, window: int, model: LLMMetadata) -> None:
        if self._has_warned or (length := self._length(Transcript(), content)) <= window:
            return
        self._has_warned = True
        _log.warning(
            "ReuseChatEngine: a turn alone takes about %d tokens, more than the %d that the "
            "model's context_window of %d leaves it; it is sent as it is. Set context_window "
            "to what the model really has, or retrieve less.",
            length,
            window,
            model.context_window,
        )

    def _length(self, history: Transcript, content: str) -> int:
        system = [] if self._system_prompt is None else [self._system_prompt]
        sent = [one.sent.content or "" for one in history.utterances]
        return sum(map(self._tokens, [*system, *sent, content]))

    def _tokens(self, text: str) -> int:
        count, estimate = partial(self._given_count, text), partial(estimate_tokens, text)
        return self._counting.attempt(count, estimate) + _TOKENS_OF_A_MESSAGE


def _blocks(nodes: Sequence[NodeWithScore], metadata_mode: MetadataMode) -> list[ContextBlock]:
    """Return nodes as what they are to the index: their texts."""
    return [ContextBlock(text=one.get_content(metadata_mode)) for one in nodes]
