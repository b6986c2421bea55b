"""What must hold before a graph is run; each error names node, key and remedy.

A graph that passes ends in every run, at END or with a `VisitLimitError`, and no two nodes of a
wavefront write the same key unless a router chooses several targets at once (which is found when
it does). A variable may still be missing at run time: where it is written on some ways only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from difflib import get_close_matches

from ctxreuse.workflow.errors import GraphError, quoted
from ctxreuse.workflow.graph.compiled import Edges, Graph
from ctxreuse.workflow.graph.flow import Flow
from ctxreuse.workflow.graph.nodes import END, START


def check_names(graph: Graph) -> None:
    """Check that edges and limits lead to nodes that exist.

    Raises:
        GraphError: If one does not, or if there is no node or no edge from START.
    """
    if not graph.nodes:
        raise GraphError(
            f"workflow {quoted([graph.name])} has no nodes; add some with add_generation, "
            "add_retrieval or add_function"
        )
    for source, edges in graph.edges.items():
        if source != START:
            _check_known(graph, [source], "an edge comes from")
        _check_known(graph, edges.static, f"the edge from {quoted([source])} leads to")
        for router in edges.routers:
            _check_known(graph, router.targets or (), f"the router behind {quoted([source])} names")
    for name, node in graph.nodes.items():
        if node.otherwise is not None:
            _check_known(graph, [node.otherwise], f"otherwise= of node {quoted([name])} is")
    for name in graph.nodes:
        _check_otherwise_ends(graph, name)
    if graph.edges[START] == Edges():
        raise GraphError(
            f"no edge leads from START; add_edge(START, {quoted(list(graph.nodes)[:1])})"
        )


def check_flow(graph: Graph) -> None:
    """Check that every run ends, and that what it reads and writes is well-defined.

    Raises:
        GraphError: If a node cannot be reached or cannot reach END, a cycle has no visit limit, a
            variable cannot have been written, two nodes side by side write one key, or an output
            is an input.
    """
    flow = Flow(graph)
    for name in graph.nodes:
        if name not in flow.after(START):
            raise GraphError(
                f"node {quoted([name])} is not reached from START; add an edge that leads to it, "
                "or leave it out"
            )
    for name in graph.nodes:
        if END not in flow.after(name):
            raise GraphError(
                f"END cannot be reached from node {quoted([name])}; "
                f"add_edge({quoted([name])}, END), or an edge to a node that leads there"
            )
    _check_cycles(graph, flow)
    _check_outputs(graph, flow)
    _check_variables(graph, flow)


def _check_known(graph: Graph, names: Iterable[str], what: str) -> None:
    for name in names:
        if name not in graph.nodes and name != END:
            raise GraphError(
                f"{what} {quoted([name])}, which is no node; add it, or choose one of "
                f"{quoted(graph.nodes)}{_suggestion(name, graph.nodes)}"
            )


def _check_otherwise_ends(graph: Graph, name: str) -> None:
    passed: list[str] = []
    target: str | None = name
    while target is not None and target != END:
        if target in passed:
            raise GraphError(
                f"otherwise= of nodes {quoted([*passed, target])} leads back to where it came "
                "from; let it end at END or at a node without max_visits="
            )
        passed.append(target)
        target = graph.nodes[target].otherwise


def _check_cycles(graph: Graph, flow: Flow) -> None:
    cycle = flow.endless_cycle()
    if cycle is None:
        return
    anywhere = [
        name for name in cycle if any(one.targets is None for one in graph.edges[name].routers)
    ]
    remedy = "give one of them max_visits="
    if anywhere:
        remedy = (
            f"the router behind {quoted(anywhere[:1])} may lead anywhere: give it targets=[...], "
            "or one of them max_visits="
        )
    raise GraphError(f"nothing ends the cycle of nodes {quoted(cycle)}; {remedy}")


def _check_outputs(graph: Graph, flow: Flow) -> None:
    nodes = graph.nodes
    for name, node in nodes.items():
        if node.output in graph.inputs:
            raise GraphError(
                f"node {quoted([name])} writes {quoted([node.output])}, which is an input; "
                "give it another output="
            )
    for pair in _in_order(graph, flow.side_by_side):
        one, other = (nodes[name] for name in pair)
        if one.output == other.output:
            raise GraphError(
                f"nodes {quoted(pair)} can run side by side and both write {quoted([one.output])}; "
                "give them different output=, an edge between them, or targets=[...] to the "
                "routers before them"
            )


def _in_order(graph: Graph, pairs: Iterable[frozenset[str]]) -> Iterator[list[str]]:
    position = {name: number for number, name in enumerate(graph.nodes)}
    ordered = (sorted(pair, key=position.__getitem__) for pair in pairs)
    return iter(sorted(ordered, key=lambda pair: [position[name] for name in pair]))


def _check_variables(graph: Graph, flow: Flow) -> None:
    for name, node in graph.nodes.items():
        if not any(template.variables for template in node.templates):
            continue
        written = [graph.nodes[other].output for other in graph.nodes if other in flow.before(name)]
        known = list(dict.fromkeys([*graph.inputs, *graph.defaults, *written]))
        for template in node.templates:
            for key in template.variables:
                if key not in known:
                    raise GraphError(
                        f"{template.where} reads {{{key}}}, {_why_unknown(graph, key)}; before it "
                        f"there can be {quoted(known)}{_suggestion(key, known)}. Correct the name, "
                        "or give the key a value with inputs= or defaults="
                    )


def _why_unknown(graph: Graph, key: str) -> str:
    writers = [name for name, node in graph.nodes.items() if node.output == key]
    if not writers:
        return "which nothing writes"
    return f"which only {quoted(writers)} writes, and never before it"


def _suggestion(name: str, known: Iterable[str]) -> str:
    close = get_close_matches(name, known, n=1)
    return f" (did you mean {quoted(close)}?)" if close else ""
