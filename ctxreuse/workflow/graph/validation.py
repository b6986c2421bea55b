"""The checks of a graph before it is run: every node is reached, and every run ends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter

from ctxreuse.context.checks import suggestion
from ctxreuse.workflow.errors import GraphError, quoted
from ctxreuse.workflow.graph.compiled import Edges, Graph
from ctxreuse.workflow.graph.nodes import END, START


def check_names(graph: Graph) -> None:
    """Check that edges and limits lead to nodes that exist."""
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
    if back := _cycle(_detours(graph)):
        raise GraphError(
            f"otherwise= of nodes {quoted([*back, back[0]])} leads back to where it came "
            "from; let it end at END or at a node without max_visits="
        )
    if graph.edges[START] == Edges():
        raise GraphError(
            f"no edge leads from START; add_edge(START, {quoted(list(graph.nodes)[:1])})"
        )


def check_flow(graph: Graph) -> None:
    """Check that each node runs in some run, that every run ends, and what is read and written."""
    ahead = _ahead(graph)
    _check_ways(graph, ahead)
    _check_cycles(graph, ahead)
    _check_outputs(graph)
    known = dict.fromkeys([*graph.inputs, *graph.defaults])
    known |= dict.fromkeys(node.output for node in graph.nodes.values())
    for template in [one for node in graph.nodes.values() for one in node.templates]:
        for key in template.variables:
            if key not in known:
                raise GraphError(
                    f"{template.where} reads {{{key}}}, which nothing writes; there can be "
                    f"{quoted(known)}{suggestion(key, known)}. Correct the name, or give the key a "
                    "value with inputs= or defaults="
                )


def _check_ways(graph: Graph, ahead: Mapping[str, list[str]]) -> None:
    behind: dict[str, list[str]] = {}
    for source, following in ahead.items():
        for name in following:
            behind.setdefault(name, []).append(source)
    reached, ending = _reach(START, ahead), _reach(END, behind)
    for name in graph.nodes:
        if name not in reached:
            raise GraphError(
                f"node {quoted([name])} is not reached from START; add an edge that leads to it, "
                "or leave it out"
            )
        if name not in ending:
            raise GraphError(
                f"END cannot be reached from node {quoted([name])}; "
                f"add_edge({quoted([name])}, END), or an edge to a node that leads there"
            )


def _ahead(graph: Graph) -> dict[str, list[str]]:
    """Return where edges and visit limits can lead from each node, and from START."""
    ahead = _detours(graph)
    for source, edges in graph.edges.items():
        following = ahead.setdefault(source, [])
        following += edges.static
        for router in edges.routers:
            following += (*graph.nodes, END) if router.targets is None else router.targets
    return ahead


def _reach(start: str, ahead: Mapping[str, Iterable[str]]) -> set[str]:
    """Return what a node leads to, itself included."""
    reached, waiting = {start}, [start]
    while waiting:
        new = set(ahead.get(waiting.pop(), ())) - reached
        reached |= new
        waiting += new
    return reached


def _check_known(graph: Graph, names: Iterable[str], what: str) -> None:
    for name in names:
        if not isinstance(name, str) or (name not in graph.nodes and name != END):
            raise GraphError(
                f"{what} {quoted([name])}, which is no node; add it, or choose one of "
                f"{quoted(graph.nodes)}{suggestion(name, graph.nodes)}"
            )


def _check_cycles(graph: Graph, ahead: Mapping[str, list[str]]) -> None:
    """Check that no cycle goes on where all visits of nodes with a limit are used up."""
    detours = _detours(graph)
    going = {
        name: ahead[name] if node.max_visits is None else detours.get(name, [])
        for name, node in graph.nodes.items()
    }
    cycle = [name for name in _cycle(going) if graph.nodes[name].max_visits is None]
    remedy = "give one of them max_visits="
    for name in cycle:
        if any(one.targets is None for one in graph.edges[name].routers):
            remedy = (
                f"the router behind {quoted([name])} may lead anywhere: give it targets=[...], "
                "or one of them max_visits="
            )
            break
    if cycle:
        raise GraphError(f"nothing ends the cycle of nodes {quoted(cycle)}; {remedy}")


def _check_outputs(graph: Graph) -> None:
    """Check what the nodes write; other nodes that meet by their routes are checked in a run."""
    nodes = graph.nodes
    for name, node in nodes.items():
        if node.output in graph.inputs:
            raise GraphError(
                f"node {quoted([name])} writes {quoted([node.output])}, which is an input; "
                "give it another output="
            )
    for edges in graph.edges.values():
        writers: defaultdict[str, list[str]] = defaultdict(list)
        for name in edges.static:
            if name != END:
                writers[nodes[name].output].append(name)
        for written, names in writers.items():
            if len(names) > 1:
                raise GraphError(
                    f"nodes {quoted(names)} run side by side and all write {quoted([written])}; "
                    "give them different output=, or an edge between them"
                )


def _detours(graph: Graph) -> dict[str, list[str]]:
    """Return where each node's visit limit sends a run, if anywhere."""
    return {
        name: [node.otherwise] for name, node in graph.nodes.items() if node.otherwise is not None
    }


def _cycle(ahead: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the nodes of a cycle, each once and in order; none if there is no cycle."""
    try:
        TopologicalSorter(ahead).prepare()
    except CycleError as error:
        cycle: list[str] = error.args[1]
        return cycle[:0:-1]  # its last node is its first; each is led to by the one behind it
    return []
