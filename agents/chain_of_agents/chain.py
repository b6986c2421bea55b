"""Chain-of-Agents as a LangChain Runnable."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from functools import partial
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForChainRun
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import get_config_list

from chain_of_agents.agent_memory import AgentMemory, ConversationKey
from chain_of_agents.agent_placement import AgentPlacement, Assigner, InOrder
from chain_of_agents.chain_prompts import DEFAULT_PROMPTS, ChainPrompts
from chain_of_agents.models import as_model
from chain_of_agents.requests import Mode, Settings, conversation_name, question_of
from chain_of_agents.run import ChainRun
from chain_of_agents.segments import Packing
from chain_of_agents.trace.answer import Answer
from ctxreuse.context.checks import check_function, checked_kind, checked_number
from ctxreuse.context.copies import FixedSettings
from ctxreuse.context.lru_map import PartSize
from ctxreuse.planner import ReusePlanner
from ctxreuse.serving.aio.concurrency import AsyncClosing, end_tasks
from ctxreuse.serving.aio.runnable_bridge import RunnableBridge
from ctxreuse.serving.pool.placement import DEFAULT_BOUND, DocumentAffinity


class ChainOfAgents(
    FixedSettings,
    RunnableBridge[dict[str, Any], Answer, RunnableConfig],
    Runnable[dict[str, Any], Answer],
    AsyncClosing,
):
    """Answers questions about more documents than one prompt holds.

    Workers read the documents, and a manager answers from their notes. A document goes to the
    agent, and so to the engine, that has read it before; calls that wait for an engine are planned
    together (Chain-of-Agents, Zhang et al., 2024; ContextPilot section 7.2). In a conversation,
    prompts point to what their agent has been shown, and replay its history as it was sent.

    The input is a dict with `question` and `documents` (best first: strings, `ContextBlock`s,
    LangChain documents, LlamaIndex nodes, or dicts with `text` and `id`), and perhaps
    `conversation_id` and `tenant`; LangChain's `configurable` (`thread_id`, `tenant`) and
    `ctxreuse.request_context` name these, too. The output is an `Answer`; the last piece of a
    stream is empty and has the trace. What was not read is logged, and stands in `trace.unread`; a
    segment that the model refuses as too long is read in parts.

    Args:
        llm: A LangChain chat model, a LlamaIndex LLM, an OpenAI-compatible address (of a router,
            too: each agent has an `X-Session-ID`) or several, or an `EnginePool`.
        workers: The number of agents that read.
        planner: Plans the prompts; each of several engines gets a planner with its settings. None
            makes one without order annotations.
        mode: "sequential": each worker reads the note of the one before, and the manager the last.
            "parallel": all read at the same time, and the manager reads all notes.
        packing: "single": one document a call. "packed": all that an agent has, as in conversations
            always. "auto": as many short documents (256 tokens) as the model has room for; of
            long ones, one where there are no more calls than workers.
        prompts: The texts around documents, notes and questions.
        note_tokens: The longest note of a worker, sent to engines as `max_tokens`; longer ones are
            cut.
        answer_tokens: The longest answer of the manager, as for `note_tokens`.
        segment_tokens: The longest segment; None takes what the model has room for.
        context_window: The model's, in tokens; None asks the model, and takes 8,192 if it is
            silent.
        timeout_s: Seconds after which a call that was sent has failed; None waits.
        min_read: Share of the documents' tokens, 0 to 1, that must have been read for an answer.
        bound: How far above the mean an agent's load may be; 1.15 is 15 % above.
        assignment: Makes another assigner of documents for each tenant; None takes
            `ctxreuse.serving.pool.placement.DocumentAffinity` with the bound; in shadow mode, the
            order given.
        concurrency: Calls that run at a time on an engine; more wait and are planned together.
        params: For addresses: further parameters of each call, such as `temperature`.
        **client: For addresses: further arguments of `EnginePool`, such as `model` and `api_key`.

    Raises:
        UnknownArgumentError: an unknown argument.
        MissingExtraError: Addresses are given and `openai` is not installed.
        InvalidRequestError: From calls: no documents, or no room in the model for the question.
        UnreadError: From calls: less than `min_read` of the documents was read.
        ManagerError: From calls: the manager does not answer.
    """

    def __init__(
        self,
        llm: Any,
        workers: int = 15,
        planner: ReusePlanner | None = None,
        mode: Mode = "sequential",
        *,
        packing: Packing = "auto",
        prompts: ChainPrompts = DEFAULT_PROMPTS,
        note_tokens: int = 256,
        answer_tokens: int = 512,
        segment_tokens: int | None = None,
        context_window: int | None = None,
        timeout_s: float | None = 300.0,
        min_read: float = 0.5,
        bound: float = DEFAULT_BOUND,
        assignment: Callable[[], Assigner] | None = None,
        concurrency: int = 256,
        params: Mapping[str, Any] | None = None,
        **client: Any,
    ) -> None:
        planner = ReusePlanner(annotate=False) if planner is None else planner
        checked_kind("planner", planner, ReusePlanner, "a ReusePlanner")
        checked_kind("params", {} if params is None else params, Mapping, "a dict")
        words = "a function that makes what assigns documents, or None"
        check_function("assignment", assignment, words)
        settings = Settings(
            workers=workers,
            mode=mode,
            packing=packing,
            prompts=prompts,
            note_tokens=note_tokens,
            answer_tokens=answer_tokens,
            segment_tokens=segment_tokens,
            context_window=context_window,
            timeout_s=timeout_s,
            min_read=min_read,
        )
        self._model = as_model(llm, planner, concurrency, params or {}, client, ChainOfAgents)
        if assignment is None:
            affinity = partial(DocumentAffinity, checked_number("the bound", bound, 1))
            assignment = InOrder if planner.mode == "shadow" else affinity
        placement = AgentPlacement(workers, self._model.engines, assignment)
        self._memory, self._placement = AgentMemory(), placement
        self._new_run = partial(ChainRun, settings, self._model, planner, placement, self._memory)
        self._shares_event_loop = self._model.keeps_connections

    @property
    def OutputType(self) -> Any:  # noqa: N802  # the base class names it so
        """The output's type, for schemas: a string."""
        return str

    @property
    def parts(self) -> dict[str, PartSize]:
        """How much is remembered of conversations and of who has read what, and may be."""
        return self._memory.parts | self._placement.parts

    def end_conversation(self, conversation_id: str | int, tenant: str = "") -> bool:
        """Forget the agents' memory of a conversation; return whether it was known."""
        key = ConversationKey(str(tenant), conversation_name(conversation_id))
        return self._memory.forget(key)

    async def aclose(self) -> None:
        """Close the connections to engines that were given as addresses."""
        await self._model.aclose()

    def _configs(
        self, config: RunnableConfig | list[RunnableConfig] | None, count: int
    ) -> list[RunnableConfig]:
        return get_config_list(config, count)

    async def _disconnect(self) -> None:
        await self._model.engines.disconnect()

    async def _answer(
        self,
        input: dict[str, Any],  # noqa: A002
        run_manager: AsyncCallbackManagerForChainRun,
        config: RunnableConfig,
    ) -> Answer:
        run = self._new_run(question_of(input, config), run_manager, config)
        return Answer(await run.answer(), run.trace)

    async def _pieces(
        self,
        input: dict[str, Any],  # noqa: A002
        run_manager: AsyncCallbackManagerForChainRun,
        config: RunnableConfig,
    ) -> AsyncGenerator[Answer, None]:
        """Yield what a task of its own answers: timeouts bind to the task that they begin in."""
        run = self._new_run(question_of(input, config), run_manager, config)
        queue: asyncio.Queue[Answer | None] = asyncio.Queue()
        answering = asyncio.create_task(
            run.answer(lambda piece: queue.put_nowait(Answer(piece, run.trace)))
        )
        answering.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            while (piece := await queue.get()) is not None:
                if piece:  # a thought tells nothing
                    yield piece
            await answering
        finally:
            await end_tasks(answering)
        yield Answer("", run.trace)
