"""What the engine's methods promise: results, events, metrics, limits, sessions, tenants."""

import asyncio
from typing import Any

import pytest
from workflow_engines import (
    BLOCKS,
    EAGER,
    SteadyLLM,
    assert_idle,
    corpus_retriever,
    engine_over,
    executors_of,
    guess_first,
    in_virtual_time,
    of_function,
    plain_search,
    plainly,
    rag,
    virtual_time,
)

from ctxreuse import ContextBlock, ReusePlanner
from ctxreuse.context.blocks import text_digest
from ctxreuse.context.scope import request_context
from ctxreuse.errors import InvalidRequestError
from ctxreuse.planning.plan import Plan
from ctxreuse.workflow.engine import WorkflowEngine
from ctxreuse.workflow.errors import (
    DeadlineError,
    EngineClosedError,
    GraphError,
    StateKeyError,
    WorkflowError,
)
from ctxreuse.workflow.graph.builder import WorkflowGraph
from ctxreuse.workflow.graph.nodes import END, START
from ctxreuse.workflow.models.language_model import Piece
from ctxreuse.workflow.retrievers import CallableRetriever
from ctxreuse.workflow.runtime import services
from ctxreuse.workflow.runtime.events import (
    DocumentsFound,
    NodeFinished,
    NodeStarted,
    RunFinished,
    TextDelta,
)
from ctxreuse.workflow.runtime.services import WorkflowOptions
from ctxreuse.workflow.vector_search import executor
from ctxreuse.workflow.vector_search.handle import SearchRecord


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    told: list[Any] = []
    begin = executor.SearchExecutor.begin

    def watched(self: Any, text: str, k: int, due: float, record: Any, *rest: Any, **more: Any):
        told.append(record)
        return begin(self, text, k, due, record, *rest, **more)

    monkeypatch.setattr(executor.SearchExecutor, "begin", watched)
    return told


def kept_of(engine: WorkflowEngine, tenant: str) -> SearchRecord | None:
    return engine._services.sessions.get(tenant, (text_digest("'s'"), "default"))


class Asked(SteadyLLM):
    def __init__(self) -> None:
        super().__init__()
        self.prompts: list[Any] = []

    def stream(self, prompt: Any, params: Any) -> Any:
        self.prompts.append(prompt)
        return super().stream(prompt, params)


@virtual_time
async def test_inputs_are_given_by_name_and_missing_ones_are_told():
    graph = of_function(
        lambda state: f"{state['one']}, {state['other']}", inputs=("one", "other"), name="two"
    )
    async with engine_over() as engine:
        assert (await engine.run(graph, "a", other="b")).answer == "a, b"
        assert (await engine.run(graph, one="a", other="b")).answer == "a, b"
        with pytest.raises(StateKeyError, match="'two' was run without its input 'other'"):
            await engine.run(graph, "a")
        with pytest.raises(StateKeyError, match="'two' has no input 'third'"):
            await engine.run(graph, "a", other="b", third="c")
        metrics = engine.metrics()
        assert (metrics.runs, metrics.finished, metrics.failed) == (4, 2, 2)


class Thinking(SteadyLLM):
    async def stream(self, prompt: Any, params: Any) -> Any:
        for piece in ("<th", "ink>Why passage 3?", "</think>\n\n"):
            yield Piece(piece, 1)
        async for said in super().stream(prompt, params):
            yield said


@virtual_time
async def test_an_answer_behind_a_thought_that_the_chat_template_begins_may_name_the_tags():
    class Begun(SteadyLLM):
        async def stream(self, prompt: Any, params: Any) -> Any:
            for text in ("Why </thi", "nk>\n", "Be", "cause <think>."):
                yield Piece(text, 1)

    async with engine_over(llm=Begun()) as engine:
        assert (await engine.run(guess_first(), "Why")).answer == "Because <think>."


