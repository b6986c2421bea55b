"""Chain-of-Agents as a LangChain Runnable."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from anyio import CancelScope
from langchain_core.callbacks import AsyncCallbackManagerForChainRun
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import ensure_config, get_config_list

from chain_of_agents.agent_memory import Histories
from chain_of_agents.agent_placement import AgentPlacement, Assigner
from chain_of_agents.answer import Answer
from chain_of_agents.callbacks import LangChainObserver
from chain_of_agents.inputs import conversation_name, question_of
from chain_of_agents.models.choose_model import as_model
from chain_of_agents.one_task import in_one_task
from chain_of_agents.prompts import DEFAULT_PROMPTS, ChainPrompts
from chain_of_agents.question import Mode, Settings
from chain_of_agents.run import ChainRun
from chain_of_agents.segments import Packing
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.planner import ReusePlanner
from ctxreuse.serving.aio import sync_bridge
from ctxreuse.serving.aio.closing import AsyncClosing
from ctxreuse.serving.aio.gather import all_of
from ctxreuse.serving.dispatch import Progress
from ctxreuse.serving.pool.placement import DEFAULT_BOUND, DocumentAffinity, checked_bound

_Result = TypeVar("_Result")


class ChainOfAgents(Runnable[dict[str, Any], Answer], AsyncClosing):
    """Answers questions about more than one prompt holds: workers read, a manager answers.

    Each document goes to the agent that has read it before, and so to the engine that has it in its
    prefix cache; prompts begin with what repeats. Where many questions are asked at a time, as in
    `batch`, calls that wait for an engine are planned together, so that those that read the same
    run back to back (Chain-of-Agents, Zhang et al., 2024; ContextPilot section 7.2).

    In a conversation, what an agent has been shown is not sent to it again but pointed to, and its
    own history is replayed as it was sent.

    The input is a dict with `question` and `documents` (best first: strings, `ContextBlock`s,
    LangChain documents, LlamaIndex nodes, or dicts with `text` and `id`), and perhaps
    `conversation_id` and `tenant`; `config={"configurable": {"thread_id": ..., "tenant": ...}}` and
    `ctxreuse.request_context` name these, too. The output is the answer, a string with a `trace`.

    Args:
        llm: A LangChain chat model, a LlamaIndex LLM, an OpenAI-compatible address or several, or
            an `EnginePool`. One address is enough where a router stands before the engines: each
            agent's calls carry a session id, `X-Session-ID`.
        workers: How many agents there are to read.
        planner: Plans the prompts; for several engines its settings are taken for each. None makes
            one without order annotations.
        mode: "sequential": each worker reads its segment and the note of the one before, and the
            manager reads the last note. "parallel": all read at the same time, and the manager
            reads all notes.
        packing: "single": one document a call. "packed": as many as an agent has. "auto": one
            where there are no more documents than workers. In a conversation an agent's documents
            are always packed, for its history goes on with one call a question.
        prompts: The words around everything.
        note_tokens: The longest note of a worker. Addresses are sent it as `max_tokens`; a model
            object has its own settings, and longer notes are cut.
        answer_tokens: The longest answer of the manager, as for `note_tokens`.
        segment_tokens: The longest segment; None takes what the model has room for.
        context_window: What the model holds; None asks it, and takes 8,192 if it does not say.
        timeout_s: Seconds after which a call that was sent has failed; None waits.
        bound: How far above the mean an agent's load may be; 1.15 is 15 % above.
        assignment: Makes another way to assign documents, one for each tenant; None takes
            `ctxreuse.serving.pool.placement.DocumentAffinity` with the bound.
        concurrency: Calls under way at an engine; more wait, to be planned together.
        params: For addresses: what each call sends besides, such as `temperature`.
        clock: Seconds from any start.
        **client: For addresses: further arguments of `EnginePool`, such as `model`, `api_key` and
            `http_client`.

    Raises:
        InvalidRequestError: If an argument is of the wrong kind.
        MissingExtraError: If addresses are given and `openai` is not installed.

    Example:
        >>> from langchain_core.language_models import FakeListChatModel
        >>> llm = FakeListChatModel(responses=["[Doc_1]: in France.", "Nothing.", "In France."])
        >>> chain = ChainOfAgents(llm=llm, workers=2, mode="sequential")
        >>> documents = ["Paris is in France.", "Rome is in Italy."]
        >>> answer = chain.invoke({"question": "Where is Paris?", "documents": documents})
        >>> print(answer)
        In France.
        >>> [step.note for step in answer.trace.workers]
        ['[Doc_1]: in France.', 'Nothing.']
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
        bound: float = DEFAULT_BOUND,
        assignment: Callable[[], Assigner] | None = None,
        concurrency: int = 256,
        params: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        **client: Any,
    ) -> None:
        if planner is None:
            planner = ReusePlanner(annotate=False)
        if not isinstance(planner, ReusePlanner):
            raise InvalidRequestError(f"planner must be a ReusePlanner, not {describe(planner)}")
        if assignment is not None and not callable(assignment):
            raise InvalidRequestError(
                f"assignment must be a function that makes what assigns documents, not "
                f"{describe(assignment)}"
            )
        if params is not None and not isinstance(params, Mapping):
            raise InvalidRequestError(f"params must be a dict, not {describe(params)}")
        self._settings = Settings(
            workers=workers,
            mode=mode,
            packing=packing,
            prompts=prompts,
            note_tokens=note_tokens,
            answer_tokens=answer_tokens,
            segment_tokens=segment_tokens,
            context_window=context_window,
            is_counted=planner.counts_tokens,
            timeout_s=timeout_s,
            clock=clock,
        )
        self._planner = planner
        self._model = as_model(llm, planner, concurrency, params or {}, client)
        self._desk = AgentPlacement(
            workers, self._model, assignment or partial(DocumentAffinity, checked_bound(bound))
        )
        self._histories = Histories()

    @property
    def OutputType(self) -> Any:  # noqa: N802  # the base class names it so
        """What comes out, for schemas: a string."""
        return str

    def invoke(
        self,
        input: dict[str, Any],  # noqa: A002  # the base class names it so
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> Answer:
        """Answer a question.

        Args:
            input: `question` and `documents`, and perhaps `conversation_id` and `tenant`.
            config: LangChain's.
            **kwargs: None are known.

        Returns:
            The manager's answer, with its trace.

        Raises:
            InvalidRequestError: If the input is of the wrong kind, or the model's context has no
                room for the question.
            ManagerError: If the manager does not answer; its trace has the notes.
        """
        config = ensure_config(config)
        work = partial(self.ainvoke, input, config, **kwargs)
        return sync_bridge.run(self._then_disconnect(work), lasting=self._model.keeps_connections)

    async def ainvoke(
        self,
        input: dict[str, Any],  # noqa: A002  # the base class names it so
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> Answer:
        """Answer a question, as `invoke` does."""
        return await self._acall_with_config(self._answer, input, config, **kwargs)

    def batch(
        self,
        inputs: list[dict[str, Any]],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        progress: Progress | None = None,
        **kwargs: Any,
    ) -> list[Answer]:
        """Answer questions together; the answers come in the order of the questions.

        Args:
            inputs: As for `invoke`.
            config: LangChain's, one or one for each; `max_concurrency` bounds the questions under
                way, and so how many calls can be planned together.
            return_exceptions: Whether an error takes the place of its answer; else the first one
                ends the batch, and what is still under way is cancelled.
            progress: Called whenever a question has ended; `ctxreuse.serving.progress_bar()` makes
                one.
            **kwargs: None are known.
        """
        configs = get_config_list(config, len(inputs))
        work = partial(
            self.abatch,
            inputs,
            configs,
            return_exceptions=return_exceptions,
            progress=progress,
            **kwargs,
        )
        return sync_bridge.run(self._then_disconnect(work), lasting=self._model.keeps_connections)

    async def abatch(
        self,
        inputs: list[dict[str, Any]],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        progress: Progress | None = None,
        **kwargs: Any,
    ) -> list[Answer]:
        """Answer questions together, as `batch` does."""
        configs = get_config_list(config, len(inputs))
        limit = configs[0].get("max_concurrency") if configs else None
        places = asyncio.Semaphore(limit or max(1, len(inputs)))
        ended = 0

        async def answer(question: dict[str, Any], config: RunnableConfig) -> Answer:
            nonlocal ended
            async with places:
                try:
                    return await self.ainvoke(question, config, **kwargs)
                except Exception as error:
                    if not return_exceptions:
                        raise
                    return error  # type: ignore[return-value]  # as LangChain does
                finally:
                    ended += 1
                    if progress is not None:
                        progress(ended, len(inputs))

        jobs = zip(inputs, configs, strict=True)
        return await all_of(answer(question, one) for question, one in jobs)

    def stream(
        self,
        input: dict[str, Any],  # noqa: A002  # the base class names it so
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> Iterator[Answer]:
        """Yield the pieces of the manager's answer; the last one is empty and has the trace.

        Args:
            input: As for `invoke`.
            config: LangChain's.
            **kwargs: None are known.
        """
        config = ensure_config(config)

        async def pieces() -> AsyncIterator[Answer]:
            try:
                async for piece in self.astream(input, config, **kwargs):
                    yield piece
            finally:
                with CancelScope(shield=True):  # connections are closed even if it is cancelled
                    await self._model.disconnect()

        yield from sync_bridge.iterate(pieces, lasting=self._model.keeps_connections)

    async def astream(
        self,
        input: dict[str, Any],  # noqa: A002  # the base class names it so
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[Answer]:
        """Yield the pieces of the manager's answer, as `stream` does."""

        async def inputs() -> AsyncIterator[dict[str, Any]]:
            yield input

        pieces: Any = self._atransform_stream_with_config(inputs(), self._pieces, config, **kwargs)
        async with aclosing(pieces):
            async for piece in pieces:
                yield piece

    def end_conversation(self, conversation_id: str | int, tenant: str = "") -> bool:
        """Forget what the agents have said in a conversation; return whether it was known."""
        name = conversation_name(conversation_id)
        return self._histories.forget((str(tenant), type(name), name))

    async def aclose(self) -> None:
        """Close the connections to engines that were given as addresses."""
        await self._model.aclose()

    async def _answer(
        self,
        input: dict[str, Any],  # noqa: A002
        run_manager: AsyncCallbackManagerForChainRun,
        config: RunnableConfig,
    ) -> Answer:
        run = self._run(input, run_manager, config)
        return Answer(await run.answer(), run.trace)

    async def _pieces(
        self,
        inputs: AsyncIterator[dict[str, Any]],
        run_manager: AsyncCallbackManagerForChainRun,
        config: RunnableConfig,
    ) -> AsyncIterator[Answer]:
        async for question in inputs:
            pieces = in_one_task(_streamed(self._run(question, run_manager, config)))
            async with aclosing(pieces):
                async for piece in pieces:
                    yield piece

    def _run(
        self,
        input: object,  # noqa: A002
        run_manager: AsyncCallbackManagerForChainRun,
        config: RunnableConfig,
    ) -> ChainRun:
        return ChainRun(
            question_of(input, config),
            self._settings,
            self._model,
            self._planner,
            self._desk,
            self._histories,
            LangChainObserver(run_manager, config),
        )

    def _then_disconnect(
        self, work: Callable[[], Coroutine[Any, Any, _Result]]
    ) -> Callable[[], Coroutine[Any, Any, _Result]]:
        """Return work that closes the connections of the event loop that it was run in."""

        async def both() -> _Result:
            try:
                return await work()
            finally:
                with CancelScope(shield=True):  # connections are closed even if it is cancelled
                    await self._model.disconnect()

        return both


async def _streamed(run: ChainRun) -> AsyncGenerator[Answer]:
    pieces = run.stream()
    async with aclosing(pieces):
        async for piece in pieces:
            yield Answer(piece, run.trace)
    yield Answer("", run.trace)
