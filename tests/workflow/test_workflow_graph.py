import re

import pytest
from workflow_graphs import chain, looping

from ctxreuse.workflow.errors import GraphError, RouterError
from ctxreuse.workflow.graph.builder import WorkflowGraph
from ctxreuse.workflow.graph.compiled import Router
from ctxreuse.workflow.graph.nodes import END, START
from ctxreuse.workflow.graph.state import State
from ctxreuse.workflow.runtime.workflow_run import (
    certain_successor,
    initial_state,
    next_wavefront,
    routed,
)


def visited(**visits):
    return State(visits=visits)


def test_a_graph_is_compiled_once_until_something_is_added():
    builder = chain("a")
    first = builder.compile()
    assert builder.compile() is first
    builder.add_function("b", len).add_edge("a", "b").add_edge("b", END)
    assert list(builder.compile().nodes) == ["a", "b"]
    assert list(first.nodes) == ["a"]
    with pytest.raises(GraphError, match="node 'c' is not reached"):
        builder.add_function("c", len).compile()
    assert first.edges["a"].static == (END,)


def test_a_compiled_graph_cannot_be_changed():
    params = {"max_tokens": 9}
    graph = WorkflowGraph().add_generation("a", prompt="", params=params)
    graph = graph.add_edge(START, "a").add_edge("a", END).compile()
    params["max_tokens"] = 1
    assert graph.nodes["a"].params == {"max_tokens": 9}
    for mapping in (graph.nodes, graph.edges, graph.defaults, graph.nodes["a"].params):
        with pytest.raises(TypeError):
            mapping["a"] = None
    with pytest.raises(AttributeError):
        graph.answer = "b"
    with pytest.raises(AttributeError):
        graph.nodes["a"].name = "b"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda g: g.add_function("", len), "a node's name must be a string, not empty and"),
        (lambda g: g.add_retrieval(END, query=""), "neither START nor END, not '__end__' (str)"),
        (lambda g: g.add_function("a", len).add_function("a", len), "node 'a' is there already"),
        (lambda g: g.add_function("my node", len), "node 'my node' has the key 'my node' (str)"),
        (
            lambda g: g.add_function("a" * 1000, len, output=""),
            f"'{'a' * 58}… has the key '' (str)",
        ),
        (lambda g: g.add_retrieval("a", query="", k=0), "k of node 'a' must be an integer from 1"),
        (lambda g: g.add_retrieval("a", query="", retriever=""), "its retriever must be a name"),
        (lambda g: g.add_function("a", len, max_visits=2.0), "max_visits of node 'a' must be an"),
        (lambda g: g.add_function("a", len, otherwise=END), "otherwise= without max_visits=; give"),
        (lambda g: g.add_function("a", "len"), "node 'a': its function must be callable, not"),
        (lambda g: g.add_generation("a", prompt=None), "the prompt of node 'a' must be a string"),
        (lambda g: g.add_generation("a", prompt="", system="{x.y}"), "the system of node 'a' has"),
        (lambda g: g.add_generation("a", prompt="", params=[1]), "node 'a': its params cannot be"),
        (lambda g: g.add_generation("a", prompt="", params={"n": 2}), "n must be 1, not 2 (int)"),
        (lambda g: g.add_edge(END, "a"), "an edge cannot come from END, where runs end"),
        (lambda g: g.add_edge(0, 1), "an edge comes from a node's name or START, not 0 (int)"),
        (lambda g: g.add_edge("a", 1), "the edge from 'a' leads to 1 (int); give a node's name"),
        (lambda g: g.add_edge("a", "b", targets=["b"]), "has targets=, which only a router has"),
        (lambda g: g.add_edge("a", len, targets="b"), "behind 'a' must be a list of names, not"),
        (lambda g: g.add_edge("a", len, targets=[]), "targets= of the router behind 'a' is empty"),
        (lambda g: g.add_edge("a", len, targets=[1]), "the router behind 'a' holds 1 (int); give"),
        (lambda g: WorkflowGraph(name=""), "a workflow's name must be a string and not empty"),
        (lambda g: WorkflowGraph(inputs="input"), "inputs must be a list of keys, not 'input'"),
        (lambda g: WorkflowGraph(inputs=()), "inputs is empty; name at least one key"),
        (lambda g: WorkflowGraph(inputs=["my input"]), "give a name of letters, digits and"),
        (lambda g: WorkflowGraph(defaults={1: 2}), "defaults has the key 1 (int), which no"),
        (lambda g: WorkflowGraph(answer="no key"), "answer has the key 'no key' (str), which no"),
        (lambda g: WorkflowGraph(defaults=["a"]), "defaults must be a dict of keys and values"),
        (lambda g: WorkflowGraph(defaults={"a": (one for one in "a")}), "'a' cannot be copied for"),
    ],
)
def test_a_wrong_argument_is_refused_when_it_is_given(build, message):
    with pytest.raises(GraphError, match=re.escape(message)):
        build(WorkflowGraph())


def test_branches_may_write_one_key_where_a_router_chooses_between_them():
    graph = WorkflowGraph().add_retrieval("web", query="").add_retrieval("wiki", query="")
    graph.add_edge(START, lambda state: "web", targets=["web", "wiki"])
    graph = graph.add_edge("web", END).add_edge("wiki", END).compile()
    (router,) = graph.edges[START].routers
    assert next_wavefront(graph, routed(graph, START, router, "wiki"), State()) == ("wiki",)
    with pytest.raises(RouterError, match="'web', 'wiki' would run side by side and both write"):
        next_wavefront(graph, routed(graph, START, router, ["wiki", "web"]), State())


