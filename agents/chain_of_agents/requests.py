"""What each agent is asked: instructions, history, documents and question, within the budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from chain_of_agents.agent_memory import MANAGER, Histories
from chain_of_agents.budget import (
    DEFAULT_WINDOW_TOKENS,
    Budget,
    budget_of,
    clipped,
    clipped_together,
    history_tokens,
)
from chain_of_agents.models.agent_model import AgentRequest
from chain_of_agents.question import ChainQuestion, Settings
from chain_of_agents.segments import Segment
from ctxreuse.adapters.engine_options import conversation_session
from ctxreuse.context.blocks import ContextBlock, ContextRequest
from ctxreuse.planner import ReusePlanner


class AgentRequests:
    """Writes the calls of one question.

    Args:
        question: The question.
        settings: The chain's.
        planner: Counts tokens.
        histories: What the agents have said in the conversation so far.
        window: What the model holds; None if nobody says.

    Raises:
        InvalidRequestError: If the model's context has no room for the question.
    """

    def __init__(
        self,
        question: ChainQuestion,
        settings: Settings,
        planner: ReusePlanner,
        histories: Histories,
        window: int | None,
    ) -> None:
        self._question = question
        self._settings = settings
        self._planner = planner
        self._histories = histories
        self.budget: Budget = budget_of(
            question.text,
            window or DEFAULT_WINDOW_TOKENS,
            settings.is_counted,
            settings.prompts,
            planner.templates,
            planner.count_tokens,
            settings.note_tokens,
            settings.answer_tokens,
            settings.segment_tokens,
        )

    def worker(
        self, segment: Segment, note: str, replica: str, goes_on: bool
    ) -> tuple[AgentRequest, str]:
        """Return what a worker is asked, and a remark on it.

        Args:
            segment: What it reads.
            note: The note before it; empty where there is none.
            replica: The engine that it lives on.
            goes_on: Whether this goes on with the agent's history: its first segment of a turn.
        """
        query = self._settings.prompts.worker_query(self._question.text, note)
        history: Sequence[Mapping[str, Any]] = ()
        remark = ""
        if goes_on:
            history = self._histories.of(self._question.conversation, segment.agent)
        if history:
            size = history_tokens(history, self._planner.count_tokens) + sum(
                max(self._planner.block_tokens([block]) + self.budget.label, self.budget.location)
                for block in segment.blocks
            )
            if size > self.budget.segment:
                history, remark = (), "its history was left out to fit the model's context"
        return self._ask(segment.agent, segment.blocks, query, history, replica), remark

    def manager(self, notes: Sequence[tuple[int, str]]) -> tuple[AgentRequest, str]:
        """Return what the manager is asked, and a remark on it.

        Args:
            notes: Numbers of workers and their notes, in the order of the segments.
        """
        budget, count_tokens = self.budget, self._planner.count_tokens
        kept = notes[: budget.most_notes()]
        room = budget.notes - budget.note * len(kept)
        cut = clipped_together([note for _, note in kept], room, count_tokens)
        shown = [(number, note) for (number, _), note in zip(kept, cut, strict=True)]
        remark = "" if shown == notes else "notes were cut to fit the model's context"
        query = self._settings.prompts.manager_query(self._question.text, shown)
        history = self._histories.of(self._question.conversation, MANAGER)
        size = history_tokens(history, count_tokens) + count_tokens(query)
        if history and size > budget.notes:
            history, remark = (), "the conversation was left out to fit the model's context"
        return self._ask(MANAGER, (), query, history, None), remark

    def passed_on(self, note: str) -> str:
        """Return a note as it goes on to whoever reads it."""
        return clipped(note.strip(), self._settings.note_tokens, self._planner.count_tokens)

    def _ask(
        self,
        agent: int,
        blocks: Sequence[ContextBlock],
        query: str,
        history: Sequence[Mapping[str, Any]],
        replica: str | None,
    ) -> AgentRequest:
        question, settings = self._question, self._settings
        is_manager = agent == MANAGER
        name = "manager" if is_manager else f"agent {agent}"
        conversation = None
        if question.conversation_id is not None:
            conversation = f"{question.conversation_id!r}, {name}"
        request = ContextRequest(
            blocks,
            query,
            system=settings.prompts.manager if is_manager else settings.prompts.worker,
            history=history if conversation is not None else None,
            conversation_id=conversation,
            tenant=question.tenant,
        )
        return AgentRequest(
            request=request,
            replica=replica,
            session_id=self._managers_session() if is_manager else f"chain-of-agents-{agent}",
            max_tokens=settings.answer_tokens if is_manager else settings.note_tokens,
            limit_s=settings.timeout_s,
        )

    def _managers_session(self) -> str | None:
        """Return what keeps a conversation's managers on one engine; others may go anywhere."""
        question = self._question
        if question.conversation_id is None:
            return None
        return conversation_session(question.tenant, question.conversation_id)
