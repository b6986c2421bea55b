"""A workflow as a LangChain Runnable: in LCEL chains, and as a node of LangGraph."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from functools import reduce
from operator import add
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForChainRun
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import get_config_list

from ctxreuse.context.checks import checked_kind, checked_list
from ctxreuse.errors import describe
from ctxreuse.serving.aio.runnable_bridge import Input, Output, RunnableBridge
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
)
from langchain_ctxreuse.scope import scope_from_config
from langchain_ctxreuse.workflow.served_components import (
    DocumentOf,
    checked_document_of,
    with_documents,
)


class EngineRunnable(RunnableBridge[Input, Output, RunnableConfig], Runnable[Input, Output]):
    """Runs on a workflow engine, for asynchronous and sync callers.

    `batch` gives all inputs to the engine at once, which runs as many at a time as it takes.
    """

    @property
    def InputType(self) -> Any:  # noqa: N802  # the base class names it so
        """The type of the input, for schemas."""
        return Any

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
        compiled = graph.compile() if isinstance(graph, WorkflowGraph) else graph
        if not isinstance(compiled, Graph):
            raise GraphError(f"graph must be a WorkflowGraph, not {describe(graph)}")
        checked_document_of(document_of)
        self.name = compiled.name if name is None else name
        self._engine = checked_kind("engine", engine, WorkflowEngine, "a WorkflowEngine")
        self._graph = _checked_inputs(compiled)
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
        self,
        given: Any,
        run_manager: AsyncCallbackManagerForChainRun,
        config: RunnableConfig,
    ) -> AsyncGenerator[Event, None]:
        """Run the graph, and report its nodes to callbacks."""
        inputs = (
            {key: given[key] for key in self._graph.inputs if key in given}
            if isinstance(given, Mapping)
            else {self._graph.inputs[0]: given}
        )
        scope = scope_from_config(config)
        about = {"tenant": scope.tenant, "session": scope.conversation_id, **inputs}
        runs = _NodeRuns(self._graph, run_manager)
        events = self._engine.stream(self._graph, deadline_s=self._deadline_s, **about)
        try:
            async with aclosing(events):
                async for event in events:
                    await runs.report(event)
                    yield event
        except BaseException as error:
            for run in runs.open.values():
                await run.on_chain_error(error)
            raise


class _NodeRuns:
    """Shows callbacks each node as a chain's run inside that of the workflow."""

    def __init__(self, graph: Graph, run_manager: AsyncCallbackManagerForChainRun) -> None:
        self._graph = graph
        self._run_manager = run_manager
        self.open: dict[str, AsyncCallbackManagerForChainRun] = {}

    async def report(self, event: Event) -> None:
        """Report the start or the end of a node."""
        if isinstance(event, NodeStarted):
            callbacks = self._run_manager.get_child()
            self.open[event.node] = await callbacks.on_chain_start(
                None, {"visit": event.visit}, name=event.node
            )
        elif isinstance(event, NodeFinished):
            output = self._graph.nodes[event.node].output
            run = self.open.pop(event.node)
            await run.on_chain_end({output: with_documents(event.value)})


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
    keys = checked_list("outputs", outputs, "a list of keys", error=GraphError)
    known = [*(node.output for node in graph.nodes.values()), *graph.inputs, *graph.defaults]
    for key in keys:
        if key not in known:
            raise GraphError(
                f"outputs has the key {describe(key)}, which nothing writes; "
                f"choose among {quoted(dict.fromkeys(known))}"
            )
    return tuple(keys)
