"""The checks of a graph before it is run: all runs end, nothing is written twice at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from graphlib import CycleError, TopologicalSorter
from itertools import accumulate, pairwise
from operator import or_

from ctxreuse.context.checks import suggestion
from ctxreuse.context.fork_safety import cached_property
from ctxreuse.workflow.errors import GraphError, quoted
from ctxreuse.workflow.graph.compiled import Edges, Graph
from ctxreuse.workflow.graph.nodes import END, START
from ctxreuse.workflow.graph.state import Template


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
    _check_otherwise_ends(graph)
    if graph.edges[START] == Edges():
        raise GraphError(
            f"no edge leads from START; add_edge(START, {quoted(list(graph.nodes)[:1])})"
        )


def check_flow(graph: Graph) -> None:
    """Check that every run ends, and that what it reads and writes is well-defined."""
    flow = Flow(graph)
    for name in flow.unreached():
        raise GraphError(
            f"node {quoted([name])} is not reached from START; add an edge that leads to it, "
            "or leave it out"
        )
    for name in flow.without_end():
        raise GraphError(
            f"END cannot be reached from node {quoted([name])}; "
            f"add_edge({quoted([name])}, END), or an edge to a node that leads there"
        )
    _check_cycles(graph, flow)
    _check_outputs(graph, flow)
    given = {*graph.inputs, *graph.defaults}
    for name, node in graph.nodes.items():
        for template in node.templates:
            for key in template.variables:
                if key not in given and not flow.may_read(name, key):
                    raise _unknown(graph, flow, name, template, key)


def _check_known(graph: Graph, names: Iterable[str], what: str) -> None:
    for name in names:
        if not isinstance(name, str) or (name not in graph.nodes and name != END):
            raise GraphError(
                f"{what} {quoted([name])}, which is no node; add it, or choose one of "
                f"{quoted(graph.nodes)}{suggestion(name, graph.nodes)}"
            )


def _check_otherwise_ends(graph: Graph) -> None:
    ending: set[str] = {END}
    for name in graph.nodes:
        passed: dict[str, None] = {}
        target: str | None = name
        while target is not None and target not in ending:
            if target in passed:
                raise GraphError(
                    f"otherwise= of nodes {quoted([*passed, target])} leads back to where it came "
                    "from; let it end at END or at a node without max_visits="
                )
            passed[target] = None
            target = graph.nodes[target].otherwise
        ending.update(passed)


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
    for pair in flow.clashes():
        written = nodes[pair[0]].output
        raise GraphError(
            f"nodes {quoted(pair)} can run side by side and both write {quoted([written])}; "
            "give them different output=, an edge between them, or targets=[...] to the "
            "routers before them"
        )


def _unknown(graph: Graph, flow: Flow, name: str, template: Template, key: str) -> GraphError:
    before = flow.before(name)
    written = [node.output for other, node in graph.nodes.items() if other in before]
    known = list(dict.fromkeys([*graph.inputs, *graph.defaults, *written]))
    return GraphError(
        f"{template.where} reads {{{key}}}, {_why_unknown(graph, key)}; before it "
        f"there can be {quoted(known)}{suggestion(key, known)}. Correct the name, "
        "or give the key a value with inputs= or defaults="
    )


def _why_unknown(graph: Graph, key: str) -> str:
    writers = [name for name, node in graph.nodes.items() if node.output == key]
    if not writers:
        return "which nothing writes"
    return f"which only {quoted(writers)} writes, and never before it"


class Flow:
    """Where the runs of a graph can go: answers all questions about paths.

    An edge leads to its target, or to where visit limits send it on. From that follows which nodes
    can run before, behind or beside each other, over nodes and pairs of them; wavefronts, of which
    there are exponentially many, are never enumerated. A set of nodes is an integer with a bit for
    each, END last. So the work is at most nodes times edges, in operations on such sets.
    """

    def __init__(self, graph: Graph) -> None:
        self._names = (*graph.nodes, END)
        self._number = {name: number for number, name in enumerate(self._names)}
        self._nodes = list(graph.nodes.values())
        self._end = 1 << len(self._nodes)
        self._all = 2 * self._end - 1
        self._landings = self._all_landings()
        self._first = self._edges_from(graph.edges[START], with_limits=False)
        self._edges = [self._edges_from(graph.edges[name]) for name in graph.nodes]
        self._successors = [_union(edges) for edges in self._edges]
        self._reached = self._reach(_union(self._first), self._successors)

    def unreached(self) -> Iterator[str]:
        """Yield the nodes that START does not lead to."""
        yield from self._named(self._all & ~self._end & ~self._reached)

    def without_end(self) -> Iterator[str]:
        """Yield the nodes that do not lead to END."""
        before = [0] * len(self._names)
        for number, following in enumerate(self._successors):
            for other in _numbers(following):
                before[other] |= 1 << number
        leading = self._reach(self._end, before)
        yield from self._named(self._all & ~leading)

    def clashes(self) -> Iterator[tuple[str, str]]:
        """Yield the pairs of nodes that can be on one wavefront and write the same key."""
        for number, node in enumerate(self._nodes):
            later = self._all & -(2 << number)
            for other in self._named(self._writers[node.output] & self._beside[number] & later):
                yield node.name, other

    def may_read(self, name: str, key: str) -> bool:
        """Return whether a node that writes a key can have run before another node does."""
        return bool(self._writers.get(key, 0) & self._before[self._number[name]])

    def before(self, name: str) -> frozenset[str]:
        """Return the nodes that can have run before a node does, itself on an earlier visit too."""
        return frozenset(self._named(self._before[self._number[name]]))

    def beside(self, name: str) -> frozenset[str]:
        """Return the nodes that can be on a node's wavefront, if each router chooses one target."""
        return frozenset(self._named(self._beside[self._number[name]]))

    def endless_cycle(self) -> list[str] | None:
        """Return the nodes of a cycle on which no node has a visit limit, if there is one."""
        unlimited = sum(
            1 << number for number, node in enumerate(self._nodes) if node.max_visits is None
        )
        ahead = {
            self._names[number]: self._named(self._successors[number] & unlimited)
            for number in _numbers(unlimited)
        }
        try:
            TopologicalSorter(ahead).prepare()
        except CycleError as error:
            cycle: list[str] = error.args[1]
            return cycle[:0:-1]  # its last node is its first; each is led to by the one behind it
        return None

    @cached_property
    def _writers(self) -> dict[str, int]:
        """The nodes that write each key."""
        writers: dict[str, int] = {}
        for number, node in enumerate(self._nodes):
            writers[node.output] = writers.get(node.output, 0) | 1 << number
        return writers

    @cached_property
    def _before(self) -> list[int]:
        """What `before` returns, of each node."""
        before = [0] * len(self._names)
        queue = deque(range(len(self._nodes)))
        while queue:
            number = queue.popleft()
            # every wavefront before a node's holds a node that leads to it
            known = before[number] | self._beside[number] | 1 << number
            for following in _numbers(self._successors[number]):
                if known & ~before[following]:
                    before[following] |= known
                    if following < len(self._nodes):
                        queue.append(following)
        return before

    @cached_property
    def _beside(self) -> list[int]:
        """What `beside` returns, of each node."""
        pairs, reached = _NodePairs(len(self._nodes)), self._reached & ~self._end
        for edges in (self._first, *(self._edges[one] for one in _numbers(reached))):
            for targets, others in _with_others(edges).items():
                for number in _numbers(targets & ~self._end):
                    pairs.add(number, others & ~self._end)
        stepped = [0] * len(self._nodes)
        while pairs.queue:
            one, others = pairs.take()
            for following in _numbers(self._successors[one] & ~self._end):
                # the first node of a pair steps on, then the second, once for each node that the
                # first steps on
                new = others & ~stepped[following]
                if new:
                    stepped[following] |= new
                    ahead = _union([self._successors[other] for other in _numbers(new)])
                    pairs.add(following, ahead & ~self._end)
        return pairs.beside

    def _reach(self, start: int, following: Sequence[int]) -> int:
        """Return what some nodes and END lead to, themselves included."""
        reached, ahead = start, start
        while ahead:
            number = _lowest(ahead)
            ahead &= ahead - 1
            new = following[number] & ~reached if number < len(following) else 0
            reached |= new
            ahead |= new
        return reached

    def _all_landings(self) -> list[int]:
        """Return for each target itself and where visit limits can send an edge to it instead."""
        landings = [1 << number for number in range(len(self._names))]
        is_done = [False] * len(self._nodes) + [True]
        for start in range(len(self._nodes)):
            path = [start]
            while not is_done[path[-1]]:
                otherwise = self._nodes[path[-1]].otherwise
                if otherwise is None:
                    break
                path.append(self._number[otherwise])
            for number, then in pairwise(reversed(path)):
                landings[then] |= landings[number]
                is_done[then] = True
            is_done[path[-1]] = True
        return landings

    def _edges_from(self, edges: Edges, *, with_limits: bool = True) -> list[int]:
        """Return, for each edge, where it can lead; the first wavefront meets no visit limit."""
        lands = self._landings if with_limits else [1 << n for n in range(len(self._names))]
        found = [lands[self._number[target]] for target in edges.static]
        for router in edges.routers:
            if router.targets is None:
                found.append(self._all)
            else:
                found.append(_union([lands[self._number[target]] for target in router.targets]))
        return found

    def _named(self, nodes: int) -> Iterator[str]:
        return (self._names[number] for number in _numbers(nodes))


