"""A workflow as a LangChain Runnable: in LCEL chains, and as a node of LangGraph."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import aclosing
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForChainRun
from langchain_core.runnables import RunnableConfig

from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.workflow.engine import WorkflowEngine
from ctxreuse.workflow.errors import GraphError, quoted
from ctxreuse.workflow.graph.builder import WorkflowGraph
from ctxreuse.workflow.graph.compiled import Graph
from ctxreuse.workflow.graph.nodes import END, Generation
from ctxreuse.workflow.runtime.events import (
    Event,
    NodeFinished,
    NodeStarted,
    RunFinished,
    TextDelta,
    WorkflowResult,
)
from langchain_ctxreuse.scope import scope_from_config
from langchain_ctxreuse.workflow.engine_runnable import EngineRunnable
from langchain_ctxreuse.workflow.langchain_documents import (
    DocumentOf,
    checked_document_of,
    with_documents,
)
from langchain_ctxreuse.workflow.node_callbacks import NodeRuns


class WorkflowRunnable(EngineRunnable[Any, Any]):
    """Runs a workflow's graph; the input is its first input, or a dict with its inputs.

    What else is in the dict is left alone, so that the whole state of a LangGraph graph can be
    passed. `config["configurable"]` and `ctxreuse.request_context` name tenant and conversation.
    Callbacks see each node as a run inside this one. `stream` gives the answer's text as it is
    written where that is certain to be the answer, which takes a generation that leads to END
    alone; else the answer comes in one piece.

    Args:
        engine: The engine.
        graph: The graph.
        outputs: The keys of the state that are returned, as a dict: what a LangGraph node needs.
            Documents are returned as LangChain's. None returns the answer alone.
        name: The run's name for callbacks; the graph's by default.
        deadline_s: Seconds after which a run fails.
        document_of: From a block's id to the document that it was made from; see
            `WorkflowRetriever`.

    Raises:
        GraphError: If the graph is none, cannot be run, or has no such key.
        InvalidRequestError: If the engine is none.
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
        compiled = graph.compile() if isinstance(graph, WorkflowGraph) else graph
        if not isinstance(compiled, Graph):
            raise GraphError(f"graph must be a WorkflowGraph, not {describe(graph)}")
        checked_document_of(document_of)
        self.name = compiled.name if name is None else name
        self._engine = checked_engine(engine)
        self._graph = _checked_inputs(compiled)
        self._outputs = _checked_outputs(outputs, compiled)
        self._deadline_s = deadline_s
        self._document_of = document_of

    @property
    def InputType(self) -> Any:  # noqa: N802  # the base class names it so
        """What goes in, for schemas."""
        return Any

    @property
    def OutputType(self) -> Any:  # noqa: N802  # the base class names it so
        """What comes out, for schemas."""
        return Any if self._outputs is None else dict[str, Any]

    async def _answer(
        self,
        input: Any,  # noqa: A002
        run_manager: AsyncCallbackManagerForChainRun,
        config: RunnableConfig,
    ) -> Any:
        async with aclosing(self._events(input, run_manager, config)) as events:
            async for event in events:
                if isinstance(event, RunFinished):
                    return self._output(event.result)
        raise AssertionError("a run ends with its result, or raises")

    async def _pieces(
        self,
        inputs: AsyncIterator[Any],
        run_manager: AsyncCallbackManagerForChainRun,
        config: RunnableConfig,
    ) -> AsyncIterator[Any]:
        async for input in inputs:  # noqa: A001
            final = _Final(self._graph)
            async with aclosing(self._events(input, run_manager, config)) as events:
                async for event in events:
                    if self._outputs is None and final.is_written_by(event):
                        assert isinstance(event, TextDelta)
                        yield event.text
                    elif isinstance(event, RunFinished) and not final.is_written:
                        yield self._output(event.result)

    async def _events(
        self,
        given: Any,
        run_manager: AsyncCallbackManagerForChainRun,
        config: RunnableConfig,
    ) -> AsyncGenerator[Event, None]:
        """Run the graph, and tell callbacks of its nodes."""
        inputs = (
            {key: given[key] for key in self._graph.inputs if key in given}
            if isinstance(given, Mapping)
            else {self._graph.inputs[0]: given}
        )
        scope = scope_from_config(config)
        runs = NodeRuns(self._graph, run_manager)
        events = self._engine.stream(
            self._graph,
            deadline_s=self._deadline_s,
            tenant=scope.tenant,
            session=scope.conversation_id,
            **inputs,
        )
        async with runs.told(), aclosing(events):
            async for event in events:
                await runs.note(event)
                yield event

    def _output(self, result: WorkflowResult) -> Any:
        if self._outputs is None:
            return with_documents(result.answer, self._document_of)
        return {
            key: with_documents(result.state[key], self._document_of)
            for key in self._outputs
            if key in result.state
        }


def checked_engine(engine: object) -> WorkflowEngine:
    """Return the engine if it is one.

    Raises:
        InvalidRequestError: If it is none.
    """
    if not isinstance(engine, WorkflowEngine):
        raise InvalidRequestError(f"engine must be a WorkflowEngine, not {describe(engine)}")
    return engine


class _Final:
    """Tells which texts are the answer for certain: of the last node, where nothing runs beside."""

    def __init__(self, graph: Graph) -> None:
        self.is_written = False
        self._graph = graph
        self._running: set[str] = set()
        self._wavefront: set[str] = set()

    def is_written_by(self, event: Event) -> bool:
        """Take in what happens; return whether it is a piece of the answer."""
        if isinstance(event, NodeStarted):
            if not self._running:
                self._wavefront = set()
            self._running.add(event.node)
            self._wavefront.add(event.node)
        elif isinstance(event, NodeFinished):
            self._running.discard(event.node)
        elif isinstance(event, TextDelta):
            node, edges = self._graph.nodes[event.node], self._graph.edges[event.node]
            if (
                isinstance(node, Generation)
                and node.output == self._graph.answer
                and self._wavefront == {event.node}
                and not edges.routers
                and edges.static == (END,)
            ):
                self.is_written = True
                return True
        return False


def _checked_inputs(graph: Graph) -> Graph:
    taken = [key for key in graph.inputs if key in ("graph", "deadline_s", "tenant", "session")]
    if taken:
        raise GraphError(
            f"workflow {quoted([graph.name])} has the input {quoted(taken)}, which the engine's "
            "stream() takes for itself; give it another name"
        )
    return graph


def _checked_outputs(outputs: Iterable[str] | None, graph: Graph) -> tuple[str, ...] | None:
    if outputs is None:
        return None
    if isinstance(outputs, (str, bytes)) or not isinstance(outputs, Iterable):
        raise GraphError(f"outputs must be a list of keys, not {describe(outputs)}")
    keys = tuple(outputs)
    known = [*(node.output for node in graph.nodes.values()), *graph.inputs, *graph.defaults]
    for key in keys:
        if key not in known:
            raise GraphError(
                f"outputs has the key {describe(key)}, which nothing writes; "
                f"choose among {quoted(dict.fromkeys(known))}"
            )
    return keys
