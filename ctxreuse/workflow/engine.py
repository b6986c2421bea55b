"""Many runs of many graphs at once, over one model and one set of retrievers (HedraRAG)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import (
    AsyncGenerator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import astuple, dataclass, replace
from functools import lru_cache, partial
from itertools import count
from os import PathLike
from types import NoneType
from typing import Any, TypeAlias, TypeVar

from ctxreuse.context.blocks import text_digest
from ctxreuse.context.checks import checked_kind, checked_list, checked_number
from ctxreuse.context.copies import OnePerProcess
from ctxreuse.context.fork_safety import ForkSafeLock, renew_after_fork
from ctxreuse.context.scope import current_scope
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.planner import ReusePlanner
from ctxreuse.serving.aio import sync_bridge
from ctxreuse.serving.aio.concurrency import (
    AsyncClosing,
    ConcurrencyLimiter,
    Execute,
    all_of,
    end_tasks,
)
from ctxreuse.serving.dispatch import Progress, progress_bar
from ctxreuse.workflow.errors import DeadlineError, EngineClosedError, GraphError, quoted
from ctxreuse.workflow.graph.builder import WorkflowGraph, compiled_graph
from ctxreuse.workflow.graph.compiled import Graph
from ctxreuse.workflow.graph.nodes import END, START, Generation, Retrieval
from ctxreuse.workflow.models.language_model import LanguageModel, checked_llm
from ctxreuse.workflow.retrievers import Retriever, checked_retriever
from ctxreuse.workflow.runtime.events import (
    DocumentsFound,
    Emit,
    Event,
    RunFinished,
    SearchResult,
    WorkflowResult,
)
from ctxreuse.workflow.runtime.measurements import Timeline, WorkflowMetrics, draw_timeline
from ctxreuse.workflow.runtime.services import (
    DEFAULT_RETRIEVER,
    RunContext,
    Services,
    WorkflowOptions,
)
from ctxreuse.workflow.runtime.workflow_run import WorkflowRun
from ctxreuse.workflow.vector_search.scheduler import SearchCounters

Job: TypeAlias = tuple[WorkflowGraph | Graph, Any]
"""A graph, and its only input or a dict of its inputs."""

_Result = TypeVar("_Result")
_LOOP_ENDED = (
    "the event loop that the engine was at work in has ended, and this run with it; run it again, "
    "or use the engine in one event loop only"
)


@dataclass(slots=True, eq=False)
class _OwnerLoop:
    loop: asyncio.AbstractEventLoop
    users: int = 0


class _SingleLoopRunner:
    """Runs coroutines of all callers in the first caller's loop, while anything runs there."""

    def __init__(self) -> None:
        self._lock = ForkSafeLock()
        self._start_anew()
        renew_after_fork(self._start_anew)

    def _start_anew(self) -> None:
        """Have no owner loop: in a child, the parent's does not run."""
        self._owner: _OwnerLoop | None = None

    async def run(self, work: Callable[[], Coroutine[Any, Any, _Result]]) -> _Result:
        """Return what a coroutine returns; it has the caller's context variables."""
        here = asyncio.get_running_loop()
        with self._used(None) as owner:
            if owner.loop is here:
                return await work()
            if owner.loop in sync_bridge.waiting_loops.get():
                raise InvalidRequestError(
                    "a call that is not asynchronous waits in the event loop that would have to "
                    "answer it; await the method that is: ainvoke, aretrieve, arun_batch, ..."
                )
            running = self._run_in(owner, work)
            try:
                answer = asyncio.run_coroutine_threadsafe(running, owner.loop)
            except RuntimeError as error:  # closed at this moment
                running.close()
                raise EngineClosedError(_LOOP_ENDED) from error
            try:
                return await asyncio.wrap_future(answer)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and not task.cancelling():
                    raise EngineClosedError(_LOOP_ENDED) from None
                raise

    async def _run_in(
        self, owner: _OwnerLoop, work: Callable[[], Coroutine[Any, Any, _Result]]
    ) -> _Result:
        with self._used(owner):  # a caller that is cancelled leaves before the work has ended
            return await work()

    @contextmanager
    def _used(self, owner: _OwnerLoop | None) -> Iterator[_OwnerLoop]:
        """Count a user of the owner loop; None takes the present one, or makes this loop it."""
        with self._lock:
            if owner is None:
                owner = self._owner
                if owner is None or not owner.users or owner.loop.is_closed():
                    owner = self._owner = _OwnerLoop(asyncio.get_running_loop())
            owner.users += 1
        try:
            yield owner
        finally:
            with self._lock:
                owner.users -= 1


