import re
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from workflow_graphs import NAMES, chain, looping, rag_graphs
from workflow_interpreter import Step, steps

from ctxreuse.workflow.errors import GraphError, RouterError, VisitLimitError
from ctxreuse.workflow.graph.builder import WorkflowGraph
from ctxreuse.workflow.graph.compiled import Graph
from ctxreuse.workflow.graph.nodes import END, START
from ctxreuse.workflow.runtime.workflow_run import certain_successor, next_wavefront, routed


def reading(variable, name="b", **options):
    graph = WorkflowGraph(**options)
    for one in "abc":
        graph.add_generation(
            one, prompt=f"{{{variable}}}" if one == name else "", output=f"of_{one}"
        )
    graph.add_edge(START, "a").add_edge("a", "b").add_edge("b", "c")
    return graph.add_edge("c", END)


def anywhere(**targets):
    return chain("a", "b").add_edge("a", lambda state: END, **targets)


def forked(one="docs", other="docs"):
    graph = WorkflowGraph()
    graph.add_retrieval("a", query="", output=one).add_retrieval("b", query="", output=other)
    return graph.add_edge(START, "a").add_edge(START, "b").add_edge("a", END).add_edge("b", END)


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (WorkflowGraph(name="mine").add_edge(START, END), "workflow 'mine' has no nodes; add some"),
        (WorkflowGraph().add_function("a", len).add_edge("a", END), "no edge leads from START"),
        (chain("a").add_edge("a", "b"), "'a' leads to 'b', which is no node; add it, or choose"),
        (chain("a").add_edge("a", START), "edge from 'a' leads to START, where runs begin; lead"),
        (chain("search").add_edge("serch", END), "choose one of 'search' (did you mean 'search'?)"),
        (chain("a").add_edge("a", len, ["a", "x", END]), "the router behind 'a' names 'x', which"),
        (chain("a").add_function("b", len, max_visits=1, otherwise="x"), "otherwise= of node 'b'"),
        (
            looping(a={"max_visits": 1, "otherwise": "b"}, b={"max_visits": 1, "otherwise": "a"}),
            "otherwise= of nodes 'a', 'b', 'a' leads back to where it came from; let it end at END",
        ),
        (chain("a").add_function("b", len).add_edge("b", END), "node 'b' is not reached from"),
        (chain("a").add_function("b", len).add_edge("a", "b"), "END cannot be reached from node"),
        (looping(), "nothing ends the cycle of nodes 'a', 'b'; give one of them max_visits="),
        (looping(c={"max_visits": 1}), "nothing ends the cycle of nodes 'a', 'b'; give one of"),
        (looping(b={"max_visits": 2, "otherwise": "a"}), "nothing ends the cycle of nodes 'a'"),
        (anywhere(), "the router behind 'a' may lead anywhere: give it targets=[...], or one of"),
        (chain("input"), "node 'input' writes 'input', which is an input; give it another output="),
        (forked(), "nodes 'a', 'b' run side by side and all write 'docs'; give them different"),
        (
            reading("doc", defaults={"docs": ""}),
            "the prompt of node 'b' reads {doc}, which nothing writes; there can be 'input', "
            "'docs', 'of_a', 'of_b', 'of_c' (did you mean 'docs'?). Correct the name, or give",
        ),
        (chain("a", answer="b"), "answer='b' is written by no node; choose one of 'a', 'input'"),
    ],
)
def test_a_graph_that_cannot_be_run_is_refused_with_node_key_and_remedy(graph, message):
    with pytest.raises(GraphError, match=re.escape(message)):
        graph.compile()


@pytest.mark.parametrize(
    "graph",
    [
        looping(a={"max_visits": 1}),
        looping(b={"max_visits": 2, "otherwise": "c"}),
        anywhere(targets=["b", END]),
        forked(other="more"),
        reading("of_a"),
        reading("of_c"),
        reading("style", inputs=["input", "style"]),
    ],
)
def test_a_graph_that_can_be_run_is_accepted(graph):
    assert graph.compile() is graph.compile()


@dataclass(frozen=True)
class Run:
    graph: Graph
    steps: list[Step]
    failure: type[Exception] | None = None


def by_visits(targets):
    return lambda state: targets[sum(map(state.visits, NAMES)) % len(targets)]


