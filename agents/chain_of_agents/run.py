"""One question: the workers read in turn or in parallel, then the manager answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from langchain_core.callbacks import AsyncCallbackManagerForChainRun
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import patch_config

from chain_of_agents.agent_memory import MANAGER, AgentMemory, AgentTurn
from chain_of_agents.agent_placement import AgentPlacement
from chain_of_agents.models import AgentModel, AgentReply, AgentRequest, OnPiece
from chain_of_agents.question import ChainQuestion, Settings
from chain_of_agents.requests import AgentRequests, Note, budget_of
from chain_of_agents.segments import Segment, pieces_of, segments_of
from chain_of_agents.trace.answer import ManagerError, Trace
from chain_of_agents.trace.steps import Step, failure_of, outcome_of
from ctxreuse.planner import ReusePlanner
from ctxreuse.serving.pool.placement import Document

_CALL_TOKENS = 100
"""What a call costs its engine besides the documents: the question, and the answer's steps."""


@dataclass(eq=False)
class ChainRun:
    """One question: the workers read, then the manager answers.

    Each agent's call is a run of LangChain's inside that of `run_manager`.
    """

    settings: Settings
    model: AgentModel
    planner: ReusePlanner
    placement: AgentPlacement
    memory: AgentMemory
    question: ChainQuestion
    run_manager: AsyncCallbackManagerForChainRun
    config: RunnableConfig

    def __post_init__(self) -> None:
        self._began = self.settings.clock()
        self._turns: list[AgentTurn] = []
        self._steps: tuple[Step, ...] = ()

    @property
    def trace(self) -> Trace:
        """What has been done so far."""
        return Trace(question=self.question.text, mode=self.settings.mode, steps=self._steps)

    async def answer(self, on_piece: OnPiece | None = None) -> str:
        """Return the manager's answer; the trace tells the rest.

        Args:
            on_piece: Asks for a streamed answer, and is called with its pieces.

        Raises:
            InvalidRequestError: The model's context has no room for the question.
            ManagerError: The manager does not answer.
        """
        window = self.settings.context_window or await self.model.engines.context_window()
        budget = budget_of(self.question.text, window, self.settings, self.planner)
        requests = AgentRequests(self.question, self.settings, self.planner, self.memory, budget)
        notes = await self._read(self._segments(requests), requests)
        request, remark = requests.manager(notes)
        step = Step(role="manager", agent=MANAGER, position=-1, remark=remark, began_s=self._now())
        step, reply = await self._ask(step, request, on_piece=on_piece)
        self._steps += (step,)
        if isinstance(reply, Exception):
            raise self._manager_error(step.error) from reply
        if step.outcome == "empty" or reply.text is None:
            raise self._manager_error("it said nothing")
        self.memory.record(self.question.conversation, self._turns)
        return reply.text

    def _segments(self, requests: AgentRequests) -> list[Segment]:
        """Say which agent reads what: each piece of each document is in exactly one segment."""
        question, settings, budget = self.question, self.settings, requests.budget
        pieces = [
            piece
            for block in question.documents
            for piece in pieces_of(block, budget.segment, self.planner.count_tokens)
        ]
        tokens = [self.planner.block_tokens([piece], question.tenant) for piece in pieces]
        one_each = settings.packing == "single" or (
            settings.packing == "auto" and len(pieces) <= settings.workers
        )
        if question.conversation is not None:
            one_each = False  # an agent's history continues with one turn a question
        agents = self.placement.assign(
            [
                Document(piece.key, length + _CALL_TOKENS * one_each)
                for piece, length in zip(pieces, tokens, strict=True)
            ],
            question.tenant,
            self.memory.shown(question.conversation),
        )
        return segments_of(pieces, agents, tokens, budget.segment, budget.label, one_each)

    async def _read(self, segments: Sequence[Segment], requests: AgentRequests) -> list[Note]:
        """Let the workers read; return the notes that the manager reads."""
        if self.settings.mode == "parallel":
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._work(position, segment, "", requests))
                    for position, segment in enumerate(segments)
                ]
            self._steps = tuple(task.result() for task in tasks)
            return [requests.note_of(step) for step in self._steps if step.outcome == "answered"]
        notes: list[Note] = []
        for position, segment in enumerate(segments):
            note = notes[0][1] if notes else ""
            step = await self._work(position, segment, note, requests)
            self._steps += (step,)
            if step.outcome == "answered":
                notes = [requests.note_of(step)]
        return notes

    async def _work(
        self, position: int, segment: Segment, note: str, requests: AgentRequests
    ) -> Step:
        """Let a worker read its segment; a failure stands in the step."""
        began = self._now()
        engine = self.placement.engine_of(segment.agent)
        request, remark = requests.worker(segment, note, engine)
        step = Step(
            role="worker",
            agent=segment.agent,
            position=position,
            documents=tuple(block.id for block in segment.blocks),
            remark=remark,
            began_s=began,
        )
        step, _ = await self._ask(step, request, keeps_turn=segment.is_first_of_agent)
        return step

    async def _ask(
        self,
        step: Step,
        request: AgentRequest,
        *,
        keeps_turn: bool = True,
        on_piece: OnPiece | None = None,
    ) -> tuple[Step, AgentReply | Exception]:
        """Send a request; return the step at its end, and the reply or what went wrong.

        An answered turn is kept until the manager has answered; then it belongs to the agent's
        history.
        """
        try:
            reply = await self._reply(step.name, request, on_piece)
        except Exception as error:
            outcome, description = failure_of(error)
            return replace(step, outcome=outcome, error=description, ended_s=self._now()), error
        step = replace(
            step,
            note=reply.text or "",
            outcome=outcome_of(reply.text),
            shown_before=reply.plan.references,
            labels=dict(reply.plan.labels),
            replica=reply.replica,
            prompt_tokens=reply.prompt_tokens,
            cached_tokens=reply.cached_tokens,
            completion_tokens=reply.completion_tokens,
            ended_s=self._now(),
        )
        if keeps_turn and self.question.conversation is not None and step.outcome == "answered":
            before, shown = request.context.history or (), (one.key for one in reply.plan.blocks)
            turn = AgentTurn(step.agent, before, reply.plan.content, step.note, tuple(shown))
            self._turns.append(turn)
        return step, reply

    async def _reply(
        self, agent: str, request: AgentRequest, on_piece: OnPiece | None
    ) -> AgentReply:
        """Send a request; LangChain's callbacks see it as a run inside the chain's."""
        run = await self.run_manager.get_child().on_chain_start(
            None, {"question": request.context.query}, name=agent
        )
        config = patch_config(self.config, callbacks=run.get_child())
        try:
            reply = await self.model.ask(request, config, on_piece)
        except BaseException as error:
            await run.on_chain_error(error)
            raise
        await run.on_chain_end({"note": reply.text})
        return reply

    def _manager_error(self, reason: str) -> ManagerError:
        notes = sum(one.outcome == "answered" for one in self._steps)
        return ManagerError(
            f"the manager did not answer: {reason}; the {notes} notes of the workers are in this "
            "error's trace",
            self.trace,
        )

    def _now(self) -> float:
        return self.settings.clock() - self._began
