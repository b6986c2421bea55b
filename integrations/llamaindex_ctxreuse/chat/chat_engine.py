"""A chat engine whose prompts only grow."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.llms.generic_utils import messages_to_history_str
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
)
from llama_index.core.callbacks import CallbackManager, trace_method
from llama_index.core.chat_engine.condense_plus_context import DEFAULT_CONDENSE_PROMPT_TEMPLATE
from llama_index.core.chat_engine.types import (
    AgentChatResponse,
    BaseChatEngine,
    StreamingAgentChatResponse,
)
from llama_index.core.llms.llm import LLM
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts import BasePromptTemplate, PromptTemplate
from llama_index.core.schema import MetadataMode, QueryBundle
from llama_index.core.settings import Settings
from llama_index.core.tools import ToolOutput
from llama_index.core.types import Thread

from ctxreuse.context.checks import checked_each, checked_kind
from ctxreuse.context.copies import FixedSettings
from ctxreuse.context.fork_safety import ForkSafeLock
from ctxreuse.context.thoughts import without_thoughts
from ctxreuse.errors import InvalidRequestError
from ctxreuse.pipeline.engine_options import planner_for
from ctxreuse.pipeline.ordered_release import run_here
from ctxreuse.planner import ReusePlanner
from llamaindex_ctxreuse.chat.chat_turn import ChatTurn, ChatTurnPlanner, Transcript
from llamaindex_ctxreuse.nodes.node_plans import checked_retriever


class ReuseChatEngine(FixedSettings, BaseChatEngine):
    """Answers questions from retrieved nodes, with prompts that the prefix cache serves.

    The system prompt comes first, then the conversation as it was sent, each question with its
    context, then this turn's blocks, annotations and question. Blocks that the conversation shows
    already are only pointed to. When the prompt outgrows the model's `metadata.context_window`, the
    oldest turns are dropped, down to half of it at once.

    One engine is one conversation; its turns come one after the other. A planning fault sends the
    nodes' texts as retrieved, without labels. `ctxreuse.request_context` says the tenant.

    Args:
        retriever: Finds the context of a question.
        llm: Answers. Of `OpenAILike` set `context_window`: its default is 3,900 tokens.
        planner: Plans the contexts; None takes the one that this process has for the engine.
        system_prompt: The text before everything else.
        node_postprocessors: Applied to what was retrieved, in order.
        skip_condense: False has the model rewrite a follow-up question into one that stands alone.
        condense_prompt: The prompt for that call, with `{chat_history}` and `{question}`.
        chat_history: Earlier messages of the conversation.
        metadata_mode: Which metadata is part of a node's text.
        token_counter: Counts what has to fit into the window: a function from text to tokens, a
            tokenizer, or None for an estimate, which also stands in for one that fails.
        callback_manager: Where events go.
    """

    callback_manager: CallbackManager

    def __init__(
        self,
        retriever: BaseRetriever,
        llm: LLM,
        *,
        planner: ReusePlanner | None = None,
        system_prompt: str | None = None,
        node_postprocessors: Sequence[BaseNodePostprocessor] = (),
        skip_condense: bool = True,
        condense_prompt: str | BasePromptTemplate = DEFAULT_CONDENSE_PROMPT_TEMPLATE,
        chat_history: Sequence[ChatMessage] = (),
        metadata_mode: MetadataMode = MetadataMode.LLM,
        token_counter: Any = None,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        self._retriever = checked_retriever(retriever)
        self._llm = checked_kind("llm", llm, LLM, "a LlamaIndex LLM; pass OpenAILike(...)")
        self._system_prompt = system_prompt
        kind: Any = BaseNodePostprocessor
        self._postprocessors = checked_each(
            "node_postprocessors", node_postprocessors or (), kind, "a LlamaIndex postprocessor"
        )
        self._skip_condense = skip_condense
        if isinstance(condense_prompt, str):
            condense_prompt = PromptTemplate(condense_prompt)
        self._condense_prompt = condense_prompt
        self._planner = planner_for(planner, model=llm)
        self._turns = ChatTurnPlanner(
            self._planner, system_prompt, metadata_mode, token_counter, type(self).__name__
        )
        self._transcript = Transcript().recalled(chat_history)
        self._lock = ForkSafeLock()
        self.callback_manager = callback_manager or CallbackManager([])
        if callback_manager is not None:
            for postprocessor in self._postprocessors:
                postprocessor.callback_manager = callback_manager  # as LlamaIndex's engines do

    @classmethod
    def from_defaults(
        cls, retriever: BaseRetriever, llm: LLM | None = None, **options: Any
    ) -> ReuseChatEngine:
        """Return an engine with the model and the callbacks of LlamaIndex's Settings.

        Arguments as for the class; no `memory`, since the engine keeps the conversation itself.
        """
        if "memory" in options:
            raise InvalidRequestError(
                f"{cls.__name__} keeps the conversation itself, as it was sent; leave memory out, "
                "and hand in an earlier conversation as chat_history"
            )
        options.setdefault("callback_manager", Settings.callback_manager)
        return cls(retriever, Settings.llm if llm is None else llm, **options)

    @property
    def chat_history(self) -> list[ChatMessage]:
        """The conversation as it was sent, without the system prompt; it can be replayed."""
        return self._transcript.sent()

    @property
    def said(self) -> list[ChatMessage]:
        """The conversation as the user knows it: questions and answers."""
        return self._transcript.said()

    @property
    def planner(self) -> ReusePlanner:
        """Plans the contexts; another one needs another engine."""
        return self._planner

    @property
    def faults(self) -> int:
        """How often planning has failed and nodes went through as retrieved, or counting has."""
        return self._turns.faults

    def reset(self) -> None:
        """Forget the conversation."""
        with self._lock:
            self._transcript = Transcript()

    @trace_method("chat")
    def chat(
        self, message: str | QueryBundle, chat_history: list[ChatMessage] | None = None
    ) -> AgentChatResponse:
        """Return the answer to a question.

        Args:
            message: The question; a `QueryBundle` says what to retrieve for it, too.
            chat_history: The conversation so far; None continues this engine's.
        """
        turn = run_here(self._turn(message, chat_history, blocks=True))
        with self._taking_back(turn):
            answer = self._llm.chat(self._prompt(turn)).message.content or ""
        return self._response(turn, answer)

    @trace_method("chat")
    async def achat(
        self, message: str | QueryBundle, chat_history: list[ChatMessage] | None = None
    ) -> AgentChatResponse:
        """`chat`, awaited."""
        turn = await self._turn(message, chat_history)
        with self._taking_back(turn):
            answer = (await self._llm.achat(self._prompt(turn))).message.content or ""
        return self._response(turn, answer)

    @trace_method("chat")
    def stream_chat(
        self, message: str | QueryBundle, chat_history: list[ChatMessage] | None = None
    ) -> StreamingAgentChatResponse:
        """Return the answer as it comes; the turn is part of the conversation in the end."""
        turn = run_here(self._turn(message, chat_history, blocks=True))
        with self._taking_back(turn):
            pieces = self._llm.stream_chat(self._prompt(turn))
        stream = self._recorded_stream(turn, pieces)
        response = StreamingAgentChatResponse(chat_stream=stream, **_retrieved(turn))
        thread = Thread(target=response.write_response_to_history, args=(_NoMemory(),))
        response.write_response_to_history_thread = thread
        thread.start()
        return response

    @trace_method("chat")
    async def astream_chat(
        self, message: str | QueryBundle, chat_history: list[ChatMessage] | None = None
    ) -> StreamingAgentChatResponse:
        """`stream_chat`, awaited."""
        turn = await self._turn(message, chat_history)
        with self._taking_back(turn):
            pieces = await self._llm.astream_chat(self._prompt(turn))
        stream = self._arecorded_stream(turn, pieces)
        response = StreamingAgentChatResponse(achat_stream=stream, **_retrieved(turn))
        memory: Any = _NoMemory()
        response.awrite_response_to_history_task = asyncio.create_task(
            response.awrite_response_to_history(memory)
        )
        return response

    async def _turn(
        self,
        message: str | QueryBundle,
        chat_history: list[ChatMessage] | None,
        *,
        blocks: bool = False,
    ) -> ChatTurn:
        """Return the next turn; if it blocks, nothing is awaited."""
        checked_kind("message", message, (str, QueryBundle), "a text or a QueryBundle")
        query = searched = QueryBundle(message) if isinstance(message, str) else message
        llm, retriever = self._llm, self._retriever
        begun, condensing = self._begin(query.query_str, chat_history)
        if condensing is not None:
            said = llm.complete(condensing) if blocks else await llm.acomplete(condensing)
            searched = QueryBundle(without_thoughts(said.text) or query.query_str)
        nodes = retriever.retrieve(searched) if blocks else await retriever.aretrieve(searched)
        for one in self._postprocessors:
            if blocks:
                nodes = one.postprocess_nodes(nodes, searched)
            else:
                nodes = await one.apostprocess_nodes(nodes, searched)
        return self._turns.turn(query.query_str, nodes, begun, llm.metadata)

    def _begin(
        self, message: str, chat_history: list[ChatMessage] | None
    ) -> tuple[Transcript, str | None]:
        """Return the transcript, and the prompt that condenses the question if there is one."""
        with self._lock:
            if chat_history is not None:
                self._transcript = self._transcript.recalled(chat_history)
            begun = self._transcript
        if self._skip_condense or not len(begun):
            return begun, None
        history = messages_to_history_str(begun.said())
        return begun, self._condense_prompt.format(chat_history=history, question=message)

    @contextmanager
    def _taking_back(self, turn: ChatTurn) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._turns.forget(turn)
            raise

    def _prompt(self, turn: ChatTurn) -> list[ChatMessage]:
        system = []
        if self._system_prompt is not None:
            role = self._llm.metadata.system_role
            system = [ChatMessage(role=role, content=self._system_prompt)]
        return [*system, *turn.history.sent(), ChatMessage(role="user", content=turn.content)]

    def _record(self, turn: ChatTurn, answer: str) -> None:
        with self._lock:
            # if another turn was recorded meanwhile, this one follows it
            goes_on = self._transcript is turn.begun
            history = turn.history if goes_on else self._transcript
            self._transcript = history.with_turn(turn.question, turn.content, answer)

    def _response(self, turn: ChatTurn, answer: str) -> AgentChatResponse:
        self._record(turn, answer)
        return AgentChatResponse(response=answer, **_retrieved(turn))

    def _recorded_stream(self, turn: ChatTurn, pieces: ChatResponseGen) -> ChatResponseGen:
        answer: list[str] = []
        with self._taking_back(turn):
            for piece in pieces:
                _add_piece(answer, piece)
                yield piece
        self._record(turn, "".join(answer))

    async def _arecorded_stream(
        self, turn: ChatTurn, pieces: ChatResponseAsyncGen
    ) -> ChatResponseAsyncGen:
        answer: list[str] = []
        with self._taking_back(turn):
            async for piece in pieces:
                _add_piece(answer, piece)
                yield piece
        self._record(turn, "".join(answer))


def _add_piece(answer: list[str], piece: ChatResponse) -> None:
    if piece.delta is not None:
        answer.append(piece.delta)
    elif piece.message.content:  # the whole answer so far
        answer[:] = [piece.message.content]


class _NoMemory:
    """Replaces a memory, because the engine keeps the conversation itself, as it was sent."""

    def put(self, message: ChatMessage) -> None:
        pass

    async def aput(self, message: ChatMessage) -> None:
        pass


def _retrieved(turn: ChatTurn) -> dict[str, Any]:
    output = ToolOutput(
        tool_name="retriever",
        content=str(turn.nodes),
        raw_input={"message": turn.question},
        raw_output=turn.nodes,
    )
    return {"sources": [output], "source_nodes": turn.nodes}
