"""A graph that is ready to run, and never changed; how runs go through it; how it is drawn."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, TypeAlias

from ctxreuse.context.checks import checked_each, checked_kind, checked_texts
from ctxreuse.context.copies import made_with
from ctxreuse.context.fork_safety import cached_property
from ctxreuse.errors import describe
from ctxreuse.workflow.errors import GraphError, RouterError, StateKeyError, VisitLimitError, quoted
from ctxreuse.workflow.graph.nodes import END, START, Generation, Node, Retrieval, Stage
from ctxreuse.workflow.graph.state import State, written

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

    Args:
        name: The workflow's name.
        nodes: The nodes by name, in the order in which they were added.
        edges: The edges out of each node, and out of START.
        inputs: The keys of a run's inputs; a bare text is the value of the first.
        defaults: The values of keys that no node has written yet.
        answer: The key that holds the answer.

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
            given = checked_kind(name, getattr(self, name), Mapping, "a dict")
            checked_each(name, given.values(), kind, f"of type {kind.__name__}; use WorkflowGraph")
            object.__setattr__(self, name, MappingProxyType(given))
        for name in (START, *self.nodes):
            if name not in self.edges:
                raise _unknown(self, name)

    def __reduce__(self) -> tuple[Any, ...]:
        given = {one.name: getattr(self, one.name) for one in fields(self)}
        maps = {name: dict(given[name]) for name in ("nodes", "edges", "defaults")}
        return made_with(Graph, **given | maps)

    @cached_property
    def searches_again(self) -> bool:
        """Whether a run may search behind a search, so that the first is worth remembering."""
        searches = {name for name, node in self.nodes.items() if isinstance(node, Retrieval)}
        seen: set[str] = {END}
        ahead = list(searches)
        while ahead:
            new = set(following(self, ahead.pop())) - seen
            seen |= new
            ahead += new
        return bool(seen & searches)


def following(graph: Graph, source: str) -> dict[str, None]:
    """Return where edges from a node or START can lead, visit limits and END included."""
    edges = graph.edges[source]
    found = dict.fromkeys(edges.static)
    for router in edges.routers:
        found |= dict.fromkeys((*graph.nodes, END) if router.targets is None else router.targets)
    for target in tuple(found):
        while target != END:
            otherwise = _node(graph, target).otherwise
            if otherwise is None or otherwise in found:
                break  # what follows one that is there is there, too, or comes in its own turn
            found[otherwise] = None
            target = otherwise
    return found


def initial_state(graph: Graph, inputs: Mapping[str, Any]) -> State:
    """Return the state in which a run begins, with copies of the defaults, or raise."""
    for key in (*inputs, *graph.inputs):
        if key not in graph.inputs:
            problem = f"has no input {quoted([key])}; it has {quoted(graph.inputs)}"
        elif key not in inputs and key not in graph.defaults:
            problem = (
                f"was run without its input {quoted([key])}; "
                "pass it, or give it a value with defaults={...}"
            )
        else:
            continue
        raise StateKeyError(f"workflow {quoted([graph.name])} {problem}", key=key)
    return State({**deepcopy(dict(graph.defaults)), **inputs})


def routed(graph: Graph, source: str, router: Router, returned: object) -> Sequence[str]:
    """Return the targets of a router behind `source` whose function returned something."""
    names = (returned,) if isinstance(returned, str) else returned
    if not isinstance(names, Sequence) or not names:
        raise RouterError(
            f"the router behind {quoted([source])} returned {describe(returned)}; "
            "return a node's name, END, or a list of them",
            source,
        )
    allowed = (*graph.nodes, END) if router.targets is None else router.targets
    for name in names:
        if name not in allowed:
            raise RouterError(
                f"the router behind {quoted([source])} returned {describe(name)}; "
                f"it may lead to {quoted(allowed)}",
                source,
            )
    return names


def wavefront(graph: Graph, targets: Iterable[str], state: State) -> tuple[str, ...]:
    """Return the nodes that run next, in the order of `nodes`; none at the end of the run."""
    reached = {_within_limit(graph, target, state) for target in targets}
    writer_of: dict[str, str] = {}
    for name, node in graph.nodes.items():
        if name not in reached:
            continue
        if node.output in writer_of:
            raise RouterError(
                f"nodes {quoted([writer_of[node.output], name])} would run side by side and both "
                f"write {quoted([node.output])}; give them different output="
            )
        writer_of[node.output] = name
    return tuple(writer_of.values())


def successor(graph: Graph, name: str, state: State) -> Node | None:
    """Return the node that certainly comes next, and alone, if no other one runs beside `name`."""
    edges = graph.edges[name]
    if edges.routers or len(edges.static) != 1:
        return None
    try:
        target = _within_limit(graph, edges.static[0], written(state, {}, [name]))
    except VisitLimitError:
        return None
    return graph.nodes.get(target)


def _within_limit(graph: Graph, target: str, state: State) -> str:
    """Return where an edge to a node leads after so many visits."""
    while target != END:
        node = _node(graph, target)
        if node.max_visits is None or state.visits(target) < node.max_visits:
            break
        if node.otherwise is None:
            raise VisitLimitError(
                f"an edge led to node {quoted([target])} after its {node.max_visits} visits; "
                "raise max_visits=, or say with otherwise= where to go then",
                target,
            )
        target = node.otherwise
    return target


def _node(graph: Graph, name: str) -> Node:
    node = graph.nodes.get(name)
    if node is None:
        raise _unknown(graph, name)
    return node


def _unknown(graph: Graph, name: str) -> GraphError:
    return GraphError(
        f"workflow {quoted([graph.name])} has no node {quoted([name])} with edges; choose one "
        f"of {quoted(graph.nodes)}, or build the graph with WorkflowGraph"
    )


def drawn(graph: Graph) -> str:
    """Return a graph as a Mermaid flowchart."""
    return "\n    ".join(["flowchart TD", *_lines(graph)]) + "\n"


def _lines(graph: Graph) -> Iterator[str]:
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
