import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st
from workflow_engines import BLOCKS, SteadyLLM, in_virtual_time

from ctxreuse.context.fail_open import FailOpen
from ctxreuse.serving.aio.concurrency import BackgroundTasks
from ctxreuse.workflow.graph.builder import WorkflowGraph
from ctxreuse.workflow.graph.nodes import END, START, Generation
from ctxreuse.workflow.graph.state import Documents, State, Template
from ctxreuse.workflow.runtime.generations import GenerationRequest
from ctxreuse.workflow.runtime.services import (
    PreviewStability,
    RunContext,
    Services,
    WorkflowOptions,
)
from ctxreuse.workflow.runtime.speculation import SpeculativeGeneration

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
    assert 0.0 < stability.launch_at() <= 1.0


@given(st.integers(2, 31))
def test_what_always_happens_becomes_certain(part):
    stability = after([part / 32] * 300)
    assert stability.probability(part / 32) > 0.98
    assert stability.probability((part - 1) / 32) < 0.02
    assert stability.launch_at() == part / 32
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
        ("answer", 1, {"blocks": BLOCKS[:3]}),
        ("answer", 1, {"blocks": BLOCKS[:1]}),
        ("answer", 1, {"system": None}),
        ("answer", 1, {"params": {"n": 2}}),
        ("answer", 1, {"params": {}}),
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
