"""What goes wrong in one run is one clear error there, and nothing elsewhere; nothing is left."""

import asyncio
import gc
import threading
import time
from collections.abc import Callable
from contextlib import aclosing
from random import Random
from typing import Any

import faiss
import numpy as np
import pytest
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st
from workflow_engines import (
    BLOCKS,
    DIMENSION,
    EAGER,
    Clock,
    Outcome,
    SteadyLLM,
    WordEmbedder,
    answer_to,
    assert_idle,
    corpus_index,
    corpus_retriever,
    engine_over,
    executing,
    guess_first,
    in_virtual_time,
    of_function,
    plain_answer,
    plain_search,
    plainly,
    rag,
    virtual_time,
)
from workflow_interpreter import interpret

from ctxreuse.workflow.engine import WorkflowEngine
from ctxreuse.workflow.errors import (
    DeadlineError,
    RouterError,
    StageError,
    StateKeyError,
    VisitLimitError,
    WorkflowError,
)
from ctxreuse.workflow.graph.builder import WorkflowGraph
from ctxreuse.workflow.graph.nodes import END, START
from ctxreuse.workflow.models.emulated_llm import EmulatedLLM
from ctxreuse.workflow.retrievers import CallableRetriever
from ctxreuse.workflow.runtime.events import NodeStarted, TextDelta
from ctxreuse.workflow.runtime.services import PreviewStability, WorkflowOptions
from ctxreuse.workflow.vector_search import scheduler
from ctxreuse.workflow.vector_search.vector_retriever import VectorRetriever


def several(times: int) -> list[tuple[WorkflowGraph, str]]:
    return [(shape(), f"other {n}") for n in range(times) for shape in (rag, guess_first)]


def beside_others(
    engine_of: Callable[[], WorkflowEngine],
    graph: WorkflowGraph,
    question: str = "broken",
    **options: Any,
) -> Exception | Any:
    """Return what one run gives or raises, among others that must give what they always do."""

    async def main() -> Any:
        async with engine_of() as engine:
            others = several(4)
            running = [asyncio.ensure_future(engine.run(*job)) for job in others]
            await asyncio.sleep(0.004)
            [broken] = await asyncio.gather(
                engine.run(graph, question, **options), return_exceptions=True
            )
            for job, result in zip(others, await asyncio.gather(*running), strict=True):
                assert result.answer == plainly(*job).answer
            again = await engine.run(rag(), "afterwards")
            assert again.answer == plainly(rag(), "afterwards").answer
            await assert_idle(engine)
            assert not getattr(engine._llm, "open", 0)
            return broken

    return in_virtual_time(main())


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise error

    return fail


def asking(retriever: str, k: int = 3) -> WorkflowGraph:
    graph = WorkflowGraph(name="asking").add_retrieval(
        "look", query="{input}", k=k, retriever=retriever
    )
    return graph.add_edge(START, "look").add_edge("look", END)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_retriever_that_raises_fails_its_run_and_no_other(is_async):
    async def later(query: str, k: int) -> Any:
        await asyncio.sleep(0.001)
        raise OSError("the database is gone")

    search = later if is_async else raising(OSError("the database is gone"))
    retrievers = {"default": corpus_retriever(), "db": CallableRetriever(search)}
    error = beside_others(lambda: engine_over(retrievers), asking("db"))
    assert isinstance(error, StageError)
    assert str(error).startswith("node 'look' of workflow 'asking' failed on visit 1 with OSError")
    assert (error.node, error.visit, type(error.__cause__)) == ("look", 1, OSError)


@pytest.mark.usefixtures("eager")
@virtual_time
async def test_a_stream_that_breaks_in_a_speculation_fails_nothing():
    """The first answer to each question breaks at once: it is the speculative one."""

    class BreakingOnce(SteadyLLM):
        def __init__(self) -> None:
            super().__init__()
            self.asked: set[str] = set()

        async def stream(self, prompt: Any, params: Any) -> Any:
            question = str(prompt).split("<<")[1]
            first, self.asked = question not in self.asked, self.asked | {question}
            if first:
                raise ConnectionError("the stream broke")
            async with aclosing(super().stream(prompt, params)) as answer:
                async for piece in answer:
                    yield piece

    async with engine_over(llm=BreakingOnce(), options=EAGER) as engine:
        for number in range(5):
            question = f"question {number}"
            result = await engine.run(rag(), question)
            assert result.answer == plainly(rag(), question).answer
        speculation = engine.metrics().speculation
        assert speculation.launched == speculation.wasted_prompts + speculation.committed
        assert speculation.wasted_prompts >= 5


