"""The checks of a graph before it is run: all runs end, nothing is written twice at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from graphlib import CycleError, TopologicalSorter
from itertools import accumulate
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
                    before = flow.before(name)
                    written = [two.output for one, two in graph.nodes.items() if one in before]
                    known = dict.fromkeys([*graph.inputs, *graph.defaults, *written])
                    raise _unknown(graph, template, key, known)


def _check_known(graph: Graph, names: Iterable[str], what: str) -> None:
    for name in names:
        if not isinstance(name, str) or (name not in graph.nodes and name != END):
            raise GraphError(
                f"{what} {quoted([name])}, which is no node; add it, or choose one of "
                f"{quoted(graph.nodes)}{suggestion(name, graph.nodes)}"
            )


def _check_cycles(graph: Graph, flow: Flow) -> None:
    cycle = flow.endless_cycle()
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


def _unknown(graph: Graph, template: Template, key: str, known: Iterable[str]) -> GraphError:
    writers = [name for name, node in graph.nodes.items() if node.output == key]
    why = f"only {quoted(writers)} writes, and never before it" if writers else "nothing writes"
    return GraphError(
        f"{template.where} reads {{{key}}}, which {why}; before it "
        f"there can be {quoted(known)}{suggestion(key, known)}. Correct the name, "
        "or give the key a value with inputs= or defaults="
    )


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
        self._landings = self._all_landings(graph)
        self._first = self._edges_from(graph.edges[START], with_limits=False)
        self._edges = [self._edges_from(graph.edges[name]) for name in graph.nodes]
        self._successors = [*map(_union, self._edges), 0]  # nothing follows END
        self._writers: dict[str, int] = {}  # the nodes that write each key
        for number, node in enumerate(self._nodes):
            self._writers[node.output] = self._writers.get(node.output, 0) | 1 << number

    def unreached(self) -> Iterator[str]:
        """Yield the nodes that START does not lead to."""
        reached = _reach(_union(self._first), self._successors)
        yield from self._named(self._all & ~self._end & ~reached)

    def without_end(self) -> Iterator[str]:
        """Yield the nodes that do not lead to END."""
        before = [0] * len(self._names)
        for number, following in enumerate(self._successors):
            for other in _numbers(following):
                before[other] |= 1 << number
        yield from self._named(self._all & ~_reach(self._end, before))

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

    def endless_cycle(self) -> list[str]:
        """Return the nodes of a cycle on which no node has a visit limit, if there is one."""
        unlimited = sum(
            1 << number for number, node in enumerate(self._nodes) if node.max_visits is None
        )
        return _cycle(
            {
                self._names[number]: self._named(self._successors[number] & unlimited)
                for number in _numbers(unlimited)
            }
        )

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
        beside, stepped = [0] * len(self._names), [0] * len(self._names)
        queue: dict[int, None] = {}  # nodes with new partners

        def add(nodes: int, others: int) -> None:
            for number in _numbers(nodes & ~self._end):
                new = others & ~(beside[number] | self._end | 1 << number)
                if new:
                    beside[number] |= new
                    queue[number] = None

        for edges in (self._first, *self._edges):
            for targets, others in _with_others(edges).items():
                add(targets, others)
        while queue:
            one, _ = queue.popitem()
            for following in _numbers(self._successors[one]):
                # the first node of a pair steps on, then the second, once for each node that the
                # first steps on
                new = beside[one] & ~stepped[following]
                stepped[following] |= new
                add(1 << following, _union(self._successors[other] for other in _numbers(new)))
        return beside

    def _all_landings(self, graph: Graph) -> list[int]:
        """Return for each target itself and where visit limits can send an edge to it instead."""
        landings = [1 << number for number in range(len(self._names))]
        detours = _detours(graph)
        for name in TopologicalSorter(detours).static_order():
            for then in detours.get(name, ()):
                landings[self._number[name]] |= landings[self._number[then]]
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


def _reach(start: int, following: Sequence[int]) -> int:
    """Return what some nodes and END lead to, themselves included."""
    reached, ahead = start, start
    while ahead:
        number = next(_numbers(ahead))
        new = following[number] & ~reached
        reached |= new
        ahead = ahead & (ahead - 1) | new
    return reached


def _numbers(nodes: int) -> Iterator[int]:
    """Yield the numbers in a set, in order."""
    while nodes:
        yield (nodes & -nodes).bit_length() - 1
        nodes &= nodes - 1
