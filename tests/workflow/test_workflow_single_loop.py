"""A single search of the engine, models of nodes, and an engine that many event loops use."""

import asyncio
import threading

import numpy as np
import pytest
from workflow_engines import (
    SteadyLLM,
    WordEmbedder,
    corpus_index,
    corpus_retriever,
    plain_search,
    rag,
)

from ctxreuse import ReusePlanner, request_context
from ctxreuse.context.scope import current_scope
from ctxreuse.errors import InvalidRequestError
from ctxreuse.serving.aio import sync_bridge
from ctxreuse.workflow import (
    END,
    START,
    CallableRetriever,
    EngineClosedError,
    GraphError,
    Piece,
    StageError,
    WorkflowEngine,
    WorkflowGraph,
    WorkflowOptions,
)
from ctxreuse.workflow.library import speculative_rag_graph
from ctxreuse.workflow.vector_search.scan_queue import ScanQueue


@pytest.mark.parametrize(("metric", "sign"), [("L2", -1), ("inner product", 1)])
async def test_a_single_search_finds_what_faiss_finds_with_scores_that_fall(metric, sign):
    engine = WorkflowEngine(retriever=corpus_retriever(metric))
    found = await engine.retrieve("red apples", 4)
    assert list(found.documents) == plain_search("red apples", 4, metric)
    scores, _ = corpus_index(metric).search(WordEmbedder().embed(["red apples"]), 4)
    np.testing.assert_allclose(found.scores, sign * scores[0], rtol=1e-5)
    assert list(found.scores) == sorted(found.scores, reverse=True)
    await engine.aclose()


async def test_an_atomic_retriever_says_no_scores():
    named = {
        "default": corpus_retriever(),
        "words": CallableRetriever(lambda query, k: [query] * 3),
    }
    engine = WorkflowEngine(retriever=named)
    found = await engine.retrieve("red", 2, retriever="words")
    assert ([block.text for block in found.documents], found.scores) == (["red", "red"], None)
    with pytest.raises(GraphError, match="the engine has 'default', 'words'"):
        await engine.retrieve("red", retriever="other")
    with pytest.raises(GraphError, match="k"):
        await engine.retrieve("red", 0)
    with pytest.raises(InvalidRequestError, match="query must be a string, not 3"):
        await engine.retrieve(3)
    await engine.aclose()


async def test_a_node_may_name_its_own_model_and_needs_to_where_the_engine_has_none():
    class Says:
        def __init__(self, text):
            self.text = text

        async def stream(self, prompt, params):
            yield Piece(self.text, 1)

    def graph(llm):
        made = WorkflowGraph().add_generation("answer", prompt="{input}", llm=llm)
        return made.add_edge(START, "answer").add_edge("answer", END)

    engine = WorkflowEngine(Says("the engine's"))
    assert str(await engine.run(graph(None), "Who?")) == "the engine's"
    assert str(await engine.run(graph(Says("the node's")), "Who?")) == "the node's"
    engine = WorkflowEngine()
    assert str(await engine.run(graph(Says("the node's")), "Who?")) == "the node's"
    with pytest.raises(GraphError, match="node 'answer' asks the engine's model, but the engine"):
        await engine.run(graph(None), "Who?")
    with pytest.raises(GraphError, match="node 'answer': its llm must have stream"):
        graph("gpt")


@pytest.mark.parametrize("planner", [None, ReusePlanner()])
async def test_a_linked_graph_hands_its_model_the_documents_as_text(planner):
    seen = []

    async def answer(context):
        seen.append(context)
        yield Piece("Yes.", 1)

    texts = ["one text\n\n", "the documents above"]
    engine = WorkflowEngine(retriever=CallableRetriever(lambda q, k: texts[:k]), planner=planner)
    assert str(await engine.run(speculative_rag_graph("linked", answer, 2), "Which?")) == "Yes."
    texts = []
    await engine.run(speculative_rag_graph("linked", answer, 2), "Which?")
    assert seen == ["one text\n\n\n\nthe documents above", ""]