@pytest.mark.parametrize("model", [SteadyLLM, Thinking])
@pytest.mark.usefixtures("eager")
def test_events_come_in_order_and_end_with_the_result(model):
    async def main() -> list[Any]:
        async with engine_over(llm=model(), options=EAGER) as engine:
            events = [event async for event in engine.stream(guess_first(), "Why")]
            assert events[-1] == RunFinished(events[-1].result)
            assert events[-1].result.answer == plainly(guess_first(), "Why").answer
            return events

    events = in_virtual_time(main())
    plain = plainly(guess_first(), "Why").state
    texts = {"guess": "", "answer": ""}
    kinds = []
    for event in events[:-1]:
        if isinstance(event, TextDelta):
            texts[event.node] += event.text
        if not isinstance(event, TextDelta) or kinds[-1] != ("says", event.node):
            kinds.append(("says" if isinstance(event, TextDelta) else type(event), event.node))
        assert event.visit == 1
    assert texts == {"guess": plain["guess"], "answer": plain["answer"]}
    parts = (("guess", "says"), ("search", DocumentsFound), ("answer", "says"))
    assert kinds == [
        (kind, node) for node, part in parts for kind in (NodeStarted, part, NodeFinished)
    ]
    [found] = [event for event in events if isinstance(event, DocumentsFound)]
    assert found.documents == plain["docs"]


@virtual_time
async def test_the_first_failure_of_a_batch_cancels_the_rest_or_is_returned_in_its_place():
    def fail(state: Any) -> Any:
        raise ValueError("no")

    llm = SteadyLLM()
    async with engine_over(llm=llm) as engine:
        jobs = [(rag(), "Why"), (of_function(fail), "x"), (rag(), "Who")]
        with pytest.raises(Exception, match=r"node 'own' .* failed on visit 1 with"):
            await engine.arun_batch(jobs)
        assert llm.open == 0
        await assert_idle(engine)
        assert engine.metrics().cancelled == 2
        results = await engine.arun_batch(jobs, return_exceptions=True)
        kinds = [type(one).__name__ for one in results]
        assert kinds == ["WorkflowResult", "StageError", "WorkflowResult"]


@pytest.mark.parametrize("job", [rag(), ("graph",), "ab", (rag(), "x", "y")])
@virtual_time
async def test_a_job_that_is_no_pair_is_refused(job):
    async with engine_over() as engine:
        with pytest.raises(InvalidRequestError, match="a job must be a pair of a graph and"):
            await engine.arun_batch([job])


def test_an_engine_runs_batches_outside_of_event_loops_and_in_one_after_another():
    engine = WorkflowEngine(SteadyLLM(lambda: 0.0), corpus_retriever())
    jobs = [(graph, f"q {number}") for number in range(3) for graph in (rag(), guess_first())]
    given = [(rag(), {"input": "q 0"}), *jobs[1:]]
    for _ in range(2):
        results = engine.run_batch(given, progress=False)
        assert [one.answer for one in results] == [plainly(*job).answer for job in jobs]
    assert engine.run_batch([], progress=False) == []
    asyncio.run(engine.aclose())

    options = WorkflowOptions(max_in_flight=1)
    engine = WorkflowEngine(SteadyLLM(lambda: 0.0), corpus_retriever(), options=options)
    for _ in range(2):
        results = asyncio.run(engine.arun_batch([(rag(), f"q {number}") for number in range(3)]))
        assert len(results) == 3
    asyncio.run(engine.aclose())


@virtual_time
async def test_runs_beyond_the_limit_wait_for_their_turn_in_the_order_of_arrival():
    began: list[str] = []

    async def slow(state: Any) -> str:
        began.append(state["input"])
        await asyncio.sleep(1.0)
        return "done"

    async with engine_over(options=WorkflowOptions(max_in_flight=2)) as engine:
        running = [
            asyncio.ensure_future(engine.run(of_function(slow), str(number))) for number in range(5)
        ]
        await asyncio.sleep(0.5)
        metrics = engine.metrics()
        assert (metrics.in_flight, metrics.waiting, metrics.runs) == (2, 3, 5)
        running[2].cancel()
        await asyncio.sleep(0.1)
        assert engine.metrics().waiting == 2
        await asyncio.wait(running)
        assert began == ["0", "1", "3", "4"]


@virtual_time
async def test_a_wait_for_a_turn_counts_towards_deadline_and_seconds():
    async def slow(state: Any) -> str:
        await asyncio.sleep(1.0)
        return "done"

    async with engine_over(options=WorkflowOptions(max_in_flight=1)) as engine:
        results = await engine.arun_batch(
            [(of_function(slow), "x")] * 3, deadline_s=2.5, return_exceptions=True
        )
        first, second, third = results
        assert isinstance(third, DeadlineError)
        assert [round(one.seconds, 2) for one in (first, second)] == [1.0, 2.0]
        metrics = engine.metrics()
        assert (metrics.finished, metrics.failed, metrics.cancelled) == (2, 1, 0)


