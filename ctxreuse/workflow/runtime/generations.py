"""Generations under way: what is asked of the model, and the answer as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from ctxreuse.context.blocks import ContextBlock, ContextRequest
from ctxreuse.context.fail_open import FailOpen
from ctxreuse.context.rendering import SentBlock, render_messages, render_turn
from ctxreuse.context.templates import Templates
from ctxreuse.planner import ReusePlanner
from ctxreuse.serving.client.request import Prompt
from ctxreuse.workflow.graph.nodes import Generation
from ctxreuse.workflow.graph.state import State
from ctxreuse.workflow.models.language_model import LanguageModel, Piece


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What is asked of the model. Two that are equal are the same, byte for byte.

    Attributes:
        query: The text behind the documents.
        blocks: The documents, best first.
        system: The system message.
        params: What else the engine is given.
        llm: Who is asked; None is the engine's model.
    """

    query: str
    blocks: tuple[ContextBlock, ...]
    system: str | None
    params: Mapping[str, Any] = field(hash=False)
    llm: LanguageModel | None = field(default=None, hash=False)

    @classmethod
    def of(cls, node: Generation, state: State) -> GenerationRequest:
        """Return what a node asks in a state.

        Raises:
            StateKeyError: If the state lacks a variable.
        """
        prompt = node.prompt.render_prompt(state)
        system = None if node.system is None else node.system.render_text(state)
        return cls(prompt.query, prompt.blocks, system, node.params, node.llm)


class Prompts:
    """Puts requests into words: documents first, in the order that the prefix cache likes.

    Args:
        planner: Orders the documents; None leaves them as retrieved.
    """

    def __init__(self, planner: ReusePlanner | None) -> None:
        self._planner = planner
        self._templates = Templates()
        self._planning = FailOpen("WorkflowEngine")

    @property
    def faults(self) -> int:
        """How often planning has failed; the documents went through as retrieved."""
        return self._planning.faults

    def prompt(self, request: GenerationRequest, tenant: str) -> Prompt:
        """Return what is sent for a request."""
        planner = self._planner
        if planner is None or not request.blocks:
            return self._as_retrieved(request)
        context = ContextRequest(
            request.blocks, request.query, system=request.system, tenant=tenant
        )
        return self._planning.attempt(
            lambda: planner.plan(context), lambda: self._as_retrieved(request)
        )

    def _as_retrieved(self, request: GenerationRequest) -> Prompt:
        parts = [
            SentBlock(self._templates.block_label(number), block)
            for number, block in enumerate(request.blocks, start=1)
        ]
        content = render_turn(parts, None, request.query, self._templates)
        return render_messages(request.system, None, content)


class GenerationAnswer:
    """An answer that comes whether or not anybody reads it yet.

    Args:
        request: What was asked.
        stream: The pieces; closed when they end or the answer is cancelled.

    Attributes:
        request: What was asked.
        tokens: Tokens that have come.
    """

    def __init__(self, request: GenerationRequest, stream: AsyncGenerator[Piece, None]) -> None:
        self.request = request
        self.tokens = 0
        self._pieces: list[Piece] = []
        self._news = asyncio.Event()
        self._reading = asyncio.ensure_future(self._read(stream))
        self._reading.add_done_callback(self._note_end)

    @property
    def has_ended(self) -> bool:
        """Whether nothing more comes."""
        return self._reading.done()

    @property
    def has_failed(self) -> bool:
        """Whether it ended before its time."""
        ended = self._reading
        return ended.done() and (ended.cancelled() or ended.exception() is not None)

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Yield all pieces, those first that have come already.

        Raises:
            Exception: What the model raised.
        """
        given = 0
        while True:
            while given < len(self._pieces):
                given += 1
                yield self._pieces[given - 1]
            if self._reading.done():
                if self._reading.cancelled():  # nobody reads an answer that was cancelled here
                    raise RuntimeError("the model's stream was cancelled from elsewhere")
                self._reading.result()
                return
            self._news.clear()
            await self._news.wait()

    async def cancel(self) -> None:
        """Close the stream, and wait until it is closed; whatever that raises is of no interest."""
        self._reading.cancel()
        await asyncio.wait([self._reading])

    def on_end(self, callback: Callable[[], object]) -> None:
        """Have something called once nothing more comes."""
        self._reading.add_done_callback(lambda _: callback())

    def _note_end(self, reading: asyncio.Task[None]) -> None:
        if not reading.cancelled():
            reading.exception()  # seen, even where nobody reads the answer to its end
        self._news.set()

    async def _read(self, stream: AsyncGenerator[Piece, None]) -> None:
        async with aclosing(stream):
            async for piece in stream:
                self._pieces.append(piece)
                self.tokens += piece.tokens
                self._news.set()


class Generations:
    """The generations of an engine. For one event loop.

    Args:
        llm: The model that is asked where a generation names none.
        prompts: Puts requests into words.

    Attributes:
        started: How many were started.
    """

    def __init__(self, llm: LanguageModel | None, prompts: Prompts) -> None:
        self.started = 0
        self._llm = llm
        self._prompts = prompts
        self._under_way: set[GenerationAnswer] = set()

    def __len__(self) -> int:
        """Return how many are under way."""
        return len(self._under_way)

    def begin(self, request: GenerationRequest, tenant: str) -> GenerationAnswer:
        """Ask the model."""
        llm = self._llm if request.llm is None else request.llm
        assert llm is not None, "the engine has checked that there is one"
        stream = llm.stream(self._prompts.prompt(request, tenant), request.params)
        answer = GenerationAnswer(request, stream)
        self.started += 1
        self._under_way.add(answer)
        answer.on_end(lambda: self._under_way.discard(answer))
        return answer