class _NodePairs:
    """Pairs of nodes, and those of them that have not been taken yet."""

    def __init__(self, size: int) -> None:
        self.beside = [0] * size
        self.queue: deque[int] = deque()
        self._new = [0] * size

    def add(self, number: int, others: int) -> None:
        """Add the pairs of a node with others; with itself it makes none."""
        new = others & ~self.beside[number] & ~(1 << number)
        if new:
            if not self._new[number]:
                self.queue.append(number)
            self.beside[number] |= new
            self._new[number] |= new

    def take(self) -> tuple[int, int]:
        """Return a node and its new partners."""
        number = self.queue.popleft()
        new, self._new[number] = self._new[number], 0
        return number, new


def _with_others(edges: Sequence[int]) -> dict[int, int]:
    """Return for each edge the nodes that the others can lead to; equal edges come together."""
    before = list(accumulate(edges, or_, initial=0))
    behind = list(accumulate(reversed(edges), or_, initial=0))[::-1]
    others: dict[int, int] = {}
    for number, targets in enumerate(edges):
        others[targets] = others.get(targets, 0) | before[number] | behind[number + 1]
    return others


def _union(sets: Iterable[int]) -> int:
    return reduce(or_, sets, 0)


def _lowest(nodes: int) -> int:
    """Return the lowest number in a set that is not empty."""
    return (nodes & -nodes).bit_length() - 1


def _numbers(nodes: int) -> Iterator[int]:
    """Yield the numbers in a set, in order."""
    while nodes:
        yield _lowest(nodes)
        nodes &= nodes - 1
