"""What the tests of workflows share: small graphs."""

import asyncio
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

from ctxreuse.workflow.graph.builder import WorkflowGraph
from ctxreuse.workflow.graph.nodes import END, START
from ctxreuse.workflow.graph.state import Documents, State


def chain(*names: str, **options: Any) -> WorkflowGraph:
    graph = WorkflowGraph(**options)
    for name in names:
        graph.add_function(name, len)
    for source, target in zip((START, *names), (*names, END), strict=True):
        graph.add_edge(source, target)
    return graph


def looping(**limits: dict[str, Any]) -> WorkflowGraph:
    graph = WorkflowGraph()
    for name in "abc":
        graph.add_function(name, len, **limits.get(name, {}))
    graph.add_edge(START, "a").add_edge("a", "b").add_edge("b", "a")
    return graph.add_edge("b", "c").add_edge("c", END)


NAMES = tuple("abcde")


@st.composite
def rag_graphs(
    draw: Any,
    retrievers: Sequence[str | None] = (None,),
    route: Callable[[Sequence[str]], Callable[[State], str]] | None = None,
) -> WorkflowGraph:
    """Build a graph whose nodes, functions and routers go by what the state holds.

    It is near to a chain, with some edges, routers, limits and common keys besides, and may not
    compile. The question of each prompt stands in << >>. Routers that `route` makes may not name
    their targets.
    """
    names = NAMES[: draw(st.integers(2, len(NAMES)))]
    keys = ("input", *(f"of_{name}" for name in names), "shared")
    anything = st.sampled_from((*names, END))
    graph = WorkflowGraph(defaults=dict.fromkeys(keys[1:], ""), name=f"of {len(names)}")
    for name in names:
        kind = draw(
            st.sampled_from(("generation", "retrieval", "generation", "retrieval", "other"))
        )
        limit = draw(st.sampled_from((1, 2, 3, 3, None)))
        reading = draw(st.lists(st.sampled_from(keys), min_size=1, max_size=3, unique=True))
        text = " ".join(f"{{{key}}}" for key in reading)
        options = {
            "output": draw(st.sampled_from((*3 * (f"of_{name}",), "shared"))),
            "max_visits": limit,
            "otherwise": limit and draw(st.sampled_from((END, END, None, *names))),
        }
        if kind == "generation":
            system = draw(st.sampled_from((None, "Be brief, {input}.")))
            params = draw(st.sampled_from(({}, {"temperature": 1.0})))
            prompt = f"<<{name} {text}>>"
            graph.add_generation(name, prompt=prompt, system=system, params=params, **options)
        elif kind == "retrieval":
            k, asked = draw(st.integers(1, 6)), draw(st.sampled_from(retrievers))
            graph.add_retrieval(name, query=text, k=k, retriever=asked, **options)
        else:
            function = draw(st.sampled_from((_told, _told_later, _best_two)))
            graph.add_function(name, function, **options)
    for source, target in zip((START, *names), (*names, END), strict=True):
        if draw(st.integers(0, 7)):
            graph.add_edge(source, target)
    for _ in range(draw(st.integers(0, 3))):
        source = draw(st.sampled_from((START, *names)))
        targets = draw(st.lists(anything, min_size=1, max_size=3, unique=True))
        if route is not None and not draw(st.integers(0, 3)):
            graph.add_edge(source, route(targets))
        elif draw(st.booleans()):
            graph.add_edge(source, (route or _router)(targets), targets)
        else:
            graph.add_edge(source, targets[0])
    return graph


def _told(state: State) -> str:
    """Return a short text that follows from all that is known."""
    assert not state.speculative
    values = {
        key: [block.id for block in value] if isinstance(value, Documents) else value
        for key, value in state.items()
    }
    return f"f{zlib.crc32(repr(sorted(values.items())).encode()) % 50}"


async def _told_later(state: State) -> str:
    await asyncio.sleep(0)
    return _told(state)


def _best_two(state: State) -> Documents:
    """Return two of the documents that are known, the other way round."""
    assert not state.speculative
    known = [block for value in state.values() if isinstance(value, Documents) for block in value]
    return Documents(known[:2][::-1])


def _router(targets: Sequence[str]) -> Callable[[State], str]:
    def choose(state: State) -> str:
        passed = sum(state.visits(name) for name in NAMES)
        return targets[(int(_told(state)[1:]) + passed) % len(targets)]

    return choose
