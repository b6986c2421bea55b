"""A graph that is ready to run, how it is drawn, and its checks: every run of it ends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from graphlib import CycleError, TopologicalSorter
from types import MappingProxyType
from typing import Any, TypeAlias

from ctxreuse.context.checks import checked_each, checked_kind, checked_texts, suggestion
from ctxreuse.context.copies import made_with
from ctxreuse.workflow.errors import GraphError, quoted
from ctxreuse.workflow.graph.nodes import END, START, Generation, Node, Retrieval, Stage
from ctxreuse.workflow.graph.state import State

Targets: TypeAlias = str | Sequence[str]
RouteFunction: TypeAlias = Callable[[State], Targets | Awaitable[Targets]]


@dataclass(frozen=True, slots=True)
class Router:
    """An edge whose target is decided when it is taken."""

    function: RouteFunction
    targets: tuple[str, ...] | None = None  # None: any node, and END


@dataclass(frozen=True, slots=True)
class Edges:
    """The edges out of a node; all of them are followed."""

    static: tuple[str, ...] = ()
    routers: tuple[Router, ...] = ()


@dataclass(frozen=True, eq=False, kw_only=True)
class Graph:
    """A workflow that can be run; made by `WorkflowGraph.compile`.

    A run goes in wavefronts, as in Pregel. The nodes of a wavefront run side by side and read the
    same state. When all have ended, what they wrote is committed in the order of `nodes`; then
    their edges give the next wavefront. So the result does not depend on how long anything takes.

    The name, inputs, defaults and answer are as in `WorkflowGraph`.

    Args:
        nodes: The nodes by name, in the order in which they were added.
        edges: The edges out of each node, and out of START.

    Raises:
        GraphError: a node, or START, has no entry in `edges`.
    """

    name: str
    nodes: Mapping[str, Node]
    edges: Mapping[str, Edges]
    inputs: tuple[str, ...]
    defaults: Mapping[str, Any]
    answer: str

    def __post_init__(self) -> None:
        checked_kind("name", self.name, str, "a string")
        checked_kind("answer", self.answer, str, "a string")
        checked_texts("inputs", self.inputs, "a list of keys")
        for name, kind in (("nodes", Stage), ("edges", Edges), ("defaults", object)):
            values = checked_kind(name, getattr(self, name), Mapping, "a dict").values()
            checked_each(name, values, kind, f"of type {kind.__name__}; use WorkflowGraph")
        if missing := [name for name in (START, *self.nodes) if name not in self.edges]:
            raise GraphError(
                f"workflow {quoted([self.name])} has no edges for {quoted(missing)}; build it with "
                "WorkflowGraph"
            )
        for name in ("nodes", "edges", "defaults"):
            object.__setattr__(self, name, MappingProxyType(getattr(self, name)))

    def __reduce__(self) -> tuple[Any, ...]:
        given = {one.name: getattr(self, one.name) for one in fields(self)}
        maps = {name: dict(given[name]) for name in ("nodes", "edges", "defaults")}
        return made_with(Graph, **given | maps)


def mermaid_lines(graph: Graph) -> Iterator[str]:
    """Yield the lines of a graph's Mermaid flowchart."""
    ids = {name: f"n{number}" for number, name in enumerate(graph.nodes)}
    ids |= {START: "n_start", END: "n_end"}
    yield f'{ids[START]}(["start"])'
    for name, node in graph.nodes.items():
        yield ids[name] + _shape(node)
    yield f'{ids[END]}(["end"])'
    for source, edges in graph.edges.items():
        for target in edges.static:
            yield f"{ids[source]} --> {ids[target]}"
        for router in edges.routers:
            if router.targets is None:
                yield f'{ids[source]} -.-> {ids[source]}_any(("any node"))'
            for target in router.targets or ():
                yield f"{ids[source]} -.-> {ids[target]}"
    for name, node in graph.nodes.items():
        if node.otherwise is not None:
            yield f'{ids[name]} -.->|"after {_visits(node)}"| {ids[node.otherwise]}'


def _shape(node: Node) -> str:
    label = "".join(
        # no name is read as Mermaid's syntax or as HTML
        letter if letter.isalnum() or letter in " _-" else f"#{ord(letter)};"
        for letter in node.name
    )
    if node.max_visits is not None:
        label += f"<br>at most {_visits(node)}"
    if isinstance(node, Generation):
        return f'["{label}"]'
    if isinstance(node, Retrieval):
        return f'[("{label}")]'
    return f'{{{{"{label}"}}}}'


def _visits(node: Node) -> str:
    return "1 visit" if node.max_visits == 1 else f"{node.max_visits} visits"


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
        if name == START:
            raise GraphError(f"{what} START, where runs begin; lead it to the first node instead")
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
