"""Where the runs of a graph can go: all questions that validation asks about paths.

An edge may lead to its target, or to where visit limits send it on instead. Which nodes can run
before, behind or beside each other follows from that alone, over single nodes and pairs of them:
what a wavefront can hold as a whole, of which there are exponentially many, is never asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import combinations, product

from ctxreuse.workflow.graph.compiled import Graph
from ctxreuse.workflow.graph.nodes import END, START


class Flow:
    """The paths of a graph whose names are known to be right.

    Args:
        graph: The graph.
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

        Every wavefront before the node's holds a node that leads to it; so those, and what can
        run beside them.
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
