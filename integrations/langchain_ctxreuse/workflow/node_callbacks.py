"""LangChain's callbacks hear of the nodes of a workflow."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from langchain_core.callbacks import AsyncCallbackManagerForChainRun

from ctxreuse.workflow.graph.compiled import Graph
from ctxreuse.workflow.runtime.events import Event, NodeFinished, NodeStarted
from langchain_ctxreuse.workflow.langchain_documents import with_documents


class NodeRuns:
    """Shows each node as a chain's run inside that of the workflow.

    Args:
        graph: The workflow.
        run_manager: Its run.
    """

    def __init__(self, graph: Graph, run_manager: AsyncCallbackManagerForChainRun) -> None:
        self._graph = graph
        self._run_manager = run_manager
        self._open: dict[str, AsyncCallbackManagerForChainRun] = {}

    async def note(self, event: Event) -> None:
        """Tell of what has happened."""
        if isinstance(event, NodeStarted):
            callbacks = self._run_manager.get_child()
            self._open[event.node] = await callbacks.on_chain_start(
                None, {"visit": event.visit}, name=event.node
            )
        elif isinstance(event, NodeFinished):
            output = self._graph.nodes[event.node].output
            run = self._open.pop(event.node)
            await run.on_chain_end({output: with_documents(event.value)})

    @asynccontextmanager
    async def told(self) -> AsyncGenerator[None, None]:
        """Tell of the nodes that are cut short by what is raised inside."""
        try:
            yield
        except BaseException as error:
            for run in self._open.values():
                await run.on_chain_error(error)
            raise
