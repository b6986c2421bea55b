"""One request on its way through a graph: wavefront after wavefront (HedraRAG, section 4.5)."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from typing import Any

from ctxreuse.workflow.errors import RouterError, StageError, StateKeyError, quoted
from ctxreuse.workflow.graph.compiled import Graph
from ctxreuse.workflow.graph.nodes import START, Function, Generation, Node, Retrieval
from ctxreuse.workflow.runtime.events import Emit, NodeFinished, NodeStarted
from ctxreuse.workflow.runtime.services import RunContext, Services
from ctxreuse.workflow.runtime.stages import Stages
from ctxreuse.workflow.runtime.timeline import Kind, Outcome, Span

_KINDS: dict[type[Node], Kind] = {
    Generation: "generation",
    Retrieval: "retrieval",
    Function: "function",
}


class WorkflowRun:
    """Executes a graph once.

    Args:
        services: What all runs share.
        graph: The graph.
        inputs: The values of its inputs.
        context: The run.
        emit: Receives the events.

    Attributes:
        state: The values that are known; nothing speculative.
        visited: The nodes that have ended, wavefront by wavefront.

    Raises:
        StateKeyError: an input is missing or unknown.
    """

    def __init__(
        self,
        services: Services,
        graph: Graph,
        inputs: Mapping[str, Any],
        context: RunContext,
        emit: Emit,
    ) -> None:
        self.state = graph.initial_state(inputs)
        self.visited: list[str] = []
        self._services = services
        self._graph = graph
        self._context = context
        self._emit = emit
        self._stages = Stages(services, graph, context, emit)

    async def execute(self) -> None:
        """Run until all branches have led to END.

        Raises:
            WorkflowError: A node, a router or a limit has failed the run.
        """
        try:
            wavefront = await self._next([START])
            while wavefront:
                values = await self._values(wavefront)
                writes = {self._graph.nodes[name].output: values[name] for name in wavefront}
                self.state = self.state.commit(writes, wavefront)
                self.visited += wavefront
                wavefront = await self._next(wavefront)
        finally:
            await self._stages.close()

    async def _values(self, wavefront: tuple[str, ...]) -> dict[str, Any]:
        """Return what the nodes of a wavefront write; they run side by side."""
        nodes = [self._graph.nodes[name] for name in wavefront]
        if len(nodes) == 1:
            return {wavefront[0]: await self._value(nodes[0], is_alone=True)}
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {node.name: group.create_task(self._value(node, False)) for node in nodes}
        except BaseExceptionGroup as failures:  # the first says why; it has stopped the others
            raise failures.exceptions[0] from failures.exceptions[0].__cause__
        return {name: task.result() for name, task in tasks.items()}

    async def _value(self, node: Node, is_alone: bool) -> Any:
        visit = self.state.visits(node.name) + 1
        self._emit(NodeStarted(node.name, visit))
        began = self._services.clock()
        outcome: Outcome = "failed"
        try:
            if isinstance(node, Generation):
                value: Any = await self._stages.generation(node, self.state, visit, is_alone)
            elif isinstance(node, Retrieval):
                value = await self._stages.retrieval(node, self.state, visit, is_alone)
            else:
                value = node.function(self.state)
                value = await value if inspect.isawaitable(value) else value
            outcome = "done"
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        except Exception as error:
            if isinstance(error, StateKeyError) and not isinstance(node, Function):
                raise  # a template's error, which names the node
            raise StageError(
                f"node {quoted([node.name])} of workflow {quoted([self._graph.name])} failed on "
                f"visit {visit} with {type(error).__name__}: {error}",
                node.name,
                visit,
            ) from error
        finally:
            self._services.timeline.append(
                Span(
                    run=self._context.number,
                    workflow=self._graph.name,
                    node=node.name,
                    visit=visit,
                    kind=_KINDS[type(node)],
                    began_s=began,
                    ended_s=self._services.clock(),
                    outcome=outcome,
                )
            )
        self._emit(NodeFinished(node.name, visit, value))
        return value

    async def _next(self, ended: tuple[str, ...] | list[str]) -> tuple[str, ...]:
        """Return the wavefront that follows."""
        targets: list[str] = []
        for name in ended:
            edges = self._graph.edges[name]
            targets += edges.static
            for router in edges.routers:
                try:
                    returned: object = router.function(self.state)
                    if inspect.isawaitable(returned):
                        returned = await returned
                except Exception as error:
                    raise RouterError(
                        f"the router behind {quoted([name])} of workflow "
                        f"{quoted([self._graph.name])} failed with {type(error).__name__}: {error}",
                        name,
                    ) from error
                targets += self._graph.routed(name, router, returned)
        return self._graph.wavefront(targets, self.state)