@virtual_time
async def test_an_engine_that_is_closed_ends_what_runs_and_takes_no_more():
    llm = SteadyLLM()
    engine = engine_over(llm=llm, options=WorkflowOptions(max_in_flight=2))
    running = [asyncio.ensure_future(engine.run(guess_first(), f"q {n}")) for n in range(4)]
    await asyncio.sleep(0.02)
    await engine.aclose()
    assert llm.open == 0
    await assert_idle(engine)
    for run in running:
        with pytest.raises(EngineClosedError, match="closed while the run was under way"):
            await run
    assert engine.metrics().cancelled == 4
    with pytest.raises(EngineClosedError, match="the engine is closed; make a new one"):
        await engine.run(rag(), "Why")
    await engine.aclose()


@virtual_time
async def test_who_waits_for_a_run_goes_on_when_the_engine_is_closed():
    engine = engine_over()
    told = []

    async def ask() -> None:
        try:
            await engine.run(rag(), "Why")
        except EngineClosedError as error:
            told.append(error)
        await asyncio.sleep(100.0)
        told.append("went on")

    asking = asyncio.ensure_future(ask())
    await asyncio.sleep(0.001)
    await engine.aclose()
    assert len(told) == 1
    assert asyncio.get_running_loop().time() < 1.0
    await asking
    assert told[1:] == ["went on"]


@virtual_time
async def test_a_run_inside_a_node_of_another_one_is_a_run_of_its_own():
    async with engine_over() as engine:
        seen = []

        async def inner(state: Any) -> Any:
            answer = (await engine.run(rag(), "Why")).answer
            seen.append(engine.metrics().in_flight)
            return answer

        result = await engine.run(of_function(inner), "x")
        assert result.answer == plainly(rag(), "Why").answer
        assert seen == [1]
        closing = asyncio.ensure_future(engine.run(of_function(inner), "x"))
        await asyncio.sleep(0.001)
        await engine.aclose()
        with pytest.raises(WorkflowError, match="closed while the run was under way"):
            await closing
        await assert_idle(engine)


@pytest.mark.parametrize("deadline_s", [-1, float("nan"), "soon"])
@virtual_time
async def test_a_deadline_that_is_no_time_is_refused(deadline_s):
    async with engine_over() as engine:
        with pytest.raises(InvalidRequestError, match="deadline_s must be a number from 0"):
            await engine.run(rag(), "Why", deadline_s=deadline_s)
        assert engine.metrics().runs == 0


@virtual_time
async def test_metrics_count_what_was_done():
    options = WorkflowOptions(speculation="off", speculative_retrieval=False, workers=1)
    async with engine_over(options=options) as engine:
        for question in ("Why", "Who"):
            await engine.run(guess_first(), question)
        metrics = engine.metrics()
        assert (metrics.runs, metrics.finished, metrics.failed, metrics.cancelled) == (2, 2, 0, 0)
        assert (metrics.in_flight, metrics.waiting, metrics.generations) == (0, 0, 4)
        assert metrics.searches.searches == 2
        probed = metrics.searches.pairs
        assert 2 <= probed <= 24
        assert metrics.searches.clusters <= probed
        assert metrics.speculation.launched == metrics.speculation.searches == 0


@pytest.mark.usefixtures("eager")
@virtual_time
async def test_a_timeline_shows_each_stage_and_what_became_of_speculation():
    async with engine_over(options=EAGER) as engine:
        for number in range(6):
            await engine.run(rag(), f"q {number}")
        spans = list(engine.timeline())
        speculation = engine.metrics().speculation
        done = [(one.run, one.node, one.kind) for one in spans if one.outcome == "done"]
        assert done == [
            (run, node, kind)
            for run in range(1, 7)
            for node, kind in (("search", "retrieval"), ("answer", "generation"))
        ]
        outcomes = [one.outcome for one in spans]
        assert outcomes.count("committed") == speculation.committed > 0
        assert outcomes.count("wasted") == speculation.wasted_prompts > 0
        assert all(one.began_s <= one.ended_s for one in spans)


@pytest.mark.usefixtures("eager")
def test_a_speculation_that_is_right_makes_the_run_faster():
    async def seconds(options: WorkflowOptions) -> list[float]:
        async with engine_over(options=options) as engine:
            return [(await engine.run(rag(k=1), f"q {number}")).seconds for number in range(10)]

    eager = in_virtual_time(seconds(EAGER))
    patient = in_virtual_time(seconds(WorkflowOptions(speculation="off", workers=2)))
    assert sum(eager) < sum(patient)