class WorkflowEngine(OnePerProcess, AsyncClosing):
    """Runs workflows: keeps the model and the vector search busy at the same time.

    Every run gives what plain sequential execution gives. Searches of all runs share scans,
    sub-stage by sub-stage; a generation may begin before its retrieval has ended, and counts only
    if it was asked the right thing. The engine works in one event loop at a time, which answers
    calls from others, too.

    Args:
        llm: The model; None if the generations of all graphs name their own, or there are none.
        retriever: The retriever of retrieval nodes, or a dict of several by name, of which nodes
            that name none ask "default". A `VectorRetriever` is searched step by step, any other is
            one stage. None is for graphs without retrievals.
        planner: Orders the documents of each prompt; None leaves them as retrieved.
        options: Limits and techniques.
        execute: Runs blocking work; None uses threads of the engine's own.
        clock: Seconds from any start, at the event loop's pace.
    """

    def __init__(
        self,
        llm: LanguageModel | None = None,
        retriever: Retriever | Mapping[str, Retriever] | None = None,
        planner: ReusePlanner | None = None,
        *,
        options: WorkflowOptions | None = None,
        execute: Execute | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if planner is not None:
            checked_kind("planner", planner, ReusePlanner, "a ReusePlanner or None")
        options = WorkflowOptions() if options is None else options
        checked_kind("options", options, WorkflowOptions, "WorkflowOptions")
        self._llm = None if llm is None else checked_llm(llm)
        self._retrievers = _by_name(retriever)
        self._max_in_flight = options.max_in_flight
        self._new_services = partial(
            Services, self._llm, self._retrievers, planner, options, execute, clock
        )
        self._numbers = count(1)
        self._loop = _SingleLoopRunner()
        self._is_closed = False
        self._runs = self._finished = self._failed = self._cancelled = 0
        self._start_anew()
        renew_after_fork(self._start_anew)

    async def run(
        self,
        graph: WorkflowGraph | Graph,
        input: Any = None,  # noqa: A002  # the key that the graph's prompts use
        *,
        deadline_s: float | None = None,
        tenant: str | None = None,
        session: str | int | None = None,
        **inputs: Any,
    ) -> WorkflowResult:
        """Run a graph; return the answer, and the state behind it.

        Args:
            graph: The graph.
            input: The value of its first input.
            deadline_s: Seconds after which the run fails, its wait for a slot included.
            tenant: The tenant; None takes that of `request_context`.
            session: Runs of one session tell each other where to search first. None takes the
                conversation of `request_context`.
            **inputs: The values of other inputs, by key.

        Raises:
            WorkflowError: no graph, an input is missing, or the run has failed.
        """
        return await self._run(graph, input, inputs, deadline_s, tenant, session)

    async def stream(
        self,
        graph: WorkflowGraph | Graph,
        input: Any = None,  # noqa: A002  # as in run
        *,
        deadline_s: float | None = None,
        tenant: str | None = None,
        session: str | int | None = None,
        **inputs: Any,
    ) -> AsyncGenerator[Event, None]:
        """Run a graph and yield its events, the result last; arguments and errors as in `run`.

        A caller that stops early cancels the run; with `contextlib.aclosing` it ends at once.
        """
        events: Any = asyncio.Queue()  # of `Event`, then None; the engine's loop may be another one
        emit = partial(asyncio.get_running_loop().call_soon_threadsafe, events.put_nowait)
        run = asyncio.ensure_future(
            self._run(graph, input, inputs, deadline_s, tenant, session, emit)
        )
        run.add_done_callback(lambda _: events.put_nowait(None))
        try:
            while (event := await events.get()) is not None:
                yield event
            yield RunFinished(run.result())
        finally:
            await end_tasks(run)

    async def retrieve(
        self,
        query: str,
        k: int = 5,
        *,
        retriever: str | None = None,
        deadline_s: float | None = None,
        tenant: str | None = None,
        session: str | int | None = None,
    ) -> SearchResult:
        """Search without a graph for k documents; scans are shared with those of other searches.

        `retriever` names one of the engine's, None the default one. The rest is as in `run`.

        Raises:
            WorkflowError: no such k or retriever, or the search has failed.
        """
        checked_kind("query", query, str, "a string")
        checked_kind("k", k, (int, float), "an integer")  # its graph says more, and is kept by it
        checked_kind("retriever", retriever, (str, NoneType), "a retriever's name or None")
        events: list[Event] = []
        graph = _search_graph(k, retriever)
        await self._run(graph, query, {}, deadline_s, tenant, session, events.append)
        [found] = [one for one in events if isinstance(one, DocumentsFound)]
        return SearchResult(found.documents, found.scores)

    async def arun_batch(
        self,
        jobs: Iterable[Job],
        *,
        deadline_s: float | None = None,
        tenant: str | None = None,
        return_exceptions: bool = False,
        progress: bool = False,
    ) -> list[WorkflowResult | Any]:
        """Run many graphs, as many at a time as the options allow; return each `WorkflowResult`.

        Args:
            jobs: Pairs of a graph and its input.
            deadline_s: As in `run`, for each.
            tenant: As in `run`.
            return_exceptions: Whether an exception takes the place of its result; else the first
                failure cancels the rest and is raised.
            progress: Whether a bar shows how many have ended.

        Raises:
            MissingExtraError: A bar is to be shown, and rich is not installed.
        """
        jobs = [_checked_job(job) for job in checked_list("jobs", jobs, "a list of pairs")]
        ended = 0
        shown: AbstractContextManager[Progress | None]
        shown = progress_bar("workflows") if progress else nullcontext()
        with shown as tell:

            async def one(graph: WorkflowGraph | Graph, given: Any) -> Any:
                nonlocal ended
                single, inputs = (None, given) if isinstance(given, Mapping) else (given, {})
                try:
                    return await self._run(graph, single, inputs, deadline_s, tenant, None)
                except Exception as error:
                    if not return_exceptions:
                        raise
                    return error
                finally:
                    ended += 1
                    if tell is not None:
                        tell(ended, len(jobs))

            return await all_of(one(*job) for job in jobs)

    def run_batch(
        self,
        jobs: Iterable[Job],
        *,
        deadline_s: float | None = None,
        tenant: str | None = None,
        return_exceptions: bool = False,
        progress: bool = True,
    ) -> list[WorkflowResult | Any]:
        """`arun_batch`, for sync callers."""
        return sync_bridge.run(
            lambda: self.arun_batch(
                jobs,
                deadline_s=deadline_s,
                tenant=tenant,
                return_exceptions=return_exceptions,
                progress=progress,
            ),
            lasting=True,
        )

    def timeline(self, path: str | PathLike[str] | None = None) -> Timeline:
        """Return the latest stages with their times; with a path, draw them there, too.

        Args:
            path: A picture's name, ending in .png, .svg or .pdf.

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        if path is not None:
            draw_timeline(self._services.timeline, path)
        return self._services.timeline

    def metrics(self) -> WorkflowMetrics:
        """Return what the engine has done so far."""
        services = self._services
        counters = [astuple(one.scheduler.counters) for one in services.executors.values()]
        searches = SearchCounters(*map(sum, zip(*counters, strict=True)))
        return WorkflowMetrics(
            runs=self._runs,
            finished=self._finished,
            failed=self._failed,
            cancelled=self._cancelled,
            waiting=self._limiter.waiting,
            in_flight=len(self._running) - self._limiter.waiting,
            generations=services.generations.started,
            searches=searches,
            speculation=replace(services.speculation),
            planning_failures=services.generations.planning.faults,
            parts=services.parts,
        )

    async def aclose(self) -> None:
        """Cancel the runs under way, which raise `EngineClosedError`, and end the threads."""
        self._is_closed = True
        await self._loop.run(self._close)

    def _start_anew(self) -> None:
        """Have no runs and no threads: in a child, those of the parent never end."""
        self._services = self._new_services()
        self._running: dict[object, asyncio.Task[Any]] = {}  # by run: a task may have several
        self._closing: set[object] = set()
        self._emptied = asyncio.Event()
        self._limiter = ConcurrencyLimiter(self._max_in_flight)

    async def _close(self) -> None:
        self._closing |= self._running.keys()
        for task in set(self._running.values()):
            task.cancel()
        if self._running:
            self._emptied.clear()
            await self._emptied.wait()  # a task may go on for long once its run has ended
        await self._services.close()

    async def _run(
        self,
        graph: WorkflowGraph | Graph,
        single: Any,
        inputs: Mapping[str, Any],
        deadline_s: float | None,
        tenant: str | None,
        session: str | int | None,
        emit: Emit = lambda event: None,
    ) -> WorkflowResult:
        compiled = self._checked(graph)
        if deadline_s is not None:
            checked_number("deadline_s", deadline_s)
        if single is not None:
            inputs = {compiled.inputs[0]: single, **inputs}
        scope = current_scope()
        tenant = (scope.tenant or "") if tenant is None else tenant
        session = scope.conversation_id if session is None else session
        # ids may be long, and 1 is not "1"
        key = None if session is None else text_digest(repr(session))
        number = next(self._numbers)
        context = RunContext(self._services, compiled, emit, number, tenant, key)
        work = partial(self._run_in_owner_loop, context, inputs, deadline_s)
        return await self._loop.run(work)

    async def _run_in_owner_loop(
        self, context: RunContext, inputs: Mapping[str, Any], deadline_s: float | None
    ) -> WorkflowResult:
        graph, clock = context.graph, self._services.clock
        began = clock()
        async with self._counted():
            run = WorkflowRun(context, inputs)
            try:
                async with asyncio.timeout(deadline_s), self._limiter.slot():
                    await run.execute()
            except TimeoutError as error:
                raise DeadlineError(
                    f"workflow {quoted([graph.name])} did not end within {deadline_s} s; "
                    f"it had been through {quoted(run.visited)}"
                ) from error
        answer, seconds = run.state.get(graph.answer), clock() - began
        return WorkflowResult(answer, run.state, tuple(run.visited), seconds)

    @asynccontextmanager
    async def _counted(self) -> AsyncGenerator[None, None]:
        """Count a run by how it ends; while it runs, `aclose` can cancel it."""
        if self._is_closed:
            raise EngineClosedError("the engine is closed; make a new one")
        task = asyncio.current_task()
        assert task is not None, "a run is awaited in a task"
        run = object()
        self._running[run] = task
        self._runs += 1
        try:
            yield
            self._finished += 1
        except asyncio.CancelledError:
            self._cancelled += 1
            if run in self._closing and not task.uncancel():
                raise EngineClosedError(
                    "the engine was closed while the run was under way; run it again on a new one"
                ) from None
            raise
        except BaseException:
            self._failed += 1
            raise
        finally:
            del self._running[run]
            if not self._running:
                self._emptied.set()

    def _checked(self, graph: object) -> Graph:
        compiled = compiled_graph(graph)
        for node in compiled.nodes.values():
            if isinstance(node, Retrieval):
                name = node.retriever or DEFAULT_RETRIEVER
                if name not in self._retrievers:
                    raise GraphError(
                        f"node {quoted([node.name])} asks retriever {quoted([name])}; the engine "
                        f"has {quoted(self._retrievers)}; pass retriever={{{name!r}: ...}}"
                    )
            elif isinstance(node, Generation) and node.llm is None and self._llm is None:
                raise GraphError(
                    f"node {quoted([node.name])} asks the engine's model, but the engine has none; "
                    "pass llm= to WorkflowEngine, or to add_generation"
                )
        return compiled


@lru_cache(maxsize=100)
def _search_graph(k: int, retriever: str | None) -> Graph:
    graph = WorkflowGraph(inputs=("query",), name="search")
    graph.add_retrieval("search", query="{query}", k=k, retriever=retriever)
    return graph.add_edge(START, "search").add_edge("search", END).compile()


def _by_name(retriever: Retriever | Mapping[str, Retriever] | None) -> dict[str, Retriever]:
    if retriever is None:
        return {}
    is_single = not isinstance(retriever, Mapping)
    named = dict(retriever if isinstance(retriever, Mapping) else {DEFAULT_RETRIEVER: retriever})
    for name, one in named.items():
        if not isinstance(name, str) or not name:
            raise InvalidRequestError(f"a retriever's name must be a string, not {describe(name)}")
        checked_retriever(one, "retriever" if is_single else f"retriever {name!r}")
    return named


def _checked_job(job: object) -> Job:
    if not isinstance(job, Sequence) or isinstance(job, str) or len(job) != 2:
        raise InvalidRequestError(
            f"a job must be a pair of a graph and its input, not {describe(job)}"
        )
    return job[0], job[1]
