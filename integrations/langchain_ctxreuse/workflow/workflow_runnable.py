"""A workflow engine's LangChain components: a retriever, an early answer, a graph as a Runnable."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from functools import partial, reduce
from operator import add
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForChainRun
from langchain_core.documents import Document
from langchain_core.prompts import BasePromptTemplate
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import get_config_list, patch_config
from langchain_core.runnables.utils import AddableDict
from pydantic import ConfigDict, Field, field_validator

from ctxreuse.context.checks import checked_kind, checked_list
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.serving.aio import sync_bridge
from ctxreuse.serving.aio.runnable_bridge import Input, Output, RunnableBridge
from ctxreuse.workflow.engine import WorkflowEngine
from ctxreuse.workflow.errors import GraphError, quoted
from ctxreuse.workflow.graph.builder import WorkflowGraph, compiled_graph
from ctxreuse.workflow.graph.compiled import Graph
from ctxreuse.workflow.graph.nodes import END, Generation
from ctxreuse.workflow.library import speculative_rag_graph
from ctxreuse.workflow.models.language_model import Piece
from ctxreuse.workflow.runtime.events import (
    DocumentsFound,
    Event,
    NodeFinished,
    NodeStarted,
    RunFinished,
    TextDelta,
)
from langchain_ctxreuse.scope import CarryingRetriever, scope_from_config
from langchain_ctxreuse.workflow.served_components import (
    DocumentOf,
    as_documents,
    checked_document_of,
    checked_model,
    streamed,
    with_documents,
)

_OPTIONS = ("graph", "deadline_s", "tenant", "session")
"""What `WorkflowEngine.stream` takes besides inputs."""


class EngineRunnable(RunnableBridge[Input, Output, RunnableConfig], Runnable[Input, Output]):
    """Runs on a workflow engine, for asynchronous and sync callers.

    `batch` gives all inputs to the engine at once, which runs as many at a time as it takes.
    """

    async def _answer(
        self,
        input: Input,  # noqa: A002
        run_manager: AsyncCallbackManagerForChainRun,
        config: RunnableConfig,
    ) -> Output:
        async with aclosing(self._pieces(input, run_manager, config)) as parts:
            output: Output = reduce(add, [part async for part in parts])
        return output

    def _configs(
        self, config: RunnableConfig | list[RunnableConfig] | None, count: int
    ) -> list[RunnableConfig]:
        return get_config_list(config, count)


class WorkflowRunnable(EngineRunnable[Any, Any]):
    """Runs a workflow's graph; the input is its first input, or a dict with its inputs.

    Further keys of the dict are ignored, such as those of a LangGraph state.
    `config["configurable"]` and `ctxreuse.request_context` name tenant and conversation. Callbacks
    see each node as a run. `stream` gives the text of a generation that leads to END alone as it is
    written; else the answer comes in one piece.

    Args:
        engine: The engine.
        graph: The graph.
        outputs: The keys of the state that are returned, as a dict: what a LangGraph node needs.
            Documents are returned as LangChain's. None returns the answer alone.
        name: The run's name for callbacks; the graph's by default.
        deadline_s: Seconds after which a run fails.
        document_of: As for `WorkflowRetriever`.

    Raises:
        GraphError: the graph cannot be run or has no such key.
    """

    def __init__(
        self,
        engine: WorkflowEngine,
        graph: WorkflowGraph | Graph,
        *,
        outputs: Iterable[str] | None = None,
        name: str | None = None,
        deadline_s: float | None = None,
        document_of: DocumentOf | None = None,
    ) -> None:
        compiled = compiled_graph(graph)
        checked_document_of(document_of)
        self.name = compiled.name if name is None else name
        self._engine = checked_kind("engine", engine, WorkflowEngine, "a WorkflowEngine")
        if taken := [one for one in compiled.inputs if one in _OPTIONS]:
            raise GraphError(
                f"workflow {quoted([compiled.name])} has the input {quoted(taken)}, which the "
                "engine's stream() takes for itself; give it another name"
            )
        self._graph = compiled
        self._outputs = _checked_outputs(outputs, compiled)
        self._deadline_s = deadline_s
        self._document_of = document_of

    @property
    def OutputType(self) -> Any:  # noqa: N802  # the base class names it so
        """The type of the output, for schemas."""
        return Any if self._outputs is None else dict[str, Any]

    async def _pieces(
        self,
        input: Any,  # noqa: A002
        run_manager: AsyncCallbackManagerForChainRun,
        config: RunnableConfig,
    ) -> AsyncGenerator[Any, None]:
        answer = _StreamedAnswer(self._graph)
        async with aclosing(self._events(input, run_manager, config)) as events:
            async for event in events:
                if self._outputs is None and answer.is_written_by(event):
                    assert isinstance(event, TextDelta)
                    yield event.text
                elif isinstance(event, RunFinished) and not answer.is_written:
                    result, document_of = event.result, self._document_of
                    keys = [key for key in self._outputs or () if key in result.state]
                    if self._outputs is None:
                        yield with_documents(result.answer, document_of)
                    else:
                        yield {key: with_documents(result.state[key], document_of) for key in keys}

    async def _events(
        self, given: Any, run_manager: AsyncCallbackManagerForChainRun, config: RunnableConfig
    ) -> AsyncGenerator[Event, None]:
        """Run the graph; callbacks see each node as a chain's run inside that of the workflow."""
        inputs = (
            {key: given[key] for key in self._graph.inputs if key in given}
            if isinstance(given, Mapping)
            else {self._graph.inputs[0]: given}
        )
        scope = scope_from_config(config)
        about = {"tenant": scope.tenant, "session": scope.conversation_id, **inputs}
        runs: dict[str, AsyncCallbackManagerForChainRun] = {}
        events = self._engine.stream(self._graph, deadline_s=self._deadline_s, **about)
        try:
            async with aclosing(events):
                async for event in events:
                    if isinstance(event, NodeStarted):
                        runs[event.node] = await run_manager.get_child().on_chain_start(
                            None, {"visit": event.visit}, name=event.node
                        )
                    elif isinstance(event, NodeFinished):
                        output = self._graph.nodes[event.node].output
                        written = {output: with_documents(event.value)}
                        await runs.pop(event.node).on_chain_end(written)
                    yield event
        except BaseException as error:
            for run in runs.values():
                await run.on_chain_error(error)
            raise


