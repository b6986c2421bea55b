"""One question on its way through the agents."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from chain_of_agents.agent_memory import MANAGER, AgentReply, Histories
from chain_of_agents.agent_placement import AgentPlacement
from chain_of_agents.budget import Budget
from chain_of_agents.errors import ManagerError
from chain_of_agents.models.agent_model import AgentModel, AgentRequest, Reply, ReplyStream
from chain_of_agents.observer import Observer
from chain_of_agents.question import ChainQuestion, Settings
from chain_of_agents.reply_outcomes import described, is_timeout, outcome_of
from chain_of_agents.requests import AgentRequests
from chain_of_agents.segments import Segment, pieces_of, segments_of
from chain_of_agents.trace.steps import Outcome, Step, Trace
from ctxreuse.planner import ReusePlanner
from ctxreuse.serving.pool.placement import Document

_CALL_TOKENS = 100
"""What a call costs its engine besides the documents: the question, and the answer's steps."""


class ChainRun:
    """One question: the workers read, then the manager answers.

    Args:
        question: The question.
        settings: The chain's.
        model: Who answers.
        planner: Counts tokens.
        desk: Says which agent reads what.
        histories: What the agents have said in conversations.
        observer: Told of each call.
    """

    def __init__(
        self,
        question: ChainQuestion,
        settings: Settings,
        model: AgentModel,
        planner: ReusePlanner,
        desk: AgentPlacement,
        histories: Histories,
        observer: Observer,
    ) -> None:
        self._question = question
        self._settings = settings
        self._model = model
        self._planner = planner
        self._desk = desk
        self._histories = histories
        self._observer = observer
        self._began = settings.clock()
        self._said: list[AgentReply] = []
        self._steps: tuple[Step, ...] = ()
        self._first_of: dict[int, int] = {}  # agent -> the place of its first segment

    @property
    def trace(self) -> Trace:
        """What has been done so far."""
        return Trace(question=self._question.text, mode=self._settings.mode, steps=self._steps)

    async def answer(self) -> str:
        """Return the manager's answer; the trace tells the rest.

        Raises:
            InvalidRequestError: If the model's context has no room for the question.
            ManagerError: If the manager does not answer.
        """
        ask, remark = await self._read()
        began = self._now()
        try:
            async with self._observer.call("manager", ask.request.query) as call:
                reply = await self._model.ask(replace(ask, config=call.config))
                call.reply = reply
        except Exception as error:
            raise self._failed(error, began, remark) from error
        return self._answered(ask, reply, began, remark)

    async def stream(self) -> AsyncGenerator[str]:
        """Yield the pieces of the manager's answer, once the workers have read.

        Raises:
            InvalidRequestError: As `answer` does.
            ManagerError: As `answer` does.
        """
        ask, remark = await self._read()
        began = self._now()
        into = ReplyStream()
        try:
            async with self._observer.call("manager", ask.request.query) as call:
                pieces = self._model.stream(replace(ask, config=call.config), into)
                async with aclosing(pieces):
                    async for piece in pieces:
                        yield piece
                call.reply = into.reply
        except Exception as error:
            raise self._failed(error, began, remark) from error
        assert into.reply is not None, "a stream that ends has a reply"
        self._answered(ask, into.reply, began, remark)

    async def _read(self) -> tuple[AgentRequest, str]:
        """Let the workers read; return what the manager is asked, and a remark on it."""
        window = self._settings.context_window or await self._model.context_window()
        asking = AgentRequests(
            self._question, self._settings, self._planner, self._histories, window
        )
        segments = self._segments(asking.budget)
        for position, segment in enumerate(segments):
            self._first_of.setdefault(segment.agent, position)
        if self._settings.mode == "sequential":
            notes = await self._read_in_turn(segments, asking)
        else:
            notes = await self._read_at_once(segments, asking)
        return asking.manager(notes)

    def _segments(self, budget: Budget) -> list[Segment]:
        """Say who reads what: each piece of each document stands in exactly one segment."""
        question, settings = self._question, self._settings
        pieces = [
            piece
            for block in question.documents
            for piece in pieces_of(block, budget.segment, self._planner.count_tokens)
        ]
        tokens = [self._planner.block_tokens([piece]) for piece in pieces]
        one_each = settings.packing == "single" or (
            settings.packing == "auto" and len(pieces) <= settings.workers
        )
        if question.conversation_id is not None:
            one_each = False  # an agent's history goes on with one turn a question
        agents = self._desk.assign(
            [
                Document(piece.key, length + _CALL_TOKENS * one_each)
                for piece, length in zip(pieces, tokens, strict=True)
            ],
            question.tenant,
            self._histories.shown(question.conversation),
        )
        return segments_of(pieces, agents, tokens, budget.segment, budget.label, one_each)

    async def _read_in_turn(
        self, segments: Sequence[Segment], asking: AgentRequests
    ) -> list[tuple[int, str]]:
        """Let each worker read its segment and the note before it; return the last note."""
        note: tuple[int, str] | None = None
        for position, segment in enumerate(segments):
            step = await self._work(position, segment, note[1] if note else "", asking)
            self._steps += (step,)
            if step.outcome == "answered":
                note = position + 1, asking.passed_on(step.note)
        return [note] if note else []

    async def _read_at_once(
        self, segments: Sequence[Segment], asking: AgentRequests
    ) -> list[tuple[int, str]]:
        """Let all workers read; return their notes in the order of the segments."""
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._work(position, segment, "", asking))
                for position, segment in enumerate(segments)
            ]
        self._steps = tuple(task.result() for task in tasks)
        return [
            (step.position + 1, asking.passed_on(step.note))
            for step in self._steps
            if step.outcome == "answered"
        ]

    async def _work(
        self, position: int, segment: Segment, note: str, asking: AgentRequests
    ) -> Step:
        """Let a worker read its segment. Whatever goes wrong with it stands in the step."""
        began = self._now()
        goes_on = self._first_of[segment.agent] == position
        engine = self._desk.engine_of(segment.agent)
        ask, remark = asking.worker(segment, note, engine, goes_on)
        step = Step(
            role="worker",
            agent=segment.agent,
            position=position,
            documents=tuple(block.id for block in segment.blocks),
            remark=remark,
            began_s=began,
        )
        try:
            async with self._observer.call(step.name, ask.request.query) as call:
                reply = await self._model.ask(replace(ask, config=call.config))
                call.reply = reply
        except Exception as error:
            return replace(
                step,
                outcome="timed out" if is_timeout(error) else "failed",
                error=described(error),
                ended_s=self._now(),
            )
        outcome = outcome_of(reply.text)
        if goes_on:
            self._note_said(ask, segment.agent, reply, outcome)
        return self._with_reply(step, reply, outcome)

    def _note_said(self, ask: AgentRequest, agent: int, reply: Reply, outcome: Outcome) -> None:
        """Note what belongs into an agent's history once the turn has been answered."""
        if self._question.conversation_id is None or outcome != "answered":
            return
        shown = tuple(block.key for block in reply.plan.blocks)
        before = ask.request.history or ()
        self._said.append(AgentReply(agent, before, reply.plan.content, reply.text or "", shown))

    def _answered(self, ask: AgentRequest, reply: Reply, began: float, remark: str) -> str:
        """Add the manager's step, and keep what all have said; return the answer."""
        outcome = outcome_of(reply.text)
        step = Step(role="manager", agent=MANAGER, position=-1, remark=remark, began_s=began)
        self._steps += (self._with_reply(step, reply, outcome),)
        if outcome == "empty" or reply.text is None:
            raise self._error("it said nothing")
        self._note_said(ask, MANAGER, reply, outcome)
        self._histories.record(self._question.conversation, self._said)
        return reply.text

    def _failed(self, error: Exception, began: float, remark: str) -> ManagerError:
        """Return the error that says that the manager has failed, with the notes kept."""
        step = Step(
            role="manager",
            agent=MANAGER,
            position=-1,
            outcome="timed out" if is_timeout(error) else "failed",
            error=described(error),
            remark=remark,
            began_s=began,
            ended_s=self._now(),
        )
        self._steps += (step,)
        return self._error(step.error)

    def _error(self, reason: str) -> ManagerError:
        notes = sum(one.outcome == "answered" for one in self._steps)
        return ManagerError(
            f"the manager did not answer: {reason}; the {notes} notes of the workers are in this "
            "error's trace",
            self.trace,
        )

    def _with_reply(self, step: Step, reply: Reply, outcome: Outcome) -> Step:
        return replace(
            step,
            note=reply.text or "",
            outcome=outcome,
            shown_before=reply.plan.references,
            labels=dict(reply.plan.labels),
            replica=reply.replica,
            prompt_tokens=reply.prompt_tokens,
            cached_tokens=reply.cached_tokens,
            completion_tokens=reply.completion_tokens,
            ended_s=self._now(),
        )

    def _now(self) -> float:
        return self._settings.clock() - self._began
