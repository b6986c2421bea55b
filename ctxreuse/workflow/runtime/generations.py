"""Generations under way: the request to the model, and the answer piece by piece."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from ctxreuse.context.blocks import ContextBlock, ContextRequest
from ctxreuse.context.content_parts import joined, turn_parts
from ctxreuse.context.fail_open import FailOpen
from ctxreuse.context.rendering import DEFAULT_TEMPLATES, SentBlock, render_messages
from ctxreuse.pipeline.engine_options import planning_time
from ctxreuse.planner import ReusePlanner
from ctxreuse.planning.plan import Plan, Strategy
from ctxreuse.serving.aio.concurrency import end_tasks
from ctxreuse.serving.client.request import Prompt
from ctxreuse.workflow.graph.nodes import Generation
from ctxreuse.workflow.graph.state import State
from ctxreuse.workflow.models.language_model import LanguageModel, Piece


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request to the model. Two that are equal are the same, byte for byte."""

    query: str
    blocks: tuple[ContextBlock, ...]
    system: str | None
    params: Mapping[str, Any] = field(hash=False)
    llm: LanguageModel | None = field(default=None, hash=False)
    policy: Strategy = field(default="reuse", compare=False)

    @classmethod
    def of(cls, node: Generation, state: State) -> GenerationRequest:
        """Return the request of a node in a state."""
        query, blocks = node.prompt.render_prompt(state)
        system = None if node.system is None else node.system.render_text(state)
        return cls(query, blocks, system, node.params, node.llm, node.policy)


class GenerationAnswer:
    """An answer that is received whether or not a node reads it yet."""

    def __init__(self, request: GenerationRequest, stream: AsyncGenerator[Piece, None]) -> None:
        self.request = request
        self.tokens = 0
        self.has_begun = False
        self._pieces: asyncio.Queue[Piece | None] = asyncio.Queue()  # None behind the last one
        self.receiving = asyncio.ensure_future(self._receive(stream))
        self.receiving.add_done_callback(self._note_end)

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Yield all pieces, those first that have come already; for one reader."""
        while (piece := await self._pieces.get()) is not None:
            yield piece
        if self.receiving.cancelled():  # no node reads an answer that was cancelled here
            raise RuntimeError("the model's stream was cancelled from elsewhere")
        self.receiving.result()

    async def cancel(self) -> None:
        """Close the stream, and wait until it is closed; ignore what that raises."""
        await end_tasks(self.receiving)

    def _note_end(self, receiving: asyncio.Task[None]) -> None:
        if not receiving.cancelled():
            receiving.exception()  # retrieved, even if no node reads the answer to its end
        self._pieces.put_nowait(None)

    async def _receive(self, stream: AsyncGenerator[Piece, None]) -> None:
        async with aclosing(stream):
            async for piece in stream:
                self.has_begun = True
                self._pieces.put_nowait(piece)
                self.tokens += piece.tokens
        self.has_begun = True  # an empty answer, too


class Generations:
    """The generations of a workflow engine. For one event loop."""

    def __init__(self, llm: LanguageModel | None, planner: ReusePlanner | None) -> None:
        self.started = 0
        tell = None if planner is None else planner.note_failure
        self.planning = FailOpen("WorkflowEngine", tell=tell)
        self._llm = llm
        self._planner = planner
        self._under_way: set[GenerationAnswer] = set()

    def __len__(self) -> int:
        return len(self._under_way)

    def begin(self, request: GenerationRequest, tenant: str) -> GenerationAnswer:
        """Ask the model: documents first, in the order that the prefix cache likes."""
        llm = self._llm if request.llm is None else request.llm
        assert llm is not None, "the engine has checked that there is one"
        planner = self._planner
        prompt: Prompt | None = None
        if planner and request.blocks:
            context = ContextRequest(
                request.blocks, request.query, system=request.system, tenant=tenant
            )
            prompt = self.planning.attempt(
                lambda: planner.plan(context, request.policy, **planning_time(planner))
            )
        if prompt is None:
            parts = [SentBlock("", block) for block in request.blocks]
            turn = turn_parts(parts, None, request.query, DEFAULT_TEMPLATES, is_labelled=False)
            prompt = render_messages(request.system, None, joined(turn))
        answer = GenerationAnswer(request, llm.stream(prompt, request.params))
        self.started += 1
        self._under_way.add(answer)

        def ended(_: object) -> None:
            self._under_way.discard(answer)
            # without any piece, the engine keeps no prompt
            if planner and isinstance(prompt, Plan) and not answer.has_begun:
                self.planning.attempt(lambda: planner.forget(prompt))

        answer.receiving.add_done_callback(ended)
        return answer
