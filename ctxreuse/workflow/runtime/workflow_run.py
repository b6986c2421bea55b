"""One request on its way through a graph: wavefront after wavefront (HedraRAG, section 4.5)."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

from ctxreuse.context.thoughts import ThoughtFilter, without_thoughts
from ctxreuse.errors import describe
from ctxreuse.serving.aio.concurrency import BackgroundTasks, all_of
from ctxreuse.workflow.errors import RouterError, StageError, StateKeyError, VisitLimitError, quoted
from ctxreuse.workflow.graph.compiled import Graph, Router
from ctxreuse.workflow.graph.nodes import END, START, Function, Generation, Node, Retrieval
from ctxreuse.workflow.graph.state import Documents, State
from ctxreuse.workflow.retrievers import found_blocks
from ctxreuse.workflow.runtime.events import DocumentsFound, NodeFinished, NodeStarted, TextDelta
from ctxreuse.workflow.runtime.generations import GenerationRequest
from ctxreuse.workflow.runtime.measurements import Outcome
from ctxreuse.workflow.runtime.services import DEFAULT_RETRIEVER, PreviewStability, RunContext
from ctxreuse.workflow.runtime.speculation import (
    EarlyLaunch,
    SpeculativeGeneration,
    SpeculativeRetrieval,
)
from ctxreuse.workflow.vector_search.executor import SearchExecutor
from ctxreuse.workflow.vector_search.handle import SearchHandle, SearchRecord
from ctxreuse.workflow.vector_search.top_k import TopK

_SEARCH_AT = (0.5, 0.75)
"""Parts of a usual answer after which a search begins with the text so far; 22 to 50% of an answer
are as near to all of it as its nearest document is (HedraRAG, Figure 7b)."""


class WorkflowRun:
    """Executes a graph once; a stage that runs alone may start the next ahead."""

    def __init__(self, context: RunContext, inputs: Mapping[str, Any]) -> None:
        services = context.services
        self.state = initial_state(context.graph, inputs)
        self.visited: list[str] = []
        self._context = context
        self._services = services
        self._graph = context.graph
        self._background = BackgroundTasks(services.speculating)
        self._generation_ahead = SpeculativeGeneration(context, self._background)
        self._search_ahead = SpeculativeRetrieval(services)
        self._records: dict[str, SearchRecord] = {}
        nodes = context.graph.nodes.values()
        searches = sum(isinstance(node, Retrieval) for node in nodes)
        has_cycles = any(node.max_visits is not None for node in nodes)
        may_search_again = searches > 1 or (searches == 1 and has_cycles)
        self._remembers = context.session is not None or may_search_again

    async def execute(self) -> None:
        """Run until all branches have led to END."""
        try:
            wavefront = await self._next([START])
            while wavefront:
                nodes = [self._graph.nodes[name] for name in wavefront]
                values = await all_of(self._value(node, len(nodes) == 1) for node in nodes)
                writes = {node.output: value for node, value in zip(nodes, values, strict=True)}
                self.state = self.state.commit(writes, wavefront)
                self.visited += wavefront
                wavefront = await self._next(wavefront)
        finally:
            self._generation_ahead.drop()
            self._search_ahead.drop()
            await self._background.wait()

    async def _value(self, node: Node, is_alone: bool) -> Any:
        visit = self.state.visits(node.name) + 1
        self._context.emit(NodeStarted(node.name, visit))
        began = self._context.services.clock()
        outcome: Outcome = "failed"
        try:
            if isinstance(node, Generation):
                value: Any = await self._generation(node, visit, is_alone)
            elif isinstance(node, Retrieval):
                value = await self._retrieval(node, visit, is_alone)
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
            place = f"node {quoted([node.name])} of workflow {quoted([self._graph.name])}"
            told = f"{place} failed on visit {visit} with {type(error).__name__}: {error}"
            raise StageError(told, node.name, visit) from error
        finally:
            self._context.record(node, visit, began, outcome)
        self._context.emit(NodeFinished(node.name, visit, value))
        return value

    async def _next(self, ended: tuple[str, ...] | list[str]) -> tuple[str, ...]:
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
                targets += routed(self._graph, name, router, returned)
        return next_wavefront(self._graph, targets, self.state)

    async def _generation(self, node: Generation, visit: int, is_alone: bool) -> str:
        """Return the text of a generation; commit the speculative one if it is the same."""
        services = self._services
        request = GenerationRequest.of(node, self.state)
        began = services.clock()
        answer = self._generation_ahead.commit(node.name, visit, request)
        if answer is None:
            answer = services.generations.begin(request, self._context.tenant)
        usual = self._context.usual(node)
        search_at = [part * usual.tokens.value for part in _SEARCH_AT] if is_alone else []
        said, told, tokens, thoughts = "", "", 0, ThoughtFilter()
        try:
            async for piece in answer.pieces():
                said += piece.text
                tokens += piece.tokens
                if text := thoughts.take(piece.text):
                    told += text
                    self._context.emit(TextDelta(node.name, visit, text))
                if search_at and tokens >= search_at[0] and not answer.receiving.done():
                    del search_at[0]
                    services.speculating.attempt(
                        partial(self._search_early, node, told), self._search_ahead.drop
                    )
        finally:
            if not answer.receiving.done():
                await answer.cancel()
        usual.seconds.add(services.clock() - began)
        usual.tokens.add(tokens)
        services.speculation.generated_tokens += tokens
        answered = without_thoughts(said)
        if answered and not thoughts.has_begun:
            self._context.emit(TextDelta(node.name, visit, answered))
        return answered

    def _search_early(self, node: Generation, said: str) -> None:
        """Begin the search behind a generation with the part of the answer that has come."""
        retrieval = certain_successor(self._graph, node.name, self.state)
        if not isinstance(retrieval, Retrieval) or not self._services.options.speculative_retrieval:
            return
        name = retrieval.retriever or DEFAULT_RETRIEVER
        executor = self._services.executors.get(name)
        if executor is not None:
            expected = self.state.overlay({node.output: said})
            self._search_ahead.begin(retrieval, expected, executor, self._last_search(name))

    async def _retrieval(self, node: Retrieval, visit: int, is_alone: bool) -> Documents:
        name = node.retriever or DEFAULT_RETRIEVER
        text = node.query.render_text(self.state)
        executor = self._services.executors.get(name)
        scores = None
        if executor is None:
            found = await self._services.retrievers[name].retrieve(text, node.k)
            documents = found_blocks(found, node.k, f"retriever {name!r}")
        else:
            best = await self._search(executor, name, node, text, is_alone)
            retriever = executor.retriever
            documents = retriever.blocks_of(best.ids.tolist())
            nearness = best.scores if retriever.index.higher_is_better else -best.scores
            scores = tuple(nearness.tolist())
        self._context.emit(DocumentsFound(node.name, visit, documents, scores))
        return documents

    async def _search(
        self, executor: SearchExecutor, name: str, node: Retrieval, text: str, is_alone: bool
    ) -> TopK:
        """Search step by step; meanwhile, start the generation behind it from what is found."""
        due = self._services.clock()
        search, hint = self._search_ahead.take(node, text)
        record = hint or self._last_search(name) if search is None else search.record
        launch = self._early_launch(node, record, due) if is_alone else None
        preview_at = None if launch is None else launch.stability.launch_at
        if search is None:
            is_remembered = self._remembers and self._may_prepare(executor)
            search = executor.begin(
                text, node.k, due, record, preview_at=preview_at, is_remembered=is_remembered
            )
        else:
            search.due = due
            search.schedule_preview(preview_at)
            search.news.set()  # what it has found so far
        try:
            while search.outcome is None:
                await search.news.wait()
                search.news.clear()
                if launch is not None:
                    # a search does not fail because of a speculation
                    self._services.speculating.attempt(
                        partial(launch.look, executor, search), self._generation_ahead.drop
                    )
        finally:
            if search.outcome is None:
                executor.cancel(search)
        return self._found(executor, name, search, launch)

    def _found(
        self, executor: SearchExecutor, name: str, search: SearchHandle, launch: EarlyLaunch | None
    ) -> TopK:
        """Return what a search has found, learn from it, and keep it for the next one."""
        best = search.outcome
        if isinstance(best, Exception):
            raise best
        assert best is not None, "the search has ended"
        if launch is not None:
            launch.learn(search, best)
        if self._remembers and (record := search.record_of(best)) is not None:
            # at once, since the next node may be a search, too
            self._keep(name, record)
            if self._may_prepare(executor):
                self._background.start(self._add_vectors(executor, name, record))
        k = search.k
        return TopK(best.scores[:k], best.ids[:k], best.found_in[:k])

    def _early_launch(
        self, node: Retrieval, record: SearchRecord | None, due: float
    ) -> EarlyLaunch | None:
        """Return what launches the generation behind a retrieval; None if nothing may."""
        if self._services.options.speculation == "off":
            return None
        generation = certain_successor(self._graph, node.name, self.state)
        if not isinstance(generation, Generation):
            return None
        self._services.speculation.retrievals += 1
        key = ((self._graph.name, node.name), record is not None)
        stability = self._services.preview_stability.get_or_make(key, PreviewStability)
        ahead = self._generation_ahead
        return EarlyLaunch(self._context, ahead, node, generation, self.state, stability, due)

    def _may_prepare(self, executor: SearchExecutor) -> bool:
        """Return whether work that only helps the next search keeps no other one waiting."""
        return executor.scheduler.has_time or self._services.options.speculation == "always"

    def _last_search(self, name: str) -> SearchRecord | None:
        if name in self._records or self._context.session is None:
            return self._records.get(name)
        return self._services.sessions.get(self._context.tenant, (self._context.session, name))

    def _keep(self, name: str, record: SearchRecord) -> None:
        """Keep a record for the next search of the run, or of its session."""
        self._records[name] = record
        if self._context.session is not None:
            self._services.sessions.put(self._context.tenant, (self._context.session, name), record)

    async def _add_vectors(self, executor: SearchExecutor, name: str, record: SearchRecord) -> None:
        """Look up the vectors of a record, with which the next search recalls the nearest."""
        index = executor.retriever.index
        vectors = await executor.execute(lambda: index.vectors_of(record.ids, record.found_in))
        if self._records[name] is record:  # else a later search has ended meanwhile
            self._keep(name, replace(record, vectors=vectors))


def initial_state(graph: Graph, inputs: Mapping[str, Any]) -> State:
    """Return the state in which a run begins; defaults are copied for it."""
    for key in (*inputs, *graph.inputs):
        if key not in graph.inputs:
            problem = f"has no input {quoted([key])}; it has {quoted(graph.inputs)}"
        elif key not in inputs and key not in graph.defaults:
            problem = (
                f"was run without its input {quoted([key])}; "
                "pass it, or give it a value with defaults={...}"
            )
        else:
            continue
        raise StateKeyError(f"workflow {quoted([graph.name])} {problem}", key=key)
    return State({**deepcopy(dict(graph.defaults)), **inputs})


def routed(graph: Graph, source: str, router: Router, returned: object) -> tuple[str, ...]:
    """Return the targets of a router behind `source` whose function returned something."""
    names = (returned,) if isinstance(returned, str) else returned
    if not isinstance(names, Sequence) or not names:
        raise RouterError(
            f"the router behind {quoted([source])} returned {describe(returned)}; "
            "return a node's name, END, or a list of them",
            source,
        )
    allowed = (*graph.nodes, END) if router.targets is None else router.targets
    for name in names:
        if name not in allowed:
            raise RouterError(
                f"the router behind {quoted([source])} returned {describe(name)}; "
                f"it may lead to {quoted(allowed)}",
                source,
            )
    return tuple(names)


def next_wavefront(graph: Graph, targets: Iterable[str], state: State) -> tuple[str, ...]:
    """Return the nodes that run next, in the order of `nodes`; an empty result ends the run."""
    reached = {_within_limit(graph, target, state) for target in targets}
    writer_of: dict[str, str] = {}
    for name in filter(reached.__contains__, graph.nodes):
        output = graph.nodes[name].output
        if output in writer_of:  # two edges of one node were checked with the graph
            raise RouterError(
                f"nodes {quoted([writer_of[output], name])} would run side by side and both "
                f"write {quoted([output])}; give them different output="
            )
        writer_of[output] = name
    return tuple(writer_of.values())


def certain_successor(graph: Graph, name: str, state: State) -> Node | None:
    """Return the node that certainly follows one that runs alone; its visit is to be committed."""
    edges = graph.edges[name]
    if edges.routers or len(edges.static) != 1:
        return None
    try:
        target = _within_limit(graph, edges.static[0], state, name)
    except VisitLimitError:
        return None
    return graph.nodes.get(target)


def _within_limit(graph: Graph, target: str, state: State, running: str = "") -> str:
    while target != END:
        node = graph.nodes[target]
        visits = state.visits(target) + (target == running)
        if node.max_visits is None or visits < node.max_visits:
            break
        if node.otherwise is None:
            raise VisitLimitError(
                f"an edge led to node {quoted([target])} after its {node.max_visits} visits; "
                "raise max_visits=, or say with otherwise= where to go then",
                target,
            )
        target = node.otherwise
    return target
