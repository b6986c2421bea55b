"""Where a run of a graph begins, and what its edges lead to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

from ctxreuse.errors import describe
from ctxreuse.workflow.errors import RouterError, StateKeyError, VisitLimitError, quoted
from ctxreuse.workflow.graph.compiled import Graph, Router
from ctxreuse.workflow.graph.nodes import END, Node, Retrieval
from ctxreuse.workflow.graph.state import State


def initial_state(graph: Graph, inputs: Mapping[str, Any]) -> State:
    """Return the state in which a run begins; defaults are copied for it."""
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


def routed(graph: Graph, source: str, router: Router, returned: object) -> tuple[str, ...]:
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
    return tuple(names)


def next_wavefront(graph: Graph, targets: Iterable[str], state: State) -> tuple[str, ...]:
    """Return the nodes that run next, in the order of `nodes`; an empty result ends the run."""
    reached = {_within_limit(graph, target, state) for target in targets}
    writer_of: dict[str, str] = {}
    for name in filter(reached.__contains__, graph.nodes):
        output = graph.nodes[name].output
        if output in writer_of:  # a router led there: other edges are checked with the graph
            raise RouterError(
                f"nodes {quoted([writer_of[output], name])} would run side by side and both "
                f"write {quoted([output])}; give them different output="
            )
        writer_of[output] = name
    return tuple(writer_of.values())


def certain_successor(graph: Graph, name: str, state: State) -> Node | None:
    """Return the node that certainly follows one that runs alone; its visit is to be committed."""
    edges = graph.edges[name]
    if edges.routers or len(edges.static) != 1:
        return None
    try:
        target = _within_limit(graph, edges.static[0], state.commit({}, [name]))
    except VisitLimitError:
        return None
    return graph.nodes.get(target)


def may_search_again(graph: Graph) -> bool:
    """Return whether a run may search twice, so that the first is worth remembering."""
    searches = sum(isinstance(node, Retrieval) for node in graph.nodes.values())
    has_cycles = any(node.max_visits is not None for node in graph.nodes.values())
    return searches > 1 or (searches == 1 and has_cycles)


def _within_limit(graph: Graph, target: str, state: State) -> str:
    while target != END:
        node = graph.nodes[target]
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