@pytest.mark.usefixtures("eager")
@virtual_time
async def test_a_template_that_reads_what_nothing_has_written_yet_names_the_key():
    asked = WorkflowGraph().add_generation("a", prompt="<<{input}>>")
    found = WorkflowGraph().add_retrieval("a", query="{input}")
    graphs = asked.add_retrieval("b", query="{c}"), found.add_generation("b", prompt="{c}")
    async with engine_over(options=EAGER) as engine:
        for graph in graphs:
            graph.add_function("c", len).add_edge(START, "a").add_edge("a", "b").add_edge("b", "c")
            with pytest.raises(StateKeyError, match=r"^the .* of node 'b' reads {c}") as caught:
                await engine.run(graph.add_edge("c", END), "Which?")
            assert caught.value.key == "c"
        assert not engine._services.speculating.faults


@pytest.mark.parametrize(
    ("router", "message"),
    [
        (raising(ZeroDivisionError("by zero")), "ZeroDivisionError: by zero"),
        (lambda state: state["nothing"], "StateKeyError: the state has no 'nothing'"),
    ],
)
def test_a_router_that_fails_or_names_what_is_not_there_fails_its_run(router, message):
    graph = WorkflowGraph(name="routed").add_generation("say", prompt="<<{input}>>", max_visits=3)
    graph.add_edge(START, "say").add_edge("say", router)
    error = beside_others(engine_over, graph)
    assert isinstance(error, RouterError)
    assert f"behind 'say' of workflow 'routed' failed with {message}" in str(error)
    assert error.node == "say"


def test_functions_that_fail_and_nodes_that_are_visited_too_often_are_named():
    for raised in (KeyError("x"), StateKeyError("no key"), TimeoutError(), DeadlineError("late")):
        error = beside_others(engine_over, of_function(raising(raised)))
        assert isinstance(error, StageError), raised
        assert error.node == "own"
        assert error.__cause__ is raised

    graph = WorkflowGraph().add_generation("say", prompt="<<{input}>>", max_visits=2)
    graph.add_edge(START, "say").add_edge("say", lambda state: "say", ["say", END])
    error = beside_others(engine_over, graph)
    assert isinstance(error, VisitLimitError)
    assert error.node == "say"
    assert "after its 2 visits; raise max_visits=, or say with otherwise=" in str(error)


def test_a_node_that_fails_stops_those_beside_it():
    async def late(state: Any) -> Any:
        await asyncio.sleep(0.012)
        raise ValueError("no")

    graph = WorkflowGraph(name="wide").add_function("own", late)
    graph.add_generation("say", prompt="<<{input}>>").add_retrieval("search", query="{input}")
    for name in ("own", "say", "search"):
        graph.add_edge(START, name).add_edge(name, END)
    error = beside_others(lambda: engine_over(llm=SteadyLLM(lambda: 0.5)), graph)
    assert str(error) == "node 'own' of workflow 'wide' failed on visit 1 with ValueError: no"


def test_an_index_without_vectors_finds_nothing():
    empty = faiss.IndexIVFFlat(faiss.IndexFlatL2(DIMENSION), DIMENSION, 4)
    empty.cp.min_points_per_centroid = 1
    empty.train(np.random.default_rng(0).normal(size=(100, DIMENSION)).astype(np.float32))
    searching = VectorRetriever(empty, (), WordEmbedder())
    retrievers = {"default": corpus_retriever(), "empty": searching}
    result = beside_others(lambda: engine_over(retrievers), asking("empty"))
    assert result.state["docs"] == ()


