"""Building a workflow: nodes, edges, routers, visit limits (HedraRAG, Listing 1)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import Any

from ctxreuse.context.checks import checked_list
from ctxreuse.errors import describe
from ctxreuse.workflow.errors import GraphError, quoted
from ctxreuse.workflow.graph.compiled import (
    Edges,
    Graph,
    RouteFunction,
    Router,
    check_flow,
    check_names,
    mermaid_lines,
)
from ctxreuse.workflow.graph.nodes import (
    END,
    START,
    Function,
    Generation,
    Node,
    Retrieval,
    check_key,
)
from ctxreuse.workflow.graph.state import State, Template
from ctxreuse.workflow.models.language_model import LanguageModel

MOST_NODES = 1_000
"""Nodes of a graph: what checks and runs it takes up to the square of their number in steps."""


class WorkflowGraph:
    """A workflow in the making: stages as nodes, joined by edges; at most 1,000 nodes.

    Every method that adds something returns the graph, and refuses wrong arguments at once. Errors
    that only the whole graph shows are raised by `compile`.

    Args:
        inputs: The keys of a run's inputs; a bare text is the value of the first.
        defaults: The values of keys that no node has written yet; an input that has one may be left
            out. Copied for each run.
        answer: The key of the answer. None takes the one that generations before END write, or, if
            that is not a single one, that of the last generation (or else node).
        name: The workflow's name, for metrics and errors.

    Example:
        >>> graph = WorkflowGraph().add_retrieval("search", query="{input}")
        >>> graph = graph.add_generation("answer", prompt="Answer {input} using {docs}.")
        >>> graph = graph.add_edge(START, "search").add_edge("search", "answer")
        >>> graph = graph.add_edge("answer", END)
    """

    def __init__(
        self,
        *,
        inputs: Iterable[str] = ("input",),
        defaults: Mapping[str, Any] | None = None,
        answer: str | None = None,
        name: str = "workflow",
    ) -> None:
        if not isinstance(name, str) or not name:
            raise GraphError(
                f"a workflow's name must be a string and not empty, not {describe(name)}"
            )
        if answer is not None:
            check_key("answer", answer)
        keys = checked_list("inputs", inputs, "a list of keys", error=GraphError)
        for key in keys:
            check_key("inputs", key)
        if not keys:
            raise GraphError("inputs is empty; name at least one key, such as 'input'")
        self._name = name
        self._inputs = tuple(dict.fromkeys(keys))
        self._defaults = _checked_defaults(defaults)
        self._answer = answer
        self._nodes: dict[str, Node] = {}
        self._static: dict[str, dict[str, None]] = {START: {}}
        self._routers: dict[str, list[Router]] = {}
        self._compiled: Graph | None = None

    def __copy__(self) -> WorkflowGraph:
        copied = object.__new__(type(self))  # a graph on its own: nodes added to one are not both's
        vars(copied).update(
            vars(self),
            _nodes=dict(self._nodes),
            _static={source: dict(targets) for source, targets in self._static.items()},
            _routers={source: list(routers) for source, routers in self._routers.items()},
        )
        return copied

    def add_generation(
        self,
        name: str,
        *,
        prompt: str,
        output: str | None = None,
        system: str | None = None,
        params: Mapping[str, Any] | None = None,
        llm: LanguageModel | None = None,
        max_visits: int | None = None,
        otherwise: str | None = None,
    ) -> WorkflowGraph:
        """Add a call of the language model.

        Args:
            name: The node's name, a new one.
            prompt: The user's message, with `{key}` for values of the state. Documents are shown
                before it, and called "the documents above" in it.
            output: The key that the answer is written to; None takes the node's name.
            system: The system message, with variables too.
            params: Further parameters of the request, such as `{"max_tokens": 100}`.
            llm: The model; None asks the workflow engine's.
            max_visits: How often the node runs in one run at most.
            otherwise: The node, or END, to go to after the last visit. None fails the run then.
        """
        place = f"of node {quoted([name])}"
        return self._add(
            Generation(
                name=name,
                output=name if output is None else output,
                prompt=Template.parse(prompt, f"the prompt {place}"),
                system=None if system is None else Template.parse(system, f"the system {place}"),
                params={} if params is None else params,
                llm=llm,
                max_visits=max_visits,
                otherwise=otherwise,
            )
        )

    def add_retrieval(
        self,
        name: str,
        *,
        query: str,
        k: int = 5,
        output: str = "docs",
        retriever: str | None = None,
        max_visits: int | None = None,
        otherwise: str | None = None,
    ) -> WorkflowGraph:
        """Add a search.

        Args:
            name: The node's name, a new one.
            query: The query, with `{key}` for values of the state.
            k: How many documents are wanted.
            output: The key that the documents are written to.
            retriever: Which of the workflow engine's retrievers is asked; None takes the default.
            max_visits: As in `add_generation`.
            otherwise: As in `add_generation`.
        """
        return self._add(
            Retrieval(
                name=name,
                output=output,
                query=Template.parse(query, f"the query of node {quoted([name])}"),
                k=k,
                retriever=retriever,
                max_visits=max_visits,
                otherwise=otherwise,
            )
        )

    def add_function(
        self,
        name: str,
        function: Callable[[State], Any],
        *,
        output: str | None = None,
        max_visits: int | None = None,
        otherwise: str | None = None,
    ) -> WorkflowGraph:
        """Add a function of the state, such as one that collects notes.

        Args:
            name: The node's name, a new one.
            function: Async, or sync and quick: the event loop waits for it. Its result is written.
                It must not change values of the state.
            output: The key that the result is written to; None takes the node's name.
            max_visits: As in `add_generation`.
            otherwise: As in `add_generation`.
        """
        return self._add(
            Function(
                name=name,
                output=name if output is None else output,
                function=function,
                max_visits=max_visits,
                otherwise=otherwise,
            )
        )

    def add_edge(
        self, source: str, target: str | RouteFunction, targets: Iterable[str] | None = None
    ) -> WorkflowGraph:
        """Add an edge: the node that follows a node. All edges of a node are followed.

        A node runs once for those before it that end side by side, and again for later ones.

        Args:
            source: A node's name, or START. The node may be added later.
            target: A node's name, END, or a router: a function, sync or async, that is given the
                state and returns a name, END, or a list of them.
            targets: What a router may return, END included. None allows anything, and so makes a
                cycle of every node: give `targets`, or some `max_visits`.
        """
        if not isinstance(source, str):
            raise GraphError(f"an edge comes from a node's name or START, not {describe(source)}")
        if source == END:
            raise GraphError("an edge cannot come from END, where runs end; give its source")
        if isinstance(target, str):
            if targets is not None:
                raise GraphError(
                    f"the edge from {quoted([source])} to {quoted([target])} has targets=, which "
                    "only a router has; leave it out"
                )
            self._static.setdefault(source, {})[target] = None
        elif callable(target):
            router = Router(target, _checked_targets(source, targets))
            self._static.setdefault(source, {})
            self._routers.setdefault(source, []).append(router)
        else:
            raise GraphError(
                f"the edge from {quoted([source])} leads to {describe(target)}; "
                "give a node's name, END, or a function that returns one"
            )
        self._compiled = None
        return self

    def compile(self) -> Graph:
        """Return the graph, validated, or raise GraphError; it is kept until something is added."""
        if self._compiled is None:
            graph = self._assembled()
            check_flow(graph)
            self._compiled = graph
        return self._compiled

    def draw(self) -> str:
        """Return the graph as a Mermaid flowchart, even if it does not compile yet.

        Raises:
            GraphError: The graph has no nodes, or an edge leads to a missing one.
        """
        return "\n    ".join(["flowchart TD", *mermaid_lines(self._assembled())]) + "\n"

    def _add(self, node: Node) -> WorkflowGraph:
        if node.name in self._nodes:
            raise GraphError(f"node {quoted([node.name])} is there already; give it another name")
        if len(self._nodes) == MOST_NODES:
            raise GraphError(
                f"workflow {quoted([self._name])} has {MOST_NODES:,} nodes already, the most that "
                "there can be; let one function do what several of them do"
            )
        self._nodes[node.name] = node
        self._compiled = None
        return self

    def _assembled(self) -> Graph:
        sources = dict.fromkeys((START, *self._nodes, *self._static))
        static, routers = self._static.get, self._routers.get
        graph = Graph(
            name=self._name,
            nodes=dict(self._nodes),
            edges={one: Edges(tuple(static(one, ())), tuple(routers(one, ()))) for one in sources},
            inputs=self._inputs,
            defaults=self._defaults,
            answer=self._answer_key(),
        )
        check_names(graph)
        return graph

    def _answer_key(self) -> str:
        outputs = [node.output for node in self._nodes.values()]
        if self._answer is not None:
            known = [*outputs, *self._inputs, *self._defaults]
            if self._answer not in known:
                raise GraphError(
                    f"answer={quoted([self._answer])} is written by no node; "
                    f"choose one of {quoted(dict.fromkeys(known))}"
                )
            return self._answer
        generations = [one for one in self._nodes.values() if isinstance(one, Generation)]
        leading = [source for source, targets in self._static.items() if END in targets]
        for source, routers in self._routers.items():
            leading += [source for router in routers if END in (router.targets or ())]
        last = {one.output for one in generations if one.name in leading}
        if len(last) == 1:
            return last.pop()
        if generations:
            return generations[-1].output
        return outputs[-1] if outputs else ""  # a graph without nodes is refused


def compiled_graph(graph: object) -> Graph:
    """Return a graph, compiled if it is not yet."""
    compiled = graph.compile() if isinstance(graph, WorkflowGraph) else graph
    if not isinstance(compiled, Graph):
        raise GraphError(f"graph must be a WorkflowGraph, not {describe(graph)}")
    return compiled


def _checked_defaults(defaults: Mapping[str, Any] | None) -> dict[str, Any]:
    if defaults is None:
        return {}
    if not isinstance(defaults, Mapping):
        raise GraphError(
            f"defaults must be a dict of keys and values, not {type(defaults).__name__}"
        )
    copies = {}
    for key, value in defaults.items():
        check_key("defaults", key)
        try:
            copies[key] = deepcopy(value)
        except Exception as error:  # a foreign __deepcopy__ may raise anything
            raise GraphError(
                f"the default of {quoted([key])} cannot be copied for each run "
                f"({type(error).__name__}); let a function write it instead"
            ) from error
    return copies


def _checked_targets(source: str, targets: Iterable[str] | None) -> tuple[str, ...] | None:
    if targets is None:
        return None
    what = f"targets= of the router behind {quoted([source])}"
    names = checked_list(what, targets, "a list of names", error=GraphError)
    for name in names:
        if not isinstance(name, str):
            raise GraphError(f"{what} holds {describe(name)}; give nodes' names or END")
    if not names:
        raise GraphError(f"{what} is empty; name what it may return, END included")
    return tuple(dict.fromkeys(names))