def run_of(builder):
    try:
        graph = builder.compile()
    except GraphError:
        assume(False)
    passed = []
    try:
        for step in steps(graph, "Why?", lambda asked: "said", lambda query, k: ()):
            passed.append(step)
            assert len(passed) <= 100
    except (RouterError, VisitLimitError) as error:
        assume(passed)
        return Run(graph, passed, type(error))
    return Run(graph, passed)


runs = rag_graphs(route=by_visits).map(run_of)


@given(runs)
def test_every_run_of_a_graph_that_validates_ends_within_its_limits(run):
    limits = [node.max_visits for node in run.graph.nodes.values()]
    assert len(run.steps) - 1 <= (sum(filter(None, limits)) + 1) * len(limits)
    for name, node in run.graph.nodes.items():
        assert node.max_visits is None or run.steps[-1].state.visits(name) <= node.max_visits
    assert (run.failure is None) == (run.steps[-1].wavefront == ())
    assert run.failure is not VisitLimitError or any(limits)


@given(runs)
def test_a_compiled_graph_leads_on_as_the_plain_interpreter_does(run):
    names, graph = (START,), run.graph
    following = [step.wavefront for step in run.steps] + [None] * (run.failure is not None)
    states = [step.state for step in run.steps]
    if run.failure is not None:
        last = run.steps[-1]
        writes = {graph.nodes[name].output: None for name in last.wavefront}
        states.append(last.state.commit(writes, last.wavefront))
    for wavefront, state in zip(following, states, strict=True):
        targets = [target for name in names for target in graph.edges[name].static]
        for name in names:
            for router in graph.edges[name].routers:
                targets += routed(graph, name, router, router.function(state))
        if wavefront is None:
            with pytest.raises(run.failure):
                next_wavefront(graph, targets, state)
        else:
            assert next_wavefront(graph, targets, state) == wavefront
            names = wavefront


@given(runs)
def test_a_stage_that_certainly_comes_next_does(run):
    for step, following in pairwise(run.steps):
        if len(step.wavefront) > 1:
            continue  # a node beside it may use up the visits of the next
        node = certain_successor(run.graph, step.wavefront[0], step.state)
        if node is not None:
            assert following.wavefront == (node.name,)


@pytest.mark.slow
def test_enough_random_graphs_validate_and_go_round():
    kinds = Counter()

    @settings(max_examples=100, database=None, derandomize=True)
    @given(runs)
    def count(run):
        visits = [run.steps[-1].state.visits(name) for name in run.graph.nodes]
        kinds["round"] += max(visits) > 1
        kinds["wide"] += any(len(step.wavefront) > 1 for step in run.steps)
        kinds["failed"] += run.failure is not None
        kinds["routed"] += any(edges.routers for edges in run.graph.edges.values())

    count()
    assert all(kinds[kind] >= 3 for kind in ("round", "wide", "failed", "routed")), kinds


@pytest.mark.parametrize("otherwise", [2, ["answer"], object])
def test_a_node_to_go_to_that_is_no_name_is_refused(otherwise):
    graph = WorkflowGraph().add_generation("answer", prompt="{input}", max_visits=1)
    graph.add_generation("again", prompt="{input}", max_visits=1, otherwise=otherwise)
    graph.add_edge(START, "answer").add_edge("answer", "again").add_edge("again", END)
    with pytest.raises(GraphError):
        graph.compile()


def test_a_graph_has_a_thousand_nodes_at_most():
    graph = WorkflowGraph(name="wide")
    for number in range(1_000):
        graph.add_function(f"n{number}", len).add_edge(START, f"n{number}")
        graph.add_edge(f"n{number}", END)
    assert len(graph.compile().nodes) == 1_000
    with pytest.raises(GraphError, match="'wide' has 1,000 nodes already, the most that there can"):
        graph.add_function("another", len)


def test_a_chain_of_visit_limits_is_followed_to_its_end_once():
    graph = WorkflowGraph()
    for number in range(500):
        graph.add_function(f"n{number}", len, max_visits=1, otherwise=f"n{number + 1}")
        graph.add_edge(f"n{number}", "n0")
    graph.add_function("n500", len).add_edge("n500", END).add_edge(START, "n0")
    assert graph.compile().answer == "n500"
