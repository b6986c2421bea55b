"""A workflow run plainly: one stage after the other, wavefront by wavefront.

It shares nothing with the engine but the compiled graph and its templates, so that it can say what
the engine must give.
"""

import asyncio
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ctxreuse import ContextBlock
from ctxreuse.workflow.errors import RouterError, VisitLimitError
from ctxreuse.workflow.graph.compiled import Graph
from ctxreuse.workflow.graph.nodes import END, START, Generation, Node, Retrieval
from ctxreuse.workflow.graph.state import Documents, State


@dataclass(frozen=True)
class Asked:
    """What a language model is asked: the prompt, and all that can change its answer."""

    query: str
    blocks: tuple[ContextBlock, ...]
    system: str | None
    params: Mapping[str, Any]


@dataclass(frozen=True)
class Step:
    """A wavefront, and the committed state that its nodes read; the last wavefront is empty."""

    wavefront: tuple[str, ...]
    state: State


@dataclass(frozen=True)
class Interpreted:
    """What a run gave: its last state, and the wavefronts that it went through."""

    graph: Graph
    state: State
    wavefronts: tuple[tuple[str, ...], ...]

    @property
    def visits(self) -> list[str]:
        return [name for wavefront in self.wavefronts for name in wavefront]

    @property
    def answer(self) -> Any:
        return self.state.get(self.graph.answer)


Llm = Callable[[Asked], str]
Retrieve = Callable[[str, int], Sequence[ContextBlock | str]]


def interpret(graph: Graph, *given: Any) -> Interpreted:
    """Run a graph to its end with what `steps` is given."""
    *passed, last = steps(graph, *given)
    return Interpreted(graph, last.state, tuple(step.wavefront for step in passed))


def steps(
    graph: Graph,
    inputs: Mapping[str, Any] | str,
    llm: Llm,
    retrieve: Retrieve,
    retrievers: Mapping[str, Retrieve] | None = None,
) -> Iterator[Step]:
    """Yield each wavefront of a run before it runs, and an empty one at the end.

    A bare text is the graph's first input.
    """
    given = {graph.inputs[0]: inputs} if isinstance(inputs, str) else inputs
    state = State({**graph.defaults, **given})
    wavefront = _next_wavefront(graph, [START], state)
    while wavefront:
        yield Step(wavefront, state)
        writes = {}
        for name in wavefront:
            node = graph.nodes[name]
            writes[node.output] = _result(node, state, llm, retrieve, retrievers or {})
        state = state.commit(writes, wavefront)
        wavefront = _next_wavefront(graph, wavefront, state)
    yield Step((), state)


def _result(
    node: Node, state: State, llm: Llm, retrieve: Retrieve, retrievers: Mapping[str, Retrieve]
) -> Any:
    if isinstance(node, Generation):
        system = None if node.system is None else node.system.render_text(state)
        return llm(Asked(*node.prompt.render_prompt(state), system, node.params))
    if isinstance(node, Retrieval):
        ask = retrieve if node.retriever is None else retrievers[node.retriever]
        return Documents(ask(node.query.render_text(state), node.k))
    return awaited(node.function(state))


def _next_wavefront(graph: Graph, names: Iterable[str], state: State) -> tuple[str, ...]:
    reached = set()
    for name in names:
        targets = list(graph.edges[name].static)
        for router in graph.edges[name].routers:
            chosen = awaited(router.function(state))
            targets += [chosen] if isinstance(chosen, str) else chosen
        reached |= {_within_limit(graph, target, state) for target in targets}
    wavefront = tuple(name for name in graph.nodes if name in reached)
    if len({graph.nodes[name].output for name in wavefront}) < len(wavefront):
        raise RouterError(f"two writers of one key in {wavefront}")
    return wavefront


def _within_limit(graph: Graph, target: str, state: State) -> str:
    if target == END:
        return END
    node = graph.nodes[target]
    if node.max_visits is None or state.visits(target) < node.max_visits:
        return target
    if node.otherwise is None:
        raise VisitLimitError("too many visits", target)
    return _within_limit(graph, node.otherwise, state)


def awaited(value: Any) -> Any:
    """Return a value, awaited in an event loop of its own if it needs that."""
    if not inspect.isawaitable(value):
        return value

    async def wait() -> Any:
        return await value

    with ThreadPoolExecutor(1) as thread:  # the caller may be in an event loop
        return thread.submit(lambda: asyncio.run(wait())).result()