@virtual_time
async def test_the_last_search_of_a_session_says_where_the_next_one_looks_first(records):
    options = WorkflowOptions(speculative_retrieval=False)
    async with engine_over(options=options) as engine:
        await engine.run(rag(), "Why is it", session="s")
        first = kept_of(engine, "")
        assert first is not None
        assert [f"d{number}" for number in first.ids[:3]] == [
            block.id for block in plain_search("Why is it", 3)
        ]
        await engine.run(rag(), "Why was it", session="s")
        await engine.run(rag(), "Why was it", session="other")
        await engine.run(rag(), "Why was it", session="s", tenant="another")
        await engine.run(rag(), "Why was it")
        with request_context(tenant="", conversation_id="s"):
            await engine.run(rag(), "Why will it be")
        known = [number for number, record in enumerate(records) if record is not None]
        assert (known, len(records)) == ([1, 5], 6)
        assert records[1] is first


@virtual_time
async def test_a_tenants_many_sessions_take_no_other_tenants_away(monkeypatch):
    monkeypatch.setattr(services, "_MOST_SESSIONS", 6)
    monkeypatch.setattr(services, "_MOST_SESSION_BYTES", 5_000)
    async with engine_over() as engine:
        await engine.run(rag(), "Why is it", session="s", tenant="quiet")
        for number in range(20):
            session = f"{number % 15}" * 100
            await engine.run(rag(), "Why is it", session=session, tenant="loud")
            parts = engine.metrics().parts
            assert not any(part.entries > part.bound for part in parts.values())
        assert parts["sessions"].entries > 2
        assert parts["session_bytes"].entries > 1_000
        assert parts["timeline"].entries
        assert kept_of(engine, "quiet") is not None


def test_the_work_for_a_tenant_does_not_tell_whether_another_has_asked_the_same():
    """Neither vectors nor results are kept by text, so times and counters cannot tell, either."""

    async def work_of_b(query_of_a: str) -> tuple[list[list[str]], int, int, int]:
        options = WorkflowOptions(speculation="always", workers=1)
        async with engine_over(options=options) as engine:
            await engine.run(rag(), query_of_a, session="s", tenant="a")
            embedded = engine._services.executors["default"].retriever._embedder.batches
            embedded.clear()
            before = engine.metrics()
            await engine.run(rag(), "Why is it", session="s", tenant="b")
            after = engine.metrics()
        searches = after.searches.pairs - before.searches.pairs
        clusters = after.searches.clusters - before.searches.clusters
        launched = after.speculation.launched - before.speculation.launched
        return embedded, searches, clusters, launched

    same, other = (in_virtual_time(work_of_b(query)) for query in ("Why is it", "Where was she"))
    assert same == other
    assert same[0] == [["Why is it"]]


@virtual_time
async def test_a_search_right_behind_another_one_knows_what_that_has_found(records):
    graph = WorkflowGraph()
    for name in ("first", "second"):
        graph.add_retrieval(name, query=f"{{input}} {name}", k=3, output=name)
    graph.add_edge(START, "first").add_edge("first", "second").add_edge("second", END)
    async with engine_over() as engine:
        await engine.run(graph, "Why", session="s")
        kept = kept_of(engine, "")
        assert kept is not None
        assert kept.vectors is not None
        for record, query in ((records[1], "Why first"), (kept, "Why second")):
            assert [BLOCKS[number] for number in record.ids[:3]] == plain_search(query, 3)
    assert records[0] is None


@virtual_time
async def test_each_tenant_is_planned_for_on_its_own():
    llm = Asked()
    plain = WorkflowOptions(speculation="off")
    async with engine_over(llm=llm, planner=ReusePlanner(), options=plain) as engine:
        await engine.run(rag(), "Why", tenant="one")
        with request_context(tenant="two"):
            await engine.run(rag(), "Why")
        assert engine.metrics().planning_failures == 0
    plans = llm.prompts
    assert all(isinstance(plan, Plan) for plan in plans)
    assert [plan.request.tenant for plan in plans] == ["one", "two"]
    assert [plan.expected_cached_tokens for plan in plans] == [0, 0]


@virtual_time
async def test_documents_that_were_sent_before_come_in_the_same_order_again():
    blocks = [
        ContextBlock(id=f"d{number}", text=200 * f"passage {number}. ") for number in range(3)
    ]
    llm = Asked()
    retriever = CallableRetriever(lambda query, k: blocks if query == "first" else blocks[::-1])
    async with engine_over(retriever, llm, planner=ReusePlanner()) as engine:
        await engine.run(rag(), "first")
        result = await engine.run(rag(), "second")
        assert [block.id for block in result.state["docs"]] == ["d2", "d1", "d0"]
    plans = llm.prompts
    assert [[block.id for block in plan.blocks] for plan in plans] == 2 * [["d0", "d1", "d2"]]


