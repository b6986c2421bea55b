"""Whatever overlaps with whatever: runs give what plain sequential execution gives."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
import pytest
from example_counts import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from ivf_helpers import METRICS
from workflow_engines import (
    BLOCKS,
    Clock,
    Outcome,
    SteadyLLM,
    answer_to,
    assert_idle,
    assert_in_order,
    corpus_retriever,
    executing,
    guess_first,
    in_virtual_time,
    plain_answer,
    plain_search,
    rag,
    rounds,
)
from workflow_graphs import rag_graphs
from workflow_interpreter import interpret

from ctxreuse import ReusePlanner
from ctxreuse.context.fail_open import FailOpen
from ctxreuse.serving.aio.concurrency import BackgroundTasks
from ctxreuse.workflow.engine import WorkflowEngine
from ctxreuse.workflow.errors import GraphError, RouterError, VisitLimitError
from ctxreuse.workflow.graph.builder import WorkflowGraph
from ctxreuse.workflow.graph.compiled import Graph
from ctxreuse.workflow.graph.nodes import END, START, Generation
from ctxreuse.workflow.graph.state import Documents, State, Template
from ctxreuse.workflow.models.emulated_llm import EmulatedLLM
from ctxreuse.workflow.runtime import workflow_run
from ctxreuse.workflow.runtime.events import RunFinished
from ctxreuse.workflow.runtime.generations import GenerationRequest
from ctxreuse.workflow.runtime.services import (
    PreviewStability,
    RunContext,
    Services,
    WorkflowOptions,
)
from ctxreuse.workflow.runtime.speculation import LaunchedGeneration, SpeculativeGeneration
from ctxreuse.workflow.vector_search import scheduler

QUESTIONS = ("Why is it so", "Why was it so", "Who was it", "Where is it", "It")


@dataclass(frozen=True)
class Job:
    graph: Graph
    question: str
    arrives_s: float
    session: str | None
    patience_s: float | None


@dataclass(frozen=True)
class Scenario:
    jobs: tuple[Job, ...]
    options: WorkflowOptions
    metric: str
    hot: tuple[int, int] | None
    planned: bool
    emulated: bool
    forced: bool
    seed: int


@st.composite
def compiled(draw: Any) -> Graph:
    try:
        return draw(rag_graphs(retrievers=(None, None, None, "atomic"))).compile()
    except GraphError:
        assume(False)
        raise


ready = st.sampled_from([graph.compile() for graph in (rag(), guess_first(), rounds())])


@st.composite
def scenarios(draw: Any, impatient: bool = False) -> Scenario:
    graphs = draw(st.lists(compiled() | ready, min_size=1, max_size=3))
    seconds = st.sampled_from((0.0, 0.0, 0.003, 0.05, 0.4))
    job = st.builds(
        Job,
        graph=st.sampled_from(graphs),
        question=st.sampled_from(QUESTIONS),
        arrives_s=seconds,
        session=st.sampled_from((None, "one", "one", "two")),
        patience_s=st.sampled_from((None, 0.001, 0.02, 0.1)) if impatient else st.none(),
    )
    options = st.builds(
        WorkflowOptions,
        max_in_flight=st.sampled_from((256, 256, 2)),
        reorder=st.booleans(),
        speculation=st.sampled_from(("adaptive", "always", "off")),
        speculative_retrieval=st.booleans(),
        max_generations=st.sampled_from((16, 1)),
        max_wasted_share=st.sampled_from((1.0, 1.0, 0.0)),
        workers=st.sampled_from((1, 2, 3)),
    )
    return Scenario(
        tuple(draw(st.lists(job, min_size=1, max_size=8))),
        draw(options),
        draw(st.sampled_from(tuple(METRICS))),
        draw(st.sampled_from((None, (3_000, 1), (20_000, 2)))),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.integers(0, 2**16)),
    )


class AtomicCorpus:
    def __init__(self, metric: str, pause: Any) -> None:
        self._metric = metric
        self._pause = pause

    async def retrieve(self, query: str, k: int) -> Any:
        await asyncio.sleep(self._pause())
        return plain_search(query, k, self._metric)


class Watched:
    """An engine, and what it was seen to do."""

    def __init__(self, scenario: Scenario) -> None:
        draw = Random(scenario.seed)
        self.llm: Any = SteadyLLM(lambda: draw.choice((0.0, 0.001, 0.01, 0.1)))
        if scenario.emulated:
            self.llm = EmulatedLLM(answer_to, chunk_tokens=2)

        def pause() -> float:
            return draw.choice((0.0, 0.001, 0.02, 0.3))

        self.engine = WorkflowEngine(
            self.llm,
            {
                "default": corpus_retriever(scenario.metric, scenario.hot),
                "atomic": AtomicCorpus(scenario.metric, pause),
            },
            ReusePlanner() if scenario.planned else None,
            options=scenario.options,
            execute=executing(pause),
            clock=Clock(lambda: draw.choice((1e-6, 1e-5))),
        )

    @property
    def open_streams(self) -> int:
        return self.llm.requests if isinstance(self.llm, EmulatedLLM) else self.llm.open


def expected(job: Job, scenario: Scenario) -> Outcome | str:
    """Return what plain execution gives; where it fails, the name of the node, maybe empty."""

    def llm(asked: Any) -> str:
        # the emulated model's answers know no parameters
        return plain_answer(replace(asked, params={}) if scenario.emulated else asked)

    def search(query: str, k: int) -> Any:
        return plain_search(query, k, scenario.metric)

    try:
        run = interpret(job.graph, job.question, llm, search, {"atomic": search})
    except (RouterError, VisitLimitError) as error:
        return error.node
    return Outcome.of(job.graph, run.state, run.visits, run.answer)


async def outcome(engine: WorkflowEngine, job: Job) -> Outcome | str | None:
    """Return what a run gives, checked for the order of its events; None if it was given up."""
    await asyncio.sleep(job.arrives_s)
    events: list[Any] = []

    try:
        async with asyncio.timeout(job.patience_s):
            stream = engine.stream(job.graph, job.question, session=job.session)
            events.extend([event async for event in stream])
    except TimeoutError:
        return None
    except (RouterError, VisitLimitError) as error:
        return error.node
    *shown, last = events
    assert isinstance(last, RunFinished)
    assert_in_order(shown)
    result = last.result
    return Outcome.of(job.graph, result.state, result.visited, result.answer)


@contextmanager
def interference(scenario: Scenario) -> Iterator[None]:
    """Draw how long sub-stages are; where forced, launch from whatever there is."""
    draw = Random(scenario.seed + 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            scheduler, "sub_stage_s", lambda *_, **__: draw.choice((0.0, 1e-6, 2e-5, 1e-4, 1.0))
        )
        patch.setattr(workflow_run, "_SEARCH_AT", (0.03, 0.1, 0.2))  # answers are of few words here
        if scenario.forced:
            patch.setattr(
                PreviewStability, "launch_at", property(lambda self: 0.01, lambda *_: None), False
            )
            patch.setattr(PreviewStability, "is_worth_it", lambda self, progress: True)
            patch.setattr(PreviewStability, "is_recalled_worth_it", lambda self: True)
        yield


def run_all(scenario: Scenario) -> tuple[list[Any], Watched]:
    """Return what the runs give; nothing of them may be left."""

    async def main() -> Any:
        watched = Watched(scenario)
        async with watched.engine as engine:
            outcomes = await asyncio.gather(*(outcome(engine, job) for job in scenario.jobs))
            await assert_idle(engine)
        assert not watched.open_streams
        metrics = engine.metrics()
        assert metrics.runs == metrics.finished + metrics.failed + metrics.cancelled
        speculation = metrics.speculation
        assert speculation.launched == speculation.committed + speculation.wasted_prompts
        assert not engine._services.speculating.faults
        assert not metrics.planning_failures
        return outcomes, watched

    with interference(scenario):
        return in_virtual_time(main())


@examples(60)
@given(scenarios())
def test_runs_give_what_plain_execution_gives(scenario):
    outcomes, _ = run_all(scenario)
    assert outcomes == [expected(job, scenario) for job in scenario.jobs]


@examples(50)
@given(scenarios(impatient=True))
def test_runs_that_are_given_up_at_any_time_leave_nothing_and_disturb_nobody(scenario):
    outcomes, _ = run_all(scenario)
    for job, given_ in zip(scenario.jobs, outcomes, strict=True):
        if given_ is not None:
            assert given_ == expected(job, scenario)
        else:
            assert job.patience_s is not None


@examples(25)
@given(scenarios())
def test_a_speculative_answer_is_committed_only_to_the_request_that_it_was_asked(scenario):
    commit = SpeculativeGeneration.commit

    def checked(self: Any, node: str, visit: int, request: Any) -> Any:
        before: LaunchedGeneration | None = self._launched
        answer = commit(self, node, visit, request)
        if answer is not None:
            assert before is not None
            assert answer is before.answer
            assert (before.node.name, before.visit) == (node, visit)
            asked = answer.request
            assert repr((asked.query, asked.system, dict(asked.params))) == repr(
                (request.query, request.system, dict(request.params))
            )
            assert [(one.id, one.text) for one in asked.blocks] == [
                (one.id, one.text) for one in request.blocks
            ]
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SpeculativeGeneration, "commit", checked)
        outcomes, _ = run_all(scenario)
    assert outcomes == [expected(job, scenario) for job in scenario.jobs]


@pytest.mark.slow
def test_enough_random_scenarios_speculate_split_and_go_round():
    kinds: Counter[str] = Counter()

    @settings(max_examples=80, database=None, derandomize=True)
    @given(scenarios())
    def count(scenario: Scenario) -> None:
        outcomes, watched = run_all(scenario)
        metrics = watched.engine.metrics()
        speculation = metrics.speculation
        kinds["committed"] += speculation.committed > 0
        kinds["wasted"] += speculation.wasted_prompts > 0
        kinds["searched ahead"] += speculation.searches > 0
        kinds["searched ahead rightly"] += speculation.searches_committed > 0
        kinds["hinted"] += speculation.hints > 0
        kinds["split"] += metrics.searches.batches > metrics.searches.searches > 0
        kinds["shared"] += metrics.searches.pairs > metrics.searches.clusters
        kinds["round"] += any(
            isinstance(one, Outcome) and max(one.visits.values()) > 1 for one in outcomes
        )
        tier = watched.engine._retrievers["default"].hot
        kinds["swapped"] += tier is not None and tier.counters.swaps > 1

    count()
    assert len(kinds) == 9, kinds
    assert min(kinds.values()) >= 2, kinds


parts = st.floats(0.0, 1.0)


def after(changes: Any) -> PreviewStability:
    stability = PreviewStability()
    for changed_at in changes:
        stability.observe(changed_at)
    return stability


@examples(60)
@given(st.lists(parts, max_size=60))
def test_a_later_preview_is_never_less_likely_to_be_final(changes):
    stability = after(changes)
    probabilities = [stability.probability(progress) for progress in np.linspace(0.0, 1.0, 50)]
    assert probabilities == sorted(probabilities)
    assert probabilities[0] >= 0.0
    assert probabilities[-1] == pytest.approx(1.0)
    assert 0.0 < stability.launch_at <= 1.0


@given(st.integers(2, 31))
def test_what_always_happens_becomes_certain(part):
    stability = after([part / 32] * 300)
    assert stability.probability(part / 32) > 0.98
    assert stability.probability((part - 1) / 32) < 0.02
    assert stability.launch_at == part / 32
    assert stability.is_worth_it(part / 32)
    assert not stability.is_worth_it((part - 0.5) / 32)


def test_nothing_is_launched_where_previews_were_hardly_ever_final_of_late():
    stability = after([1.0] * 300)
    assert not any(stability.is_worth_it(progress) for progress in np.linspace(0.0, 0.99, 50))
    stability = after([1.0] * 300 + [0.1] * 300)
    assert stability.probability(0.2) > 0.98


def test_recalled_results_are_worth_it_once_they_were_right_more_often_than_waiting_gains():
    stability = PreviewStability()
    assert not stability.is_recalled_worth_it()
    for _ in range(100):
        stability.observe_recalled(True)
    assert stability.is_recalled_worth_it()
    for _ in range(100):
        stability.observe_recalled(False)
    assert not stability.is_recalled_worth_it()


NODE = Generation(
    name="answer",
    prompt=Template.parse("<<{input}>> {docs}"),
    output="answer",
    system=Template.parse("Be brief."),
    params={"n": 1},
)

GRAPH = WorkflowGraph().add_function("any", len).add_edge(START, "any").add_edge("any", END)


def launched(
    test: Callable[[SpeculativeGeneration, Services, SteadyLLM, GenerationRequest], Any],
    **options: Any,
) -> None:
    """Have a test look at a speculation that was launched, or tried to be."""

    async def main() -> None:
        llm = SteadyLLM()
        clock = asyncio.get_running_loop().time
        services = Services(llm, {}, None, WorkflowOptions(**options), None, clock)
        background = BackgroundTasks(FailOpen("tests"))
        ahead = SpeculativeGeneration(RunContext(services, GRAPH.compile(), print, 1), background)
        state = State({"input": "Why"}).overlay({"docs": Documents(BLOCKS[:2])})
        ahead.launch(NODE, state, (0, 1))
        await asyncio.sleep(0.015)
        test(ahead, services, llm, GenerationRequest.of(NODE, state))
        ahead.drop()
        await background.wait()
        for answer in list(services.generations._under_way):
            await answer.cancel()
        await asyncio.sleep(0)
        assert llm.open == len(services.generations) == 0

    in_virtual_time(main())


@pytest.mark.parametrize(
    ("node", "visit", "changes"),
    [
        ("other", 1, {}),
        ("answer", 2, {}),
        ("answer", 1, {"query": "Why?"}),
        ("answer", 1, {"blocks": BLOCKS[1::-1]}),
        ("answer", 1, {"system": None}),
        ("answer", 1, {"params": {"n": 2}}),
        ("answer", 1, {"llm": SteadyLLM()}),
    ],
)
def test_any_other_request_gets_none(node, visit, changes):
    def test(ahead: Any, services: Any, llm: Any, request: GenerationRequest) -> None:
        values = {name: getattr(request, name) for name in request.__slots__}
        other = GenerationRequest(**{**values, **changes})
        assert (other == request) == (not changes)
        assert ahead.commit(node, visit, other) is None
        assert ahead.ids is None
        assert services.speculation.committed == 0

    launched(test)


@pytest.mark.parametrize("options", [{"max_generations": 0}, {"max_wasted_share": 0.0}])
def test_nothing_is_launched_beyond_the_limits(options):
    def test(ahead: Any, services: Any, llm: Any, request: GenerationRequest) -> None:
        if "max_wasted_share" in options:
            assert services.speculation.launched == 1  # nothing has been wasted yet
            ahead.drop()
            services.speculation.wasted_tokens = 1
            state = State({"input": "Why"}).overlay({"docs": Documents(BLOCKS[:2])})
            assert not ahead.launch(NODE, state, (0, 1))
        assert ahead.ids is None

    launched(test, **options)