def test_an_absurd_k_gives_all_there_is():
    class Guarded(VectorRetriever):
        """Refuses what would take the machine's memory."""

        def __init__(self) -> None:
            super().__init__(corpus_index(), BLOCKS, WordEmbedder())
            scan = self.index.scan

            def guarded(vectors: Any, rows: Any, clusters: Any, k: int) -> Any:
                assert k <= len(BLOCKS), "no search finds more than there is"
                return scan(vectors, rows, clusters, k)

            self.index.scan = guarded

    result = beside_others(lambda: engine_over(Guarded()), rag(10**5), "all of it")
    assert list(result.state["docs"]) == plain_search("all of it", 10**5)
    assert len(result.state["docs"]) == len(BLOCKS)


@pytest.mark.parametrize("is_step_wise", [False, True])
async def test_a_search_that_finds_too_little_where_it_looks_goes_on_and_is_counted(is_step_wise):
    """A cluster holds a few of the corpus: `nprobe` 1 never finds 40 in it."""
    retriever = corpus_retriever(nprobe=1)
    for k, further in ((1, 0), (40, 1), (len(BLOCKS) + 7, 2)):
        if is_step_wise:
            async with engine_over(retriever) as engine:
                found = (await engine.run(rag(k), "passage 1")).state["docs"]
        else:
            found = await retriever.retrieve("passage 1", k)
        assert len(found) == min(k, len(BLOCKS))
        assert retriever.probed_further == further


class Choosy(WordEmbedder):
    def embed(self, texts: Any) -> Any:
        if any("broken" in text for text in texts):
            raise ValueError("a word that is unknown")
        return super().embed(texts)


@virtual_time
async def test_a_query_that_cannot_be_embedded_fails_its_run_and_no_other():
    retrievers = VectorRetriever(corpus_index(), BLOCKS, Choosy())
    async with engine_over(retrievers) as engine:
        jobs = [(rag(), text) for text in ("first", "fine", "broken", "fine too")]
        results = await engine.arun_batch(jobs, return_exceptions=True)
        assert str(results.pop(2)).endswith("visit 1 with ValueError: a word that is unknown")
        assert [str(one) for one in results] == [
            plainly(rag(), text).answer for text in ("first", "fine", "fine too")
        ]
        await assert_idle(engine)


@virtual_time
async def test_what_fails_between_scans_fails_the_searches(monkeypatch):
    monkeypatch.setattr(scheduler.ScanCosts, "observe", raising(RuntimeError("no fit")))
    async with engine_over() as engine:
        with pytest.raises(StageError, match="no fit"):
            await engine.run(rag(), "Why")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda vectors: np.nan * vectors, "finite"),
        (lambda vectors: np.repeat(vectors, 2, axis=0), r"must return shape .*, not \(2, 8\)"),
    ],
)
@pytest.mark.parametrize("speculative", [False, True])
@virtual_time
async def test_vectors_that_cannot_be_right_are_an_error_of_the_stage(change, message, speculative):
    class Wrong(WordEmbedder):
        def embed(self, texts: Any) -> Any:
            return change(super().embed(texts))

    engine = engine_over(VectorRetriever(corpus_index(), BLOCKS, Wrong()), options=EAGER)
    async with engine:
        with pytest.raises(StageError, match=message):
            await engine.run(guess_first() if speculative else rag(), "Why")
        await assert_idle(engine)


@pytest.mark.usefixtures("eager")
@virtual_time
async def test_a_scan_that_fails_fails_those_that_took_part_and_no_later_one():
    retriever = corpus_retriever()
    scan, scans = retriever.index.scan, iter(range(10**6))

    def failing(*arguments: Any) -> Any:
        if next(scans) == 3:
            raise OSError("the disk is gone")
        return scan(*arguments)

    retriever.index.scan = failing
    async with engine_over(retriever, options=EAGER) as engine:
        jobs = several(4)
        results = await engine.arun_batch(jobs, return_exceptions=True)
        failed = [one for one in results if isinstance(one, Exception)]
        assert failed
        for error in failed:
            assert isinstance(error, StageError)
            assert str(error.__cause__) == "the disk is gone"
        for job, result in zip(jobs, results, strict=True):
            assert result in failed or result.answer == plainly(*job).answer
        assert (await engine.run(rag(), "later")).answer == plainly(rag(), "later").answer
        await assert_idle(engine)


