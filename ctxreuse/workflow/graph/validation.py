"""The checks of a graph before it is run: all runs end, what is read can be written before.

What depends on which nodes run side by side is found when it happens, by `compiled.wavefront`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from graphlib import CycleError, TopologicalSorter
from typing import TypeAlias

from ctxreuse.workflow.errors import GraphError, quoted
from ctxreuse.workflow.graph.compiled import Edges, Graph, following
from ctxreuse.workflow.graph.nodes import END, START
from ctxreuse.workflow.graph.state import Template

Leads: TypeAlias = Callable[[str, str], bool]
"""Whether a run can go from one node to another."""


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
    ahead = {name: [node.otherwise] for name, node in graph.nodes.items() if node.otherwise}
    cycle = _cycle(ahead)
    if cycle:
        raise GraphError(
            f"otherwise= of nodes {quoted([*cycle, cycle[0]])} leads back to where it came from; "
            "let it end at END or at a node without max_visits="
        )
    if graph.edges[START] == Edges():
        raise GraphError(
            f"no edge leads from START; add_edge(START, {quoted(list(graph.nodes)[:1])})"
        )


def check_flow(graph: Graph) -> None:
    """Check that every run ends, and that what it reads and writes is well-defined."""
    ahead = {name: following(graph, name) for name in (START, *graph.nodes)}
    leads = _ways(ahead)
    for name in graph.nodes:
        if not leads(START, name):
            raise GraphError(
                f"node {quoted([name])} is not reached from START; add an edge that leads to it, "
                "or leave it out"
            )
    for name in graph.nodes:
        if not leads(name, END):
            raise GraphError(
                f"END cannot be reached from node {quoted([name])}; "
                f"add_edge({quoted([name])}, END), or an edge to a node that leads there"
            )
    _check_cycles(graph, ahead)
    _check_outputs(graph)
    writers: dict[str, list[str]] = defaultdict(list)
    for name, node in graph.nodes.items():
        writers[node.output].append(name)
    for name, node in graph.nodes.items():
        for template in node.templates:
            _check_read(graph, leads, writers, name, template)


def _ways(ahead: Mapping[str, Iterable[str]]) -> Leads:
    """Return a function that says whether a run can go from a node to another one."""
    # sets as integers: a thousand nodes may all lead to each other
    bits = {name: 1 << number for number, name in enumerate((*ahead, END))}
    before = dict.fromkeys(bits, 0)
    for name, targets in ahead.items():
        for target in targets:
            before[target] |= bits[name]
    for passed, bit in bits.items():  # Warshall's algorithm
        for name, known in before.items():
            if known & bit:
                before[name] = known | before[passed]
    return lambda source, target: bool(before[target] & bits[source])


def _check_known(graph: Graph, names: Iterable[object], what: str) -> None:
    for name in names:
        if not isinstance(name, str) or (name not in graph.nodes and name != END):
            raise GraphError(
                f"{what} {quoted([name])}, which is no node; add it, or choose one of "
                f"{quoted(graph.nodes)}{_suggestion(name, graph.nodes)}"
            )


def _cycle(ahead: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the nodes of a cycle, in the order of its edges; none where there is no cycle."""
    try:
        TopologicalSorter(ahead).prepare()
    except CycleError as error:
        found: list[str] = error.args[1][:0:-1]
        return found
    return []


def _check_cycles(graph: Graph, ahead: Mapping[str, Iterable[str]]) -> None:
    unlimited = {name: None for name, node in graph.nodes.items() if node.max_visits is None}
    cycle = _cycle({name: [one for one in ahead[name] if one in unlimited] for name in unlimited})
    if not cycle:
        return
    remedy = "give one of them max_visits="
    for name in cycle:
        if any(one.targets is None for one in graph.edges[name].routers):
            remedy = (
                f"the router behind {quoted([name])} may lead anywhere: give it targets=[...], "
                "or one of them max_visits="
            )
            break
    raise GraphError(f"nothing ends the cycle of nodes {quoted(cycle)}; {remedy}")


def _check_outputs(graph: Graph) -> None:
    for name, node in graph.nodes.items():
        if node.output in graph.inputs:
            raise GraphError(
                f"node {quoted([name])} writes {quoted([node.output])}, which is an input; "
                "give it another output="
            )
    for edges in graph.edges.values():
        writer_of: dict[str, str] = {}
        for name in edges.static:
            if name == END:
                continue
            other = writer_of.setdefault(graph.nodes[name].output, name)
            if other != name:
                raise GraphError(
                    f"nodes {quoted(sorted([other, name]))} run side by side and both write "
                    f"{quoted([graph.nodes[name].output])}; give them different output=, or an "
                    "edge between them"
                )


def _check_read(
    graph: Graph, leads: Leads, writers: Mapping[str, list[str]], name: str, template: Template
) -> None:
    """Check that no key of a template is written by nothing, or by nodes behind it alone."""
    given = dict.fromkeys((*graph.inputs, *graph.defaults))
    for key in template.names:
        late = writers.get(key, [])
        if key in given or not all(leads(name, one) and not leads(one, name) for one in late):
            continue
        why = f"only {quoted(late)} writes, and never before it" if late else "nothing writes"
        before = [node.output for other, node in graph.nodes.items() if leads(other, name)]
        known = list(given | dict.fromkeys(before))
        raise GraphError(
            f"{template.where} reads {{{key}}}, which {why}; before it there can be "
            f"{quoted(known)}{_suggestion(key, known)}. Correct the name, or give the key a value "
            "with inputs= or defaults="
        )


def _suggestion(name: object, known: Iterable[str]) -> str:
    close = get_close_matches(name, known, n=1) if isinstance(name, str) else []
    return f" (did you mean {quoted(close)}?)" if close else ""
