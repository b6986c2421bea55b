"""One turn of a chat: from what was retrieved to what is sent, within the model's window."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, LLMMetadata, MessageRole
from llama_index.core.schema import MetadataMode, NodeWithScore

from ctxreuse.adapters.plan_metadata import document_metadata, left_out_words
from ctxreuse.context.blocks import ContextBlock, ContextRequest
from ctxreuse.context.fail_open import FailOpen
from ctxreuse.context.scope import current_scope
from ctxreuse.context.tokens import as_token_counter, estimate_tokens
from ctxreuse.planner import ReusePlanner
from ctxreuse.planning.plan import Plan
from llamaindex_ctxreuse.chat.transcript import Transcript, message_tokens
from llamaindex_ctxreuse.nodes.node_plans import (
    AnnotationNode,
    checked_metadata_mode,
    marked_copy,
    marked_documents,
    node_block,
    without_plan,
)

_log = logging.getLogger("ctxreuse")
_TOKENS_OF_AN_ANSWER = 256


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn that is about to be sent.

    Attributes:
        question: What the user said.
        content: This turn's message: blocks, annotations, question.
        history: What is sent before it.
        begun: The transcript when the turn began; longer than `history` where that had to be cut.
        nodes: What was retrieved, best first; planned ones carry rank, label and plan.
        plan: Its plan; None where planning failed.
    """

    question: str
    content: str
    history: Transcript
    begun: Transcript
    nodes: list[NodeWithScore]
    plan: Plan | None

    def messages(self, system_prompt: str | None, system_role: MessageRole) -> list[ChatMessage]:
        """Return the prompt: system prompt, history as it was sent, this turn."""
        system = []
        if system_prompt is not None:
            system = [ChatMessage(role=system_role, content=system_prompt)]
        asked = ChatMessage(role=MessageRole.USER, content=self.content)
        return [*system, *self.history.sent(), asked]


@dataclass(frozen=True, slots=True)
class _Retrieved:
    """What was retrieved for a turn.

    Attributes:
        nodes: Without earlier plans, best first.
        blocks: A block for each node.
        left_out: Where further ones stand, in words, as those earlier plans say.
        can_be_planned: False where finding out about the nodes has failed.
    """

    nodes: list[NodeWithScore]
    blocks: list[ContextBlock]
    left_out: list[str]
    can_be_planned: bool = True


class TurnPlanner:
    """Plans the turns of one conversation.

    Args:
        planner: Plans the contexts.
        system_prompt: What stands before everything else.
        metadata_mode: Which metadata is part of a node's text.
        token_counter: Counts what has to fit into the window, as `ReusePlanner`'s does.
        component: The chat engine's name, for the log.

    Raises:
        InvalidRequestError: If an argument is of the wrong kind.
    """

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
        self._fail_open = FailOpen(component, "nodes go through as retrieved")
        self._has_warned = False

    @property
    def faults(self) -> int:
        """How often planning has failed and nodes went through as retrieved, or counting has."""
        return self._fail_open.faults + self._counting.faults

    def turn(
        self,
        question: str,
        nodes: Sequence[NodeWithScore],
        begun: Transcript,
        model: LLMMetadata,
    ) -> Turn:
        """Return the next turn of a conversation, its history cut to what the model can take.

        Args:
            question: What the user said.
            nodes: What was retrieved for it, best first.
            begun: The conversation so far.
            model: Says how large its window is.
        """
        retrieved = self._fail_open.attempt(
            lambda: _retrieved(nodes, self._metadata_mode), lambda: self._as_it_is(nodes)
        )
        asked = "\n\n".join([*retrieved.left_out, question])
        window = _window(model)
        history = begun
        while True:
            plan, content = self._planned(asked, retrieved, history)
            length = self._length(history, content)
            if not len(history) or length <= window:
                break
            self._take_back(plan)
            history = history.newest(window // 2, self._count)
        if length > window and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "ReuseChatEngine: a turn alone takes about %d tokens, more than the %d that the "
                "model's context_window of %d leaves it; it is sent as it is. Set context_window "
                "to what the model really has, or retrieve less.",
                length,
                window,
                model.context_window,
            )
        sources = self._fail_open.attempt(lambda: _marked(retrieved, plan), lambda: retrieved.nodes)
        return Turn(question, content, history, begun, sources, plan)

    def take_back(self, turn: Turn) -> None:
        """Forget a turn that was not answered."""
        self._take_back(turn.plan)

    def _as_it_is(self, nodes: Sequence[NodeWithScore]) -> _Retrieved:
        """Return nodes as they came; without metadata if that is what cannot be rendered."""
        given = _documents(nodes)
        blocks = self._fail_open.attempt(
            lambda: [node_block(one.node, self._metadata_mode) for one in given],
            lambda: [node_block(one.node, MetadataMode.NONE) for one in given],
        )
        return _Retrieved(given, blocks, [], can_be_planned=False)

    def _planned(
        self, question: str, retrieved: _Retrieved, history: Transcript
    ) -> tuple[Plan | None, str]:
        texts = "\n\n".join([*(block.text for block in retrieved.blocks), question])
        if not retrieved.can_be_planned:
            return None, texts
        scope = current_scope()
        conversation = scope.conversation_id
        plan = self._fail_open.attempt(
            lambda: self._planner.plan(
                ContextRequest(
                    retrieved.blocks,
                    question,
                    system=self._system_prompt,
                    history=history.as_openai(),
                    conversation_id=self._conversation_id if conversation is None else conversation,
                    tenant=scope.tenant or "",
                )
            ),
            lambda: None,
        )
        if plan is not None:
            return plan, plan.content
        return None, texts

    def _take_back(self, plan: Plan | None) -> None:
        if plan is not None:
            self._fail_open.attempt(lambda: self._planner.evict([plan.request_id]), lambda: None)

    def _count(self, text: str) -> int:
        return self._counting.attempt(
            lambda: self._given_count(text), lambda: estimate_tokens(text)
        )

    def _length(self, history: Transcript, content: str) -> int:
        system = 0
        if self._system_prompt is not None:
            system = message_tokens(self._system_prompt, self._count)
        return system + history.tokens(self._count) + message_tokens(content, self._count)


def _window(model: LLMMetadata) -> int:
    """Return how many tokens a prompt may have, so that an answer fits behind it."""
    answer = model.num_output if model.num_output > 0 else _TOKENS_OF_AN_ANSWER
    return max(model.context_window - answer, model.context_window // 2)


def _retrieved(nodes: Sequence[NodeWithScore], metadata_mode: MetadataMode) -> _Retrieved:
    """Return nodes without earlier plans, and where those say that further ones stand."""
    unplanned, words = without_plan(nodes), []
    if unplanned is None:
        unplanned, words = _documents(nodes), left_out_words(marked_documents(nodes))
    return _Retrieved(unplanned, [node_block(one.node, metadata_mode) for one in unplanned], words)


def _documents(nodes: Sequence[NodeWithScore]) -> list[NodeWithScore]:
    return [one for one in nodes if not isinstance(one.node, AnnotationNode)]


def _marked(retrieved: _Retrieved, plan: Plan | None) -> list[NodeWithScore]:
    """Return copies of the nodes, as ranked, that carry their rank, label and plan."""
    if plan is None:
        return retrieved.nodes
    marks = document_metadata(plan, with_order=True)
    label_of = plan.label_of
    return [
        NodeWithScore(
            node=marked_copy(one.node, marks.position(rank, label_of[block.key])), score=one.score
        )
        for rank, (one, block) in enumerate(zip(retrieved.nodes, retrieved.blocks, strict=True))
    ]