async def test_a_speculative_generation_runs_in_the_context_of_its_own_run():
    class Model(SteadyLLM):
        async def stream(self, prompt, params):
            question = prompt[-1]["content"].partition("<<")[2].partition(">>")[0]
            seen.append((question, current_scope().tenant))
            yield Piece("Yes.", 1)

    seen = []
    engine = WorkflowEngine(
        Model(), corpus_retriever(), options=WorkflowOptions(speculation="always")
    )

    async def ask(tenant):
        with request_context(tenant=tenant, conversation_id="c"):
            await engine.run(rag(2), tenant)

    for _ in range(2):  # the second time there is a last search to guess from
        await asyncio.gather(*(ask(f"t{number}") for number in range(8)))
    assert engine.metrics().speculation.committed == 8
    assert len(seen) == 16
    assert all(query == tenant for query, tenant in seen)
    await engine.aclose()


class Gated:
    def __init__(self):
        self.began = asyncio.Event()
        self.gate = asyncio.Event()
        self.threads = []

    async def retrieve(self, query, k):
        self.threads.append(threading.current_thread())
        self.began.set()
        if query == "wait":
            await self.gate.wait()
        return [query]


async def test_a_busy_engine_serves_other_threads_in_the_event_loop_that_it_works_in():
    gated = Gated()
    engine = WorkflowEngine(retriever=gated)
    waiting = asyncio.create_task(engine.retrieve("wait"))
    await gated.began.wait()

    def search(query):
        with request_context(tenant="t"):
            return sync_bridge.run(lambda: engine.retrieve(query), lasting=True)

    found = await asyncio.gather(*(asyncio.to_thread(search, f"q{n}") for n in range(4)))
    assert [one.documents[0].text for one in found] == ["q0", "q1", "q2", "q3"]
    assert set(gated.threads) == {threading.current_thread()}

    def events():
        graph = WorkflowGraph().add_retrieval("search", query="{input}")
        graph.add_edge(START, "search").add_edge("search", END)
        told = sync_bridge.iterate(lambda: engine.stream(graph, "q"), lasting=True)
        return [type(event).__name__ for event in told]

    told = "NodeStarted DocumentsFound NodeFinished RunFinished"
    assert await asyncio.to_thread(events) == told.split()
    with pytest.raises(InvalidRequestError, match="await the method that is"):
        search("from the very event loop")
    gated.gate.set()
    await waiting
    assert search("when idle").documents[0].text == "when idle"
    assert gated.threads[-1] is not threading.current_thread()
    assert engine.metrics().in_flight == 0


def test_a_search_in_another_loop_is_told_when_the_loop_that_served_it_ends():
    gated, errors = None, []
    began = threading.Event()

    async def first():
        nonlocal gated
        gated = Gated()
        engine = WorkflowEngine(retriever=gated)
        asyncio.create_task(engine.retrieve("wait"))  # noqa: RUF006  # the loop's end is the test
        await gated.began.wait()

        def search():
            try:
                began.set()
                sync_bridge.run(lambda: engine.retrieve("wait"), lasting=True)
            except EngineClosedError as error:
                errors.append(str(error))

        thread = threading.Thread(target=search)
        thread.start()
        while len(gated.threads) < 2:
            await asyncio.sleep(0.001)
        return engine, thread

    engine, thread = asyncio.run(first())
    thread.join(10)
    assert errors == [
        "the event loop that the engine was at work in has ended, and this run with it; run it "
        "again, or use the engine in one event loop only"
    ]
    assert asyncio.run(engine.retrieve("again")).documents[0].text == "again"


async def test_a_worker_that_fails_fails_who_waits_and_the_next_one_goes_on(monkeypatch):
    engine = WorkflowEngine(retriever=corpus_retriever())
    with monkeypatch.context() as broken:
        broken.setattr(ScanQueue, "next_batch", lambda *_, **__: 1 / 0)
        failed = await asyncio.gather(
            *(engine.retrieve(f"red {number}", 2) for number in range(4)), return_exceptions=True
        )
    assert all(isinstance(error, StageError) for error in failed)
    assert "ZeroDivisionError" in str(failed[0])
    found = await engine.retrieve("red apples", 4)
    assert list(found.documents) == plain_search("red apples", 4)
    await engine.aclose()


def test_searches_of_a_loop_that_has_ended_keep_no_worker_from_the_next_loop():
    engine = WorkflowEngine(retriever=corpus_retriever())

    async def leave():
        asyncio.ensure_future(engine.retrieve("green pears", 4))  # noqa: RUF006  # left alone
        await asyncio.sleep(0)

    async def search():
        return await engine.retrieve("red apples", 4)

    for _ in range(20):
        asyncio.run(leave())
        assert list(asyncio.run(search()).documents) == plain_search("red apples", 4)
    asyncio.run(engine.aclose())