@pytest.mark.usefixtures("eager")
@virtual_time
async def test_a_block_that_cannot_be_read_fails_only_runs_that_find_it():
    """Previews hold blocks that results do not; what goes wrong with them is of no interest."""

    def block(number: int) -> Any:
        if number % 3 == 0:
            raise KeyError("no such block")
        return BLOCKS[number]

    retriever = VectorRetriever(corpus_index(), block, WordEmbedder())
    async with engine_over(retriever, options=EAGER) as engine:
        questions = [f"question {number}" for number in range(12)]
        results = await engine.arun_batch(
            [(rag(k=1), question) for question in questions], return_exceptions=True
        )
        for question, result in zip(questions, results, strict=True):
            found = int(plain_search(question, 1)[0].id[1:])
            assert isinstance(result, StageError) == (found % 3 == 0)
            if not isinstance(result, Exception):
                assert result.answer == plainly(rag(k=1), question).answer
        assert engine._services.speculating.faults
        await assert_idle(engine)


@virtual_time
async def test_a_planner_that_fails_leaves_the_documents_as_retrieved(monkeypatch, planner):
    monkeypatch.setattr(planner, "plan", raising(RuntimeError("no plan")))
    plain = WorkflowOptions(speculation="off")
    async with engine_over(planner=planner, options=plain) as engine:
        assert (await engine.run(rag(), "Why")).answer == plainly(rag(), "Why").answer
        metrics = engine.metrics()
        assert metrics.planning_failures == 1


def test_a_history_that_cannot_be_kept_fails_nothing(monkeypatch):
    retriever = corpus_retriever()
    monkeypatch.setattr(retriever.index, "vectors_of", raising(OSError("the disk is gone")))
    result = beside_others(lambda: engine_over(retriever), rag(), "Why", session="one")
    assert result.answer == plainly(rag(), "Why").answer


def test_a_model_that_fails_before_it_streams_fails_its_run():
    class Refusing(SteadyLLM):
        def stream(self, prompt: Any, params: Any) -> Any:
            if "broken" in str(prompt):
                raise ValueError("no such parameter")
            return super().stream(prompt, params)

    error = beside_others(lambda: engine_over(llm=Refusing(), options=EAGER), rag())
    assert str(error).endswith("failed on visit 1 with ValueError: no such parameter")


def test_a_model_that_cancels_itself_fails_its_run_instead_of_cancelling_it():
    class Cancelling(SteadyLLM):
        async def stream(self, prompt: Any, params: Any) -> Any:
            if "broken" in str(prompt):
                raise asyncio.CancelledError
            async with aclosing(super().stream(prompt, params)) as answer:
                async for piece in answer:
                    yield piece

    error = beside_others(lambda: engine_over(llm=Cancelling()), rag())
    assert isinstance(error, StageError)
    assert "was cancelled from elsewhere" in str(error)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    ("deadline_s", "been_through"),
    [(0.001, "none"), (0.008, "none"), (0.02, "none"), (0.03, "none"), (0.045, "'search'")],
)
def test_a_deadline_that_expires_at_any_time_leaves_nothing(deadline_s, been_through):
    """The search takes some 35 ms; what is only expected is under way from 10 ms on."""

    async def main() -> int:
        llm = EmulatedLLM(answer_to, chunk_tokens=2)
        async with engine_over(llm=llm, options=EAGER) as engine:
            assert engine.metrics().speculation.launched == 0
            with pytest.raises(DeadlineError) as caught:
                await engine.run(rag(), "Why", deadline_s=deadline_s)
            told = f"did not end within {deadline_s} s; it had been through {been_through}"
            assert str(caught.value) == f"workflow 'workflow' {told}"
            assert llm.requests == 0
            await assert_idle(engine)
            assert (await engine.run(rag(), "Why")).answer == plainly(rag(), "Why").answer
            return engine.metrics().speculation.launched

    launched = in_virtual_time(main())
    assert launched > 0


