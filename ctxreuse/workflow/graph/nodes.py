"""The nodes of a workflow: generations, retrievals (HedraRAG, section 4.1) and users' functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias

from ctxreuse.context.checks import checked_integer
from ctxreuse.context.copies import made_with
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.pipeline.context_finder import reason_of_words
from ctxreuse.planning.plan import Strategy
from ctxreuse.serving.client.request import check_params
from ctxreuse.workflow.errors import GraphError, quoted
from ctxreuse.workflow.graph.state import State, Template
from ctxreuse.workflow.models.language_model import LanguageModel, checked_llm

START = "__start__"
"""Where every run begins."""

END = "__end__"
"""Where every branch of a run ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A node: the fields that all kinds have."""

    name: str
    output: str
    max_visits: int | None = None  # in one run; None sets no bound
    otherwise: str | None = None  # goes here after the last visit; None: fails the run

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or self.name in (START, END):
            raise GraphError(
                f"a node's name must be a string, not empty and neither START nor END, "
                f"not {describe(self.name)}"
            )
        check_key(f"output= of node {quoted([self.name])}", self.output)
        if self.max_visits is not None:
            checked_count(f"max_visits of node {quoted([self.name])}", self.max_visits)
        elif self.otherwise is not None:
            raise self.error("it has otherwise= without max_visits=; give both, or neither")

    @property
    def templates(self) -> tuple[Template, ...]:
        """The texts that read the state."""
        values = (getattr(self, one.name) for one in fields(self))
        return tuple(value for value in values if isinstance(value, Template))

    def error(self, message: str) -> GraphError:
        """Return an error that names the node."""
        return GraphError(f"node {quoted([self.name])}: {message}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation(Stage):
    """A call of the language model."""

    prompt: Template
    system: Template | None = None
    params: Mapping[str, Any] = field(default_factory=dict, hash=False)
    llm: LanguageModel | None = field(default=None, hash=False)
    policy: Strategy = field(init=False, compare=False)

    def __post_init__(self) -> None:
        Stage.__post_init__(self)  # a class with slots is made anew, which super() does not know
        words = self.prompt.literals + (() if self.system is None else self.system.literals)
        policy: Strategy = "reuse" if reason_of_words(words) is None else "none"
        object.__setattr__(self, "policy", policy)
        try:
            check_params(self.params)
        except InvalidRequestError as error:
            raise self.error(f"its params cannot be sent: {error}") from error
        try:
            if self.llm is not None:
                checked_llm(self.llm)
        except InvalidRequestError as error:
            raise self.error(f"its {error}") from error
        object.__setattr__(self, "params", MappingProxyType(dict(self.params)))

    def __reduce__(self) -> tuple[Any, ...]:
        given = {one.name: getattr(self, one.name) for one in fields(self) if one.init}
        return made_with(Generation, **given | {"params": dict(self.params)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Retrieval(Stage):
    """A search."""

    query: Template
    k: int
    retriever: str | None = None

    def __post_init__(self) -> None:
        Stage.__post_init__(self)
        checked_count(f"k of node {quoted([self.name])}", self.k)
        if self.retriever is not None and not (isinstance(self.retriever, str) and self.retriever):
            raise self.error(
                f"its retriever must be a name that the engine knows, or None for the default one, "
                f"not {describe(self.retriever)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Function(Stage):
    """A user's function of the state, sync or async, whose result is written."""

    function: Callable[[State], Any]  # must not change values of the state

    def __post_init__(self) -> None:
        Stage.__post_init__(self)
        if not callable(self.function):
            raise self.error(f"its function must be callable, not {describe(self.function)}")


Node: TypeAlias = Generation | Retrieval | Function


def check_key(what: str, key: object) -> None:
    """Check that templates can read a key of the state."""
    if not isinstance(key, str) or not key.isidentifier():
        raise GraphError(
            f"{what} has the key {describe(key)}, which no {{variable}} can read; "
            "give a name of letters, digits and underscores"
        )


checked_count = partial(checked_integer, at_least=1, error=GraphError)
"""Returns an argument that counts something; raises GraphError if it is no integer from 1."""
