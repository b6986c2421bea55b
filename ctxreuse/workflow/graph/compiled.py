"""A graph that is ready to run, validated and never changed again; and how it is drawn."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

from ctxreuse.context.checks import checked_each, checked_kind, checked_list, checked_texts
from ctxreuse.context.copies import made_with
from ctxreuse.context.fork_safety import cached_property
from ctxreuse.errors import describe
from ctxreuse.workflow.errors import GraphError, RouterError, StateKeyError, VisitLimitError, quoted
from ctxreuse.workflow.graph.nodes import END, START, Generation, Node, Retrieval, Stage
from ctxreuse.workflow.graph.state import State

_Entry = TypeVar("_Entry")

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
        for name in (START, *self.nodes):
            self._known(self.edges, name)
        for name in ("nodes", "edges", "defaults"):
            object.__setattr__(self, name, MappingProxyType(getattr(self, name)))

    def __reduce__(self) -> tuple[Any, ...]:
        given = {one.name: getattr(self, one.name) for one in fields(self)}
        maps = {name: dict(given[name]) for name in ("nodes", "edges", "defaults")}
        return made_with(Graph, **given | maps)

    @cached_property
    def searches_again(self) -> bool:
        """Whether a run may search behind a search, so that the first is worth remembering."""
        searches = {name for name, node in self.nodes.items() if isinstance(node, Retrieval)}
        seen: set[str] = set()
        ahead = list(searches)
        while ahead:
            new = self._leads_to(ahead.pop()) - seen
            seen |= new
            ahead += new
        return bool(seen & searches)

    def _leads_to(self, name: str) -> set[str]:
        """Return the nodes that an edge from a node can lead to, visit limits included."""
        edges = self._known(self.edges, name)
        targets = set(edges.static)
        for router in edges.routers:
            targets.update(self.nodes if router.targets is None else router.targets)
        limited = [self.nodes[name].otherwise for name in targets & self.nodes.keys()]
        return {*targets, *filter(None, limited)} & self.nodes.keys()

    def initial_state(self, inputs: Mapping[str, Any]) -> State:
        """Return the state in which a run begins; defaults are copied for it.

        Raises:
            StateKeyError: An input is missing or unknown.
        """
        checked_kind("inputs", inputs, Mapping, "a dict of keys and values")
        for key in (*inputs, *self.inputs):
            if key not in self.inputs:
                problem = f"has no input {quoted([key])}; it has {quoted(self.inputs)}"
            elif key not in inputs and key not in self.defaults:
                problem = (
                    f"was run without its input {quoted([key])}; "
                    "pass it, or give it a value with defaults={...}"
                )
            else:
                continue
            raise StateKeyError(f"workflow {quoted([self.name])} {problem}", key=key)
        return State({**deepcopy(dict(self.defaults)), **inputs})

    def routed(self, source: str, router: Router, returned: object) -> tuple[str, ...]:
        """Return the targets of a router behind `source` whose function returned something.

        Raises:
            RouterError: not one or several names that the router may lead to.
        """
        checked_kind("source", source, str, "a node's name or START")
        checked_kind("router", router, Router, "a Router of this graph's edges")
        names = (returned,) if isinstance(returned, str) else returned
        if not isinstance(names, Sequence) or not names:
            raise RouterError(
                f"the router behind {quoted([source])} returned {describe(returned)}; "
                "return a node's name, END, or a list of them",
                source,
            )
        allowed = (*self.nodes, END) if router.targets is None else router.targets
        for name in names:
            if name not in allowed:
                raise RouterError(
                    f"the router behind {quoted([source])} returned {describe(name)}; "
                    f"it may lead to {quoted(allowed)}",
                    source,
                )
        return tuple(names)

    def wavefront(self, targets: Iterable[str], state: State) -> tuple[str, ...]:
        """Return the nodes that run next, in the order of `nodes`; an empty result ends the run.

        Args:
            targets: Where the edges of the last wavefront lead: node names and END.
            state: The committed state, whose visits count the last wavefront.

        Raises:
            VisitLimitError: A node is reached once too often and has no `otherwise`.
            RouterError: Two of the nodes write the same key; a router led there.
        """
        checked_kind("state", state, State, "a State")
        known = checked_list("targets", targets, "a list of nodes' names and END")
        reached = {self._within_limit(target, state) for target in known}
        writer_of: dict[str, str] = {}
        for name in filter(reached.__contains__, self.nodes):
            output = self.nodes[name].output
            if output in writer_of:
                raise RouterError(
                    f"nodes {quoted([writer_of[output], name])} would run side by side and both "
                    f"write {quoted([output])}; give them different output="
                )
            writer_of[output] = name
        return tuple(writer_of.values())

    def successor(self, name: str, state: State | None = None) -> Node | None:
        """Return the node that certainly comes next, and alone, if no other node runs beside it.

        Args:
            name: The node that ends.
            state: The state before its visit is committed, for visit limits; None ignores them.
        """
        if state is not None:
            checked_kind("state", state, State, "a State or None")
        edges = self._known(self.edges, name)
        if edges.routers or len(edges.static) != 1:
            return None
        target = edges.static[0]
        if state is not None:
            try:
                target = self._within_limit(target, state.commit({}, [name]))
            except VisitLimitError:
                return None
        return None if target == END else self._known(self.nodes, target)

    def _known(self, entries: Mapping[str, _Entry], name: str) -> _Entry:
        """Return what `nodes` or `edges` have for a name."""
        entry = entries.get(checked_kind("a node", name, str, "a node's name"))
        if entry is None:
            raise GraphError(
                f"workflow {quoted([self.name])} has no node {quoted([name])} with edges; choose "
                f"one of {quoted(self.nodes)}, or build the graph with WorkflowGraph"
            )
        return entry

    def _within_limit(self, target: str, state: State) -> str:
        while target != END:
            node = self._known(self.nodes, target)
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