class _StreamedAnswer:
    """Recognizes texts that are the answer for certain: the last node's, while no other runs."""

    def __init__(self, graph: Graph) -> None:
        self.is_written = False
        self._graph = graph
        self._running: set[str] = set()
        self._is_alone = False  # whether the wavefront has one node; all begin before any speaks

    def is_written_by(self, event: Event) -> bool:
        """Note an event; return whether it is a piece of the answer."""
        if isinstance(event, NodeStarted):
            self._is_alone = not self._running
            self._running.add(event.node)
        elif isinstance(event, NodeFinished):
            self._running.discard(event.node)
        elif isinstance(event, TextDelta):
            node, edges = self._graph.nodes[event.node], self._graph.edges[event.node]
            if (
                isinstance(node, Generation)
                and node.output == self._graph.answer
                and self._is_alone
                and not edges.routers
                and edges.static == (END,)
            ):
                self.is_written = True
                return True
        return False


def _checked_outputs(outputs: Iterable[str] | None, graph: Graph) -> tuple[str, ...] | None:
    if outputs is None:
        return None
    keys = checked_list("outputs", outputs, "a list of keys", error=GraphError)
    known = [*(node.output for node in graph.nodes.values()), *graph.inputs, *graph.defaults]
    for key in keys:
        if key not in known:
            raise GraphError(
                f"outputs has the key {describe(key)}, which nothing writes; "
                f"choose among {quoted(dict.fromkeys(known))}"
            )
    return tuple(keys)


