"""What each agent is asked: instructions, history, documents and question, within the budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from chain_of_agents.agent_memory import MANAGER, AgentMemory
from chain_of_agents.budget import budget_of, clipped, clipped_together, history_tokens
from chain_of_agents.models.agent_model import AgentRequest
from chain_of_agents.question import ChainQuestion, Settings
from chain_of_agents.segments import Segment
from chain_of_agents.trace.steps import Step
from ctxreuse.adapters.engine_options import conversation_session
from ctxreuse.context.blocks import ContextBlock, ContextRequest
from ctxreuse.planner import ReusePlanner

Note = tuple[int, str]
"""A worker's number, counted from 1, and its note."""


class AgentRequests:
    """Makes the requests of one question.

    Args:
        question: The question.
        settings: The chain's.
        planner: Counts tokens.
        memory: What the agents have answered in the conversation so far.
        window: The model's context window; None if unknown.

    Raises:
        InvalidRequestError: The model's context has no room for the question.
    """

    def __init__(
        self,
        question: ChainQuestion,
        settings: Settings,
        planner: ReusePlanner,
        memory: AgentMemory,
        window: int | None,
    ) -> None:
        self._question = question
        self._settings = settings
        self._planner = planner
        self._memory = memory
        self.budget = budget_of(question.text, window, settings, planner)

    def worker(self, segment: Segment, note: str, replica: str) -> tuple[AgentRequest, str]:
        """Return a worker's request, and a remark on it.

        Args:
            segment: What it reads.
            note: The note before it; empty where there is none.
            replica: The engine that it lives on.
        """
        settings, count_tokens = self._settings, self._planner.count_tokens
        history: Sequence[Mapping[str, Any]] = ()
        remark = ""
        if segment.is_first_of_agent:
            history = self._memory.history(self._question.conversation, segment.agent)
        if history:
            size = history_tokens(history, count_tokens) + sum(
                max(self._planner.block_tokens([block]) + self.budget.label, self.budget.location)
                for block in segment.blocks
            )
            if size > self.budget.segment:
                history, remark = (), "its history was left out to fit the model's context"
        request = AgentRequest(
            context=self._context(
                f"agent {segment.agent}",
                segment.blocks,
                settings.prompts.worker_query(self._question.text, note),
                settings.prompts.worker,
                history,
            ),
            replica=replica,
            session_id=f"chain-of-agents-{segment.agent}",
            max_tokens=settings.note_tokens,
            limit_s=settings.timeout_s,
        )
        return request, remark

    def manager(self, notes: Sequence[Note]) -> tuple[AgentRequest, str]:
        """Return the manager's request, and a remark on it.

        Args:
            notes: The notes, in the order of the segments.
        """
        question, settings, budget = self._question, self._settings, self.budget
        count_tokens = self._planner.count_tokens
        kept = notes[: budget.most_notes]
        room = budget.notes - budget.note * len(kept)
        cut = clipped_together([note for _, note in kept], room, count_tokens)
        shown = [(number, note) for (number, _), note in zip(kept, cut, strict=True)]
        remark = "" if shown == notes else "notes were cut to fit the model's context"
        query = settings.prompts.manager_query(question.text, shown)
        history = self._memory.history(question.conversation, MANAGER)
        if history and history_tokens(history, count_tokens) + count_tokens(query) > budget.notes:
            history, remark = (), "the conversation was left out to fit the model's context"
        session_id = None  # outside a conversation any engine may answer
        if question.conversation is not None:
            session_id = conversation_session(question.tenant, question.conversation.id)
        request = AgentRequest(
            context=self._context("manager", (), query, settings.prompts.manager, history),
            session_id=session_id,
            max_tokens=settings.answer_tokens,
            limit_s=settings.timeout_s,
        )
        return request, remark

    def note_of(self, step: Step) -> Note:
        """Return the note of a worker's step as the next agent reads it."""
        note = clipped(step.note.strip(), self._settings.note_tokens, self._planner.count_tokens)
        return step.position + 1, note

    def _context(
        self,
        agent: str,
        blocks: Sequence[ContextBlock],
        query: str,
        system: str,
        history: Sequence[Mapping[str, Any]],
    ) -> ContextRequest:
        conversation = self._question.conversation
        return ContextRequest(
            blocks,
            query,
            system=system,
            history=None if conversation is None else history,
            conversation_id=None if conversation is None else f"{conversation.id!r}, {agent}",
            tenant=self._question.tenant,
        )
