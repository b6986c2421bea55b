"""The checks of a graph before it is run; each error names node, key and remedy.

Every run of a graph that passes ends, at END or with a `VisitLimitError`, and no two nodes of a
wavefront write the same key unless a router chooses several targets at once (which raises an error
then). A variable may still be missing at run time: if only some paths write it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from itertools import combinations, product

from ctxreuse.context.cached import cached_property
from ctxreuse.workflow.errors import GraphError, quoted
from ctxreuse.workflow.graph.compiled import Edges, Graph
from ctxreuse.workflow.graph.nodes import END, START


def check_names(graph: Graph) -> None:
    """Check that edges and limits lead to nodes that exist.

    Raises:
        GraphError: One does not, or there is no node or no edge from START.
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
        GraphError: A node cannot be reached or cannot reach END, a cycle has no visit limit, a
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
        if not isinstance(name, str) or (name not in graph.nodes and name != END):
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
    remedy = "give one of them max_visits="
    for name in cycle:
        if any(one.targets is None for one in graph.edges[name].routers):
            remedy = (
                f"the router behind {quoted([name])} may lead anywhere: give it targets=[...], "
                "or one of them max_visits="
            )
            break
    raise GraphError(f"nothing ends the cycle of nodes {quoted(cycle)}; {remedy}")


def _check_outputs(graph: Graph, flow: Flow) -> None:
    nodes = graph.nodes
    for name, node in nodes.items():
        if node.output in graph.inputs:
            raise GraphError(
                f"node {quoted([name])} writes {quoted([node.output])}, which is an input; "
                "give it another output="
            )
    for pair in combinations(nodes, 2):
        one, other = (nodes[name] for name in pair)
        if one.output == other.output and frozenset(pair) in flow.side_by_side:
            raise GraphError(
                f"nodes {quoted(pair)} can run side by side and both write {quoted([one.output])}; "
                "give them different output=, an edge between them, or targets=[...] to the "
                "routers before them"
            )


def _check_variables(graph: Graph, flow: Flow) -> None:
    for name, node in graph.nodes.items():
        read = [(template, key) for template in node.templates for key in template.variables]
        if not read:
            continue
        written = [graph.nodes[other].output for other in graph.nodes if other in flow.before(name)]
        known = list(dict.fromkeys([*graph.inputs, *graph.defaults, *written]))
        for template, key in read:
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


def _suggestion(name: object, known: Iterable[str]) -> str:
    close = get_close_matches(name, known, n=1) if isinstance(name, str) else []
    return f" (did you mean {quoted(close)}?)" if close else ""


class Flow:
    """Where the runs of a graph can go: answers all questions about paths.

    An edge may lead to its target, or to where visit limits send it on instead. From that alone
    follows which nodes can run before, behind or beside each other, over single nodes and pairs of
    them. Whole wavefronts, of which there are exponentially many, are never enumerated.

    Args:
        graph: The graph, whose names are known to be right.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._after: dict[str, frozenset[str]] = {}
        self.successors: dict[str, frozenset[str]] = {
            source: frozenset[str]().union(*self._edges_from(source)) for source in graph.edges
        }
        """What each node, and START, can lead to: nodes and END."""

    def after(self, source: str) -> frozenset[str]:
        """Return what can be reached from a node, or START, over at least one edge."""
        if source not in self._after:
            seen: set[str] = set()
            ahead = [source]
            while ahead:
                new = self.successors.get(ahead.pop(), frozenset()) - seen
                seen |= new
                ahead += new
            self._after[source] = frozenset(seen)
        return self._after[source]

    def before(self, name: str) -> frozenset[str]:
        """Return the nodes that can have run before a node does, itself on an earlier visit too.

        Every wavefront before the node's holds a node that leads to it; so the result is those,
        and the nodes that can run beside them.
        """
        leading = {node for node in self._graph.nodes if name in self.after(node)}
        beside = {two for pair in self.side_by_side if pair & leading for two in pair}
        return frozenset(leading | beside)

    @cached_property
    def side_by_side(self) -> frozenset[frozenset[str]]:
        """The pairs of nodes that can be on one wavefront, if each router chooses one target."""
        pairs = {
            pair
            for source in self.successors
            if source == START or source in self.after(START)
            for one, other in combinations(self._edges_from(source), 2)
            for pair in _pairs(one, other)
        }
        ahead = list(pairs)
        while ahead:
            one, other = ahead.pop()
            new = set(_pairs(self.successors[one], self.successors[other])) - pairs
            pairs |= new
            ahead += new
        return frozenset(pairs)

    def endless_cycle(self) -> list[str] | None:
        """Return the nodes of a cycle on which no node has a visit limit, if there is one."""
        unlimited = [name for name, node in self._graph.nodes.items() if node.max_visits is None]
        finished: set[str] = set()
        for start in unlimited:
            path = [start]
            branches = [self._unlimited_successors(start)]
            while path:
                following = next(branches[-1], None)
                if following is None:
                    finished.add(path.pop())
                    branches.pop()
                elif following in path:
                    return path[path.index(following) :]
                elif following not in finished:
                    path.append(following)
                    branches.append(self._unlimited_successors(following))
        return None

    def _unlimited_successors(self, name: str) -> Iterator[str]:
        nodes = self._graph.nodes
        follows = self.successors[name]
        return (other for other in nodes if other in follows and nodes[other].max_visits is None)

    def _edges_from(self, source: str) -> list[frozenset[str]]:
        """Return, for each edge, where it can lead; the first wavefront meets no visit limit."""
        edges = self._graph.edges[source]
        anywhere = (*self._graph.nodes, END)
        targets: list[tuple[str, ...]] = [(target,) for target in edges.static]
        targets += [anywhere if one.targets is None else one.targets for one in edges.routers]
        if source == START:
            return [frozenset(names) for names in targets]
        return [
            frozenset(end for name in names for end in self._landings(name)) for names in targets
        ]

    def _landings(self, target: str | None) -> Iterator[str]:
        """Yield a target and where visit limits can send an edge to it instead."""
        while target is not None:
            yield target
            target = None if target == END else self._graph.nodes[target].otherwise


def _pairs(one: frozenset[str], other: frozenset[str]) -> Iterator[frozenset[str]]:
    return (frozenset(pair) for pair in product(one - {END}, other - {END}) if pair[0] != pair[1])
