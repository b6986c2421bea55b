import pytest
from workflow_graphs import chain, looping

from ctxreuse.workflow.errors import GraphError
from ctxreuse.workflow.graph.builder import WorkflowGraph
from ctxreuse.workflow.graph.nodes import END, START


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