class WorkflowRetriever(CarryingRetriever):
    """Retrieves with an engine that is shared by all requests, without a graph.

    Searches that run at the same time are embedded and scanned together. In a conversation
    (`thread_id` in `config["configurable"]`, or `ctxreuse.request_context`) a search begins where
    the last one found something. Results are those of a plain search. A document has the block's id
    and text, and in its metadata the "score" if there is one: the higher, the nearer.

    Args:
        engine: The engine; it may have no model.
        k: How many documents to find; `invoke(query, k=3)` overrides it.
        retriever: Which of the engine's retrievers to use; None uses the default one.
        document_of: From a block's id to the document to return a copy of; None makes one.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    engine: WorkflowEngine = Field(repr=False)
    k: int = Field(default=5, ge=1)
    retriever: str | None = None
    document_of: DocumentOf | None = Field(default=None, repr=False)

    _check_document_of = field_validator("document_of", mode="before")(checked_document_of)

    def batch(
        self,
        inputs: list[str],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        **options: Any,
    ) -> list[list[Document]]:
        """Return the documents for each query, in the order of the queries, all at once."""
        inputs = checked_list("inputs", inputs, "a list of queries")
        configs = get_config_list(config, len(inputs))
        return sync_bridge.run(partial(self.abatch, inputs, configs, **options), lasting=True)

    def _get_relevant_documents(
        self, query: str, *, run_manager: Any, **kwargs: Any
    ) -> list[Document]:
        work = partial(self._aget_relevant_documents, query, run_manager=run_manager, **kwargs)
        return sync_bridge.run(work, lasting=True)

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: Any, k: int | None = None
    ) -> list[Document]:
        scope = self._carried.scope
        found = await self.engine.retrieve(
            query,
            self.k if k is None else k,
            retriever=self.retriever,
            tenant=scope.tenant,
            session=scope.conversation_id,
        )
        return as_documents(found.documents, found.scores, self.document_of)


class SpeculativeRAGChain(EngineRunnable[Any, dict[str, Any]]):
    """Answers from what it retrieves, as `create_retrieval_chain` does, but begins earlier.

    The engine calls the model with the documents that the search has found so far. If the search
    ends with the same documents the answer counts, else the engine calls again: the output is
    always that of retrieving first. Callbacks see a wrong guess as a call that was cancelled.

    The input is a dict with the query (`input`) and the prompt's other variables, or the query
    alone; the output has the inputs, the documents (`context`), best first, and the `answer`. The
    prompt shows the documents as text, in the planned order.

    Args:
        retriever: A retriever over an engine.
        prompt: The prompt template; its variable `context` takes the documents.
        llm: A chat model, as it is or bound to arguments.
        name: The run's name for callbacks.
    """

    def __init__(
        self,
        *,
        retriever: WorkflowRetriever,
        prompt: BasePromptTemplate[Any],
        llm: Runnable[Any, Any],
        name: str | None = None,
    ) -> None:
        wanted = "a WorkflowRetriever; give the one that you have to an engine: WorkflowRetriever("
        wanted += "engine=WorkflowEngine(retriever=RetrieverStage(it)))"
        self._retriever = checked_kind("retriever", retriever, WorkflowRetriever, wanted)
        wanted = "a prompt template; pass ChatPromptTemplate.from_messages(...)"
        self._prompt = checked_kind("prompt", prompt, BasePromptTemplate, wanted)
        if "context" not in prompt.input_variables:
            raise InvalidRequestError(
                "the prompt has no variable 'context' for the documents, only "
                f"{', '.join(map(repr, prompt.input_variables)) or 'none'}; write {{context}} in it"
            )
        self.name = type(self).__name__ if name is None else name
        self._llm = checked_model(llm)
        self._needed = {"input", *prompt.input_variables} - {"context"}

    async def _pieces(
        self,
        input: Any,  # noqa: A002
        run_manager: AsyncCallbackManagerForChainRun,
        config: RunnableConfig,
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the inputs, the documents, and the answer piece by piece."""
        inputs = self._checked_inputs(input)
        yield AddableDict({key: one for key, one in inputs.items() if key != "answer"})
        source, query = self._retriever, inputs["input"]
        inside = patch_config(config, callbacks=run_manager.get_child())
        said = partial(self._said, inputs, inside)
        graph = speculative_rag_graph(self.get_name(), said, source.k, source.retriever)
        scope = scope_from_config(config)
        events = source.engine.stream(
            graph, query, tenant=scope.tenant, session=scope.conversation_id
        )
        callbacks = run_manager.get_child()
        search = await callbacks.on_retriever_start(None, query, name=source.get_name())
        found: list[Document] | None = None
        is_empty = True
        try:
            async with aclosing(events):
                async for event in events:
                    if isinstance(event, DocumentsFound):
                        found = as_documents(event.documents, event.scores, source.document_of)
                        await search.on_retriever_end(found)
                        yield AddableDict({"context": found})
                    elif isinstance(event, TextDelta):
                        is_empty = False
                        yield AddableDict({"answer": event.text})
        except BaseException as error:
            if found is None:
                await search.on_retriever_error(error)
            raise
        if is_empty:
            yield AddableDict({"answer": ""})

    async def _said(
        self, inputs: Mapping[str, Any], config: RunnableConfig, context: str
    ) -> AsyncGenerator[Piece, None]:
        """Put documents into the prompt, and yield what the model says to that."""
        filled = await self._prompt.aformat_prompt(**{**inputs, "context": context})
        async with aclosing(streamed(self._llm, filled, config, {})) as pieces:
            async for piece in pieces:
                yield piece

    def _checked_inputs(self, given: Any) -> dict[str, Any]:
        inputs = dict(given) if isinstance(given, Mapping) else {"input": given}
        if missing := sorted(self._needed - set(inputs)):
            raise InvalidRequestError(
                f"the input lacks {', '.join(map(repr, missing))}; pass a dict with "
                f"{', '.join(map(repr, sorted(self._needed)))}"
            )
        checked_kind("'input'", inputs["input"], str, "a string, for it is searched for")
        return inputs