@virtual_time
async def test_a_reader_who_leaves_early_cancels_the_run():
    llm = SteadyLLM()
    async with engine_over(llm=llm) as engine:
        for kind in (NodeStarted, TextDelta):
            async with aclosing(engine.stream(guess_first(), "Why")) as events:
                async for event in events:
                    if isinstance(event, kind):
                        break
            assert llm.open == 0
            assert engine.metrics().in_flight == 0
        assert engine.metrics().cancelled == 2


@virtual_time
async def test_a_failure_that_no_reader_waits_for_is_no_noise():
    async with engine_over() as engine:
        events = engine.stream(of_function(raising(ValueError("no"))), "Why")
        async with aclosing(events):
            async for _ in events:
                await asyncio.sleep(1)
                break
        del events
        gc.collect()
        await asyncio.sleep(1)


@examples(40)
@given(
    broken=st.sets(st.integers(1, 30), max_size=8),
    pieces=st.integers(0, 3),
    seed=st.integers(0, 99),
    speculation=st.sampled_from(("adaptive", "always", "off")),
)
def test_whatever_streams_break_a_run_is_right_or_names_the_node(broken, pieces, seed, speculation):
    draw = Random(seed)

    async def main() -> None:
        llm = SteadyLLM(
            lambda: draw.choice((0.0, 0.001, 0.02)),
            lambda number: pieces if number in broken else None,
        )
        options = WorkflowOptions(speculation=speculation, max_wasted_share=1.0, workers=2)
        engine = WorkflowEngine(
            llm,
            corpus_retriever(),
            options=options,
            execute=executing(lambda: draw.choice((0.0, 0.004, 0.01))),
            clock=Clock(),
        )
        async with engine:
            jobs = several(3)
            results = await engine.arun_batch(jobs, return_exceptions=True)
            for (graph, question), result in zip(jobs, results, strict=True):
                if isinstance(result, Exception):
                    assert broken
                    assert isinstance(result, StageError)
                    assert result.node in graph.compile().nodes
                    assert isinstance(result.__cause__, ConnectionError)
                else:
                    compiled = graph.compile()
                    plain = interpret(compiled, question, plain_answer, plain_search)
                    assert Outcome.of(
                        compiled, result.state, result.visited, result.answer
                    ) == Outcome.of(compiled, plain.state, plain.visits, plain.answer)
            assert llm.open == 0
            await assert_idle(engine)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "sub_stage_s", lambda *_, **__: 1e-5)
        patch.setattr(PreviewStability, "is_worth_it", lambda self, progress: True)
        in_virtual_time(main())


async def test_no_thread_and_no_task_outlives_the_engine():
    def threads() -> set[str]:
        return {one.name for one in threading.enumerate() if "ctxreuse-workflow" in one.name}

    async with WorkflowEngine(SteadyLLM(lambda: 0.0), corpus_retriever()) as engine:
        running = [asyncio.ensure_future(engine.run(rag(), f"q {n}")) for n in range(20)]
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        assert threads()
    assert not threads()
    await asyncio.wait(running)
    for run in running:
        failure = None if run.cancelled() else run.exception()
        assert failure is None or isinstance(failure, WorkflowError)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert not threads()


def test_an_event_loop_that_ends_during_a_scan_takes_no_worker_with_it():
    retriever = corpus_retriever()
    scan = retriever.index.scan

    def slow(*arguments: Any) -> Any:
        time.sleep(0.02)
        return scan(*arguments)

    retriever.index.scan = slow
    options = WorkflowOptions(workers=1, speculation="off")
    engine = WorkflowEngine(SteadyLLM(lambda: 0.0), retriever, options=options)
    with pytest.raises(DeadlineError):
        asyncio.run(engine.run(rag(), "Why", deadline_s=0.01))
    result = asyncio.run(engine.run(rag(), "Why", deadline_s=30.0))
    assert result.answer == plainly(rag(), "Why").answer
    asyncio.run(engine.aclose())
