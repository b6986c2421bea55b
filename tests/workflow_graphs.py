"""What the tests of workflows share: small graphs."""

from __future__ import annotations

from typing import Any

from ctxreuse.workflow.graph import WorkflowGraph
from ctxreuse.workflow.nodes import END, START


def chain(*names: str, **options: Any) -> WorkflowGraph:
    """Return a graph of functions, one after the other."""
    graph = WorkflowGraph(**options)
    for name in names:
        graph.add_function(name, len)
    for source, target in zip((START, *names), (*names, END), strict=True):
        graph.add_edge(source, target)
    return graph


def looping(**limits: dict[str, Any]) -> WorkflowGraph:
    """Return a, b, c in a chain, and an edge back from b to a."""
    graph = WorkflowGraph()
    for name in "abc":
        graph.add_function(name, len, **limits.get(name, {}))
    graph.add_edge(START, "a").add_edge("a", "b").add_edge("b", "a")
    return graph.add_edge("b", "c").add_edge("c", END)
