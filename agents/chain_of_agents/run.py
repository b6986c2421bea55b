"""One question: the workers read in turn or in parallel, then the manager answers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from langchain_core.callbacks import AsyncCallbackManagerForChainRun
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import patch_config

from chain_of_agents.agent_memory import MANAGER, AgentMemory, AgentTurn
from chain_of_agents.agent_placement import AgentPlacement
from chain_of_agents.models import AgentModel, AgentReply, AgentRequest, OnPiece
from chain_of_agents.requests import AgentRequests, Budget, ChainQuestion, Note, Settings, budget_of
from chain_of_agents.segments import Segment, parcels_of, pieces_of, segments_of
from chain_of_agents.trace.answer import ManagerError, Trace, UnreadError
from chain_of_agents.trace.steps import Step, failure_of, is_too_long, outcome_of
from ctxreuse.context.thoughts import ThoughtFilter, without_thoughts
from ctxreuse.errors import InvalidRequestError
from ctxreuse.planner import ReusePlanner
from ctxreuse.serving.aio.concurrency import all_of
from ctxreuse.serving.pool.placement import Document

_log = logging.getLogger("ctxreuse")

_CALL_TOKENS = 100
"""What a call costs its engine besides the documents: the question, and the answer's steps."""


@dataclass(eq=False)
class ChainRun:
    """One question: the workers read, then the manager answers."""

    settings: Settings
    model: AgentModel
    planner: ReusePlanner
    placement: AgentPlacement
    memory: AgentMemory
    question: ChainQuestion
    run_manager: AsyncCallbackManagerForChainRun
    config: RunnableConfig

    def __post_init__(self) -> None:
        self._began = perf_counter()
        self._turns: list[AgentTurn] = []
        self._steps: tuple[Step, ...] = ()
        self._first_failure: Exception | None = None

    @property
    def trace(self) -> Trace:
        """What has been done so far."""
        return Trace(question=self.question.text, mode=self.settings.mode, steps=self._steps)

    async def answer(self, on_piece: OnPiece | None = None) -> str:
        """Return the manager's answer; the trace tells the rest."""
        has_text = any(block.text.strip() for block in self.question.documents)
        if not (has_text or self.memory.history(self.question.conversation, MANAGER)):
            what = "no text in documents" if self.question.documents else "documents is empty"
            raise InvalidRequestError(
                f"{what}, so there is nothing to answer from; give at least one document, or ask "
                "the model itself"
            )
        window = self.settings.context_window or await self.model.engines.context_window()
        budget = budget_of(self.question.text, window, self.settings, self.planner)
        self._requests = AgentRequests(
            self.question, self.settings, self.planner, self.memory, budget
        )
        notes = await self._read(self._segments(budget))
        self._look_at_unread()
        step, reply = await self._manage(notes, budget.notes, on_piece)
        self._steps += (step,)
        if isinstance(reply, Exception):
            raise self._manager_error(step.error) from reply
        if step.outcome == "empty" or reply.text is None:
            raise self._manager_error("it said nothing")
        self.memory.record(self.question.conversation, self._turns)
        return reply.text

    def _segments(self, budget: Budget) -> list[Segment]:
        """Say which agent reads what: each piece of each document is in exactly one segment."""
        question, settings = self.question, self.settings
        pieces = [
            piece
            for block in question.documents
            for cut in pieces_of(block, budget.cut, self.planner.count_tokens)
            for piece in pieces_of(cut, budget.segment, self.planner.count_tokens)
        ]
        tokens = [self.planner.block_tokens([piece], question.tenant) for piece in pieces]
        is_shadow = self.planner.mode == "shadow"
        shown = {} if is_shadow else self.memory.shown(question.conversation)
        is_auto = settings.packing == "auto"
        may_share = [is_auto and piece.digest not in shown for piece in pieces]
        parcels = parcels_of(tokens, may_share, budget.segment, budget.label)
        # in a conversation, an agent's history continues with one turn a question
        one_each = question.conversation is None and (
            settings.packing == "single" or (is_auto and len(parcels) <= settings.workers)
        )
        call = _CALL_TOKENS * one_each
        # of documents that mostly come together, the least digest is mostly the same
        documents = [
            Document(min(pieces[n].digest for n in parcel), sum(tokens[n] for n in parcel) + call)
            for parcel in parcels
        ]
        agents = self.placement.assign(documents, question.tenant, shown)
        return segments_of(pieces, parcels, agents, tokens, budget.segment, budget.label, one_each)

    async def _read(self, segments: Sequence[Segment]) -> list[Note]:
        notes: list[Note] = []
        if self.settings.mode == "parallel":
            parts = await all_of(self._work(segment, "") for segment in segments)
            read = [one for part in parts for one in part]
            self._steps = tuple(replace(step, position=n) for n, (step, _) in enumerate(read))
            return [(n, note) for n, (_, note) in enumerate(read, 1) if note]
        for segment in segments:
            note = notes[0][1] if notes else ""
            for step, written in await self._work(segment, note):
                self._steps += (replace(step, position=len(self._steps)),)
                if written:
                    notes = [(len(self._steps), written)]
        return notes

    async def _work(self, segment: Segment, note: str) -> list[tuple[Step, str]]:
        """Let a worker read its segment, in parts if need be; return steps with their notes."""
        began = perf_counter() - self._began
        engine = self.placement.lives_on[segment.agent]
        request, remark = self._requests.worker(segment, note, engine)
        in_parts = "read in parts, because the model had no room" * bool(segment.halvings)
        step = Step(
            role="worker",
            agent=segment.agent,
            position=-1,
            documents=tuple(block.id for block in segment.blocks),
            document_tokens=segment.tokens,
            remark="; ".join(filter(None, (remark, in_parts))),
            began_s=began,
        )
        step, reply = await self._ask(step, request, keeps_turn=segment.is_first_of_agent)
        has_no_room = isinstance(reply, Exception) and is_too_long(reply)
        parts = segment.halves(self.planner.count_tokens) if has_no_room else ()
        if not parts:
            return [self._requests.note_of(step, note)]
        read: list[tuple[Step, str]] = []
        for part in parts:
            read += await self._work(part, note)
            if self.settings.mode == "sequential":
                note = next((written for _, written in reversed(read) if written), note)
        return read

    async def _manage(
        self, notes: Sequence[Note], room: int, on_piece: OnPiece | None
    ) -> tuple[Step, AgentReply | Exception]:
        """Ask the manager, with shorter notes if the model has no room for them."""
        request, remark = self._requests.manager(notes, room)
        began = perf_counter() - self._began
        step = Step(role="manager", agent=MANAGER, position=-1, remark=remark, began_s=began)
        step, reply = await self._ask(step, request, on_piece=on_piece)
        if isinstance(reply, Exception) and is_too_long(reply) and room > 1:
            return await self._manage(notes, room // 4, on_piece)
        return step, reply

    def _look_at_unread(self) -> None:
        """Raise UnreadError if too little was read for an answer; else say what was not."""
        if all(step.outcome == "answered" for step in self._steps):
            return
        trace = self.trace
        share = f"{trace.read_share:.0%}".replace("%", " %")
        first = trace.failures[0]
        why = (
            f"{len(trace.failures)} of {len(trace.steps)} calls failed, the first one because "
            f"{first.error or 'what it said is ' + first.outcome}"
        )
        least = self.settings.min_read
        if trace.read_share and trace.read_share >= least:
            _log.warning("an answer rests on %s of its documents' tokens: %s", share, why)
            return
        what = f"only {share} of the documents' tokens were read, and min_read is {least}"
        if not trace.read_share:
            what = "none of the documents was read"
        raise UnreadError(
            f"{what}, so the manager was not asked: {why}", trace
        ) from self._first_failure

    async def _ask(
        self,
        step: Step,
        request: AgentRequest,
        *,
        keeps_turn: bool = True,  # in the history of the agent, once the manager has answered
        on_piece: OnPiece | None = None,
    ) -> tuple[Step, AgentReply | Exception]:
        try:
            reply = await self._reply(step.name, request, on_piece)
        except Exception as error:
            prompt = [request.context.query, *[block.text for block in request.context.blocks]]
            outcome, description = failure_of(error, "\n".join(prompt))
            self._first_failure = self._first_failure or error
            ended = perf_counter() - self._began
            return replace(step, outcome=outcome, error=description, ended_s=ended), error
        step = replace(
            step,
            note=reply.text or "",
            outcome=outcome_of(reply.text),
            shown_before=reply.plan.references,
            labels=dict(reply.plan.labels),
            replica=reply.replica,
            prompt_tokens=reply.usage.prompt_tokens,
            cached_tokens=reply.usage.cached_tokens,
            completion_tokens=reply.usage.completion_tokens,
            ended_s=perf_counter() - self._began,
        )
        if keeps_turn and self.question.conversation is not None and step.outcome == "answered":
            before, shown = request.context.history or (), [one.digest for one in reply.plan.blocks]
            turn = AgentTurn(step.agent, before, reply.plan.content, step.note, tuple(shown))
            self._turns.append(turn)
        return step, reply

    async def _reply(
        self, agent: str, request: AgentRequest, on_piece: OnPiece | None
    ) -> AgentReply:
        """Send a request; LangChain's callbacks see it as a run inside the chain's.

        A reasoning model's thoughts are no part of the answer.
        """
        run = await self.run_manager.get_child().on_chain_start(
            None, {"question": request.context.query}, name=agent
        )
        config = patch_config(self.config, callbacks=run.get_child())
        said, say = ThoughtFilter(), on_piece
        on_said = None if say is None else lambda piece: say(said.take(piece))
        try:
            reply = await self.model.ask(request, config, on_said)
        except BaseException as error:
            await run.on_chain_error(error)
            raise
        text = reply.text
        if text is not None:
            text = without_thoughts(text)
            if say is not None and not said.has_begun:
                say(text)
        await run.on_chain_end({"note": text})
        return replace(reply, text=text)

    def _manager_error(self, reason: str) -> ManagerError:
        notes = sum(one.outcome == "answered" for one in self._steps)
        return ManagerError(
            f"the manager did not answer: {reason}; the {notes} notes of the workers are in this "
            "error's trace",
            self.trace,
        )
