"""A graph as a Mermaid flowchart: text that Markdown viewers show as a picture."""

from __future__ import annotations

from collections.abc import Iterator

from ctxreuse.workflow.graph.compiled import Graph
from ctxreuse.workflow.graph.nodes import END, START, Generation, Node, Retrieval

_START_ID = "n_start"
_END_ID = "n_end"


def drawn(graph: Graph) -> str:
    """Return a graph as a Mermaid flowchart.

    Generations are boxes, retrievals cylinders, functions hexagons. Edges that a router may take
    are dashed; a labelled dashed edge is where a visit limit leads instead.

    Args:
        graph: A graph whose names are known to be right.

    Returns:
        Lines of ASCII text, but for letters and digits of other scripts in names. Everything else
        in a name is escaped, so that no name is read as Mermaid's syntax or as HTML.
    """
    return "\n".join(["flowchart TD", *(f"    {line}" for line in _lines(graph))]) + "\n"


def _lines(graph: Graph) -> Iterator[str]:
    ids = {name: f"n{number}" for number, name in enumerate(graph.nodes)}
    ids |= {START: _START_ID, END: _END_ID}
    yield f'{_START_ID}(["start"])'
    for name, node in graph.nodes.items():
        yield ids[name] + _shape(node)
    yield f'{_END_ID}(["end"])'
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
    label = _escaped(node.name)
    if node.max_visits is not None:
        label += f"<br>at most {_visits(node)}"
    if isinstance(node, Generation):
        return f'["{label}"]'
    if isinstance(node, Retrieval):
        return f'[("{label}")]'
    return f'{{{{"{label}"}}}}'


def _visits(node: Node) -> str:
    return "1 visit" if node.max_visits == 1 else f"{node.max_visits} visits"


def _escaped(name: str) -> str:
    return "".join(
        letter if letter.isalnum() or letter in " _-" else f"#{ord(letter)};" for letter in name
    )
