"""A graph that is ready to run, validated and never changed again; and how it is drawn."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, TypeAlias

from ctxreuse.context.checks import checked_each, checked_kind, checked_texts
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