@virtual_time
async def test_a_node_asks_the_retriever_that_it_names():
    graph = WorkflowGraph(name="both")
    graph.add_retrieval("near", query="{input}", k=2, output="near")
    graph.add_retrieval("words", query="{input}", k=2, output="words", retriever="keyword")
    for name in ("near", "words"):
        graph.add_edge(START, name).add_edge(name, END)
    retrievers = {
        "default": corpus_retriever(),
        "keyword": CallableRetriever(lambda query, k: [f"{query} {number}" for number in range(9)]),
    }
    async with engine_over(retrievers) as engine:
        result = await engine.run(graph, "Why")
        assert list(result.state["near"]) == plain_search("Why", 2)
        assert [block.text for block in result.state["words"]] == ["Why 0", "Why 1"]
        assert len(executors_of(engine)) == 1
    async with engine_over(retrievers["default"]) as engine:
        with pytest.raises(GraphError, match="asks retriever 'keyword'; the engine has 'default'"):
            await engine.run(graph, "Why")


@pytest.mark.usefixtures("eager")
@virtual_time
async def test_the_text_that_a_search_was_begun_with_counts_if_it_is_the_query():
    options = WorkflowOptions(speculation="off")
    async with engine_over(options=options) as engine:
        for number in range(12):
            question = f"question {number}"
            result = await engine.run(guess_first(), question)
            assert dict(result.state) == dict(plainly(guess_first(), question).state)
        speculation = engine.metrics().speculation
        assert speculation.searches > speculation.searches_committed > 0
        assert speculation.hints > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"llm": "gpt"}, r"llm must have stream\(prompt, params\), not be 'gpt'"),
        ({"retriever": 5}, r"retriever must have retrieve\(query, k\), not be 5"),
        ({"retriever": {"": corpus_retriever()}}, "a retriever's name must be a string, not ''"),
        ({"retriever": {"a": 1}}, r"retriever 'a' must have retrieve\(query, k\), not be 1"),
        ({"planner": "mine"}, "planner must be a ReusePlanner or None, not 'mine'"),
        ({"options": {}}, r"options must be WorkflowOptions, not \{\}"),
    ],
)
def test_an_engine_is_not_made_of_something_else(arguments, message):
    with pytest.raises(InvalidRequestError, match=message):
        WorkflowEngine(**{"llm": SteadyLLM(), **arguments})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_in_flight": 0}, "max_in_flight must be an integer from 1, not 0"),
        ({"max_generations": -1}, "max_generations must be an integer from 0, not -1"),
        ({"max_retrievals": True}, "max_retrievals must be an integer from 0, not True"),
        ({"workers": 0}, "workers must be an integer from 1 or None, not 0"),
        ({"max_wasted_share": 1.1}, "max_wasted_share must be a number from 0 to 1, not 1.1"),
        ({"speculation": "often"}, "there is no rule of speculation 'often'"),
        *(({"speculation": one}, "'always', 'off'") for one in (None, "Always", 1, ["off"])),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(InvalidRequestError, match=message):
        WorkflowOptions(**options)


@virtual_time
async def test_prompts_that_speak_of_numbers_show_what_was_found_in_its_order():
    found = CallableRetriever(
        lambda query, k: [f"{letter} says: " + letter * 400 for letter in query]
    )
    for words, shown in (("<<{input}>>", "abc"), ("Which document number? <<{input}>>", "cab")):
        llm = Asked()
        graph = WorkflowGraph().add_retrieval("docs", query="{input}")
        graph.add_generation("answer", prompt="{docs}\n\n" + words)
        graph.add_edge(START, "docs").add_edge("docs", "answer").add_edge("answer", END)
        async with engine_over(found, llm, planner=ReusePlanner()) as engine:
            for question in ("abc", "cab"):
                await engine.run(graph, question)
        assert "".join(block.text[0] for block in llm.prompts[1].blocks) == shown


@pytest.mark.parametrize("streams", ["invoke", "stream_chat"])
def test_models_of_frameworks_are_refused_with_what_to_pass(streams):
    model: Any = type("Model", (SteadyLLM,), {streams: None})()
    with pytest.raises(InvalidRequestError, match=r"LangChainLLM\(llm\) or LlamaIndexLLM\(llm\)"):
        WorkflowEngine(model)