@pytest.mark.parametrize(
    ("targets", "returned", "message"),
    [
        (None, "x", "returned 'x' (str); it may lead to 'a', 'b', '__end__'"),
        (["b", END], "a", "returned 'a' (str); it may lead to 'b', '__end__'"),
        (["b"], END, "returned '__end__' (str); it may lead to 'b'"),
        (["b"], ["b", 1], "returned 1 (int); it may lead to 'b'"),
        (None, None, "returned None (NoneType); return a node's name, END, or a list of them"),
        (None, [], "returned [] (list); return a node's name, END, or a list of them"),
    ],
)
def test_a_router_that_names_what_it_may_not_is_refused(targets, returned, message):
    graph = chain("a", "b").compile()
    router = Router(len, targets and tuple(targets))
    with pytest.raises(RouterError) as caught:
        routed(graph, "a", router, returned)
    assert caught.value.node == "a"
    assert str(caught.value) == f"the router behind 'a' {message}"


def test_a_run_begins_with_its_inputs_and_copies_of_the_defaults():
    notes = []
    graph = chain("a", inputs=["input", "style"], defaults={"style": "brief", "notes": notes})
    graph = graph.compile()
    notes.append("later")
    state = initial_state(graph, {"input": "Why?"})
    assert dict(state) == {"input": "Why?", "style": "brief", "notes": []}
    state["notes"].append("of this run")
    assert dict(initial_state(graph, {"input": "", "style": "long"})) == (
        {"input": "", "style": "long", "notes": []}
    )


def test_the_answer_is_what_the_generation_before_end_or_the_last_node_writes():
    graph = chain("a").add_generation("b", prompt="", output="said").add_generation("c", prompt="")
    graph.add_edge("a", "c").add_edge("c", "b").add_edge("b", END)
    assert graph.compile().answer == "said"
    graph.add_edge("c", END)  # two different ones now: the last added
    assert graph.compile().answer == "c"
    assert chain("a", "b").compile().answer == "b"
    assert chain("a", "b", answer="input").compile().answer == "input"


def test_the_stage_that_certainly_comes_next_is_known():
    graph = WorkflowGraph().add_retrieval("r", query="", max_visits=2, otherwise="last")
    graph.add_generation("g", prompt="").add_generation("last", prompt="")
    graph.add_edge(START, "r").add_edge("r", "g").add_edge("g", "r").add_edge("last", END)
    compiled = graph.compile()
    assert certain_successor(compiled, "r", State()) == compiled.nodes["g"]
    assert certain_successor(compiled, "g", State()) == compiled.nodes["r"]
    assert certain_successor(compiled, "g", visited(r=1)) == compiled.nodes["r"]
    assert certain_successor(compiled, "g", visited(r=2)) == compiled.nodes["last"]
    assert certain_successor(compiled, "last", State()) is None
    compiled = graph.add_edge("r", lambda state: END, [END]).compile()
    assert certain_successor(compiled, "r", State()) is None


def test_a_graph_is_drawn_as_a_mermaid_flowchart():
    graph = WorkflowGraph()
    graph.add_generation("plan", prompt="", max_visits=3, otherwise="answer")
    graph.add_retrieval("search", query="").add_function("note", len)
    graph.add_generation("answer", prompt="", max_visits=1, otherwise=END)
    graph.add_edge(START, "plan").add_edge("plan", lambda state: "search", ["search", "answer"])
    graph.add_edge("search", "note").add_edge("note", lambda state: "plan").add_edge("answer", END)
    assert graph.draw() == (
        "flowchart TD\n"
        '    n_start(["start"])\n'
        '    n0["plan<br>at most 3 visits"]\n'
        '    n1[("search")]\n'
        '    n2{{"note"}}\n'
        '    n3["answer<br>at most 1 visit"]\n'
        '    n_end(["end"])\n'
        "    n_start --> n0\n"
        "    n0 -.-> n1\n"
        "    n0 -.-> n3\n"
        "    n1 --> n2\n"
        '    n2 -.-> n2_any(("any node"))\n'
        "    n3 --> n_end\n"
        '    n0 -.->|"after 3 visits"| n3\n'
        '    n3 -.->|"after 1 visit"| n_end\n'
    )


def test_a_hostile_name_is_drawn_as_nothing_but_a_label():
    name = '"]\n  x --> y %%{init: {}}%% `<script>` #1. ü_-'
    graph = WorkflowGraph().add_function(name, len, output="a").add_edge(START, name)
    assert graph.add_edge(name, END).draw().splitlines()[2] == (
        '    n0{{"#34;#93;#10;  x --#62; y #37;#37;#123;init#58; #123;#125;#125;#37;#37; '
        '#96;#60;script#62;#96; #35;1#46; ü_-"}}'
    )


def test_a_graph_that_does_not_compile_can_be_drawn_unless_names_are_wrong():
    assert "n1 --> n0" in looping().draw()
    with pytest.raises(GraphError, match="leads to 'x', which is no node"):
        chain("a").add_edge("a", "x").draw()
