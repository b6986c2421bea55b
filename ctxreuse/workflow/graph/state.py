"""The state of a run: values by key, documents among them, and the texts that show them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, SupportsIndex, overload

from ctxreuse.context.blocks import BlockKey, ContextBlock
from ctxreuse.context.checks import checked_integer, checked_kind, checked_texts
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.workflow.errors import GraphError, StateKeyError, quoted


class State(Mapping[str, Any]):
    """The values of a run, and how often nodes have run.

    Users read it as a mapping. What nodes write gives a new state, so a stage under way sees no
    change. Values are shared between states: do not change them.
    """

    __slots__ = ("_values", "_visits")

    speculative = False
    """Whether some values are only expected."""

    def __init__(
        self, values: Mapping[str, Any] | None = None, *, visits: Mapping[str, int] | None = None
    ) -> None:
        known = {} if values is None else checked_kind("values", values, Mapping, "a dict or None")
        self._values: Mapping[str, Any] = dict(known)
        times = {} if visits is None else checked_kind("visits", visits, Mapping, "a dict or None")
        self._visits = Counter(
            {node: checked_integer("each of visits", number) for node, number in times.items()}
        )

    def __getitem__(self, key: str) -> Any:
        try:
            return self._values[key]
        except KeyError:
            raise StateKeyError(
                f"the state has no {quoted([key])}; it has {quoted(self)}. "
                "Read it with state.get, or give it a value with defaults={...}",
                key=key,
            ) from None

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({quoted(self)})"  # values may be whole documents

    def visits(self, node: str) -> int:
        """Return how often a node has run."""
        return self._visits[checked_kind("node", node, str, "a node's name")]

    def commit(self, writes: Mapping[str, Any], visited: Iterable[str]) -> State:
        """Return the state after a wavefront (each node once); this one stays as it is."""
        assert not self.speculative, "expected values are never committed on"
        checked_kind("writes", writes, Mapping, "a dict")
        ran = checked_texts("visited", visited, "a list of nodes' names")
        return State({**self._values, **writes}, visits=self._visits + Counter(ran))

    def overlay(self, writes: Mapping[str, Any]) -> Overlay:
        """Return this state as it would be if those values had been written."""
        assert not self.speculative, "speculation is one stage deep"
        checked_kind("writes", writes, Mapping, "a dict")
        return Overlay({**self._values, **writes}, visits=self._visits)


class Overlay(State):
    """A state with values that are only expected."""

    __slots__ = ()

    speculative = True


class Documents(tuple[ContextBlock, ...]):
    """Retrieved documents, best first: a tuple whose slices and sums are documents, too.

    A prompt shows them before all that changes with each request. A user's function that ranks or
    selects documents should return `Documents`, too.

    Args:
        blocks: The documents. Plain strings become blocks with derived ids.
    """

    __slots__ = ()

    def __new__(cls, blocks: Iterable[ContextBlock | str] = ()) -> Documents:
        """Return the documents."""
        if isinstance(blocks, (str, bytes, ContextBlock)) or not isinstance(blocks, Iterable):
            raise InvalidRequestError(  # without the value, which may be a document's text
                "documents must be a list of ContextBlock or str, not a value of type "
                f"{type(blocks).__name__}; a single one goes into a list of one"
            )
        kinds, words = (ContextBlock, str), "a ContextBlock or str"
        known: list[Any] = [checked_kind("a document", one, kinds, words) for one in blocks]
        texts = (ContextBlock(text=one) if isinstance(one, str) else one for one in known)
        return super().__new__(cls, texts)

    @overload
    def __getitem__(self, index: SupportsIndex) -> ContextBlock: ...
    @overload
    def __getitem__(self, index: slice) -> Documents: ...
    def __getitem__(self, index: SupportsIndex | slice) -> ContextBlock | Documents:
        if isinstance(index, slice):
            return Documents(super().__getitem__(index))
        return super().__getitem__(index)

    def __add__(self, others: Iterable[ContextBlock | str]) -> Documents:  # type: ignore[override]
        return Documents((*self, *Documents(others)))

    def __repr__(self) -> str:
        return f"Documents({len(self)})"  # no texts: a state may end up in a log


def documents_in(value: object) -> Documents | None:
    """Return a value of the state as documents; None if it is something else."""
    if isinstance(value, Documents):
        return value
    if isinstance(value, ContextBlock):
        return Documents([value])
    if not isinstance(value, (list, tuple)) or not value:
        return None
    return Documents(value) if all(isinstance(item, ContextBlock) for item in value) else None


DOCUMENTS_ABOVE = "the documents above"
NO_DOCUMENTS = "no documents"

_BRACES = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


@dataclass(frozen=True, slots=True)
class Template:
    """A text with `{name}` variables and braces `{{`, `}}`; values are not read as templates."""

    literals: tuple[str, ...]
    names: tuple[str, ...]
    where: str = field(default="a template", compare=False)

    @classmethod
    def parse(cls, text: str, where: str = "a template") -> Template:
        """Return the template that a text describes."""
        if not isinstance(text, str):
            raise GraphError(f"{where} must be a string, not {describe(text)}")
        literals: list[list[str]] = [[]]  # each in pieces: a text may hold thousands of braces
        names, end = [], 0
        for found in _BRACES.finditer(text):
            literals[-1].append(text[end : found.start()])
            end = found.end()
            if found[0] in ("{{", "}}"):
                literals[-1].append(found[0][0])
            elif found[1] is None:
                raise GraphError(
                    f"{where} has a lone {found[0]!r} at character {found.start()}; "
                    f"write {2 * found[0]!r} for a brace, {{name}} for a variable"
                )
            elif not found[1].isidentifier():
                raise GraphError(
                    f"{where} has the variable {quoted([found[1]])}; a variable is the bare name "
                    "of a key, without attributes, indexes, conversions or formats; write {{ and "
                    "}} for braces"
                )
            else:
                names.append(found[1])
                literals.append([])
        literals[-1].append(text[end:])
        return cls(tuple(map("".join, literals)), tuple(names), where)

    @property
    def variables(self) -> tuple[str, ...]:
        """The names of its variables, each once."""
        return tuple(dict.fromkeys(self.names))

    def render_text(self, state: Mapping[str, Any]) -> str:
        """Return the text with the state's values: a query or a system text."""
        text = [self.literals[0]]
        for name, literal in zip(self.names, self.literals[1:], strict=True):
            if name not in state:
                raise StateKeyError(
                    f"{self.where} reads {{{name}}}, which nothing has written yet; give it a "
                    "value with defaults={...}, or go to a node that writes it first",
                    key=name,
                )
            value = state[name]
            if (documents := documents_in(value)) is not None:
                value = "\n\n".join(block.text for block in documents)
            elif isinstance(value, (list, tuple)):
                texts = (one.text if isinstance(one, ContextBlock) else str(one) for one in value)
                value = "\n".join(texts)
            text += (str(value), literal)
        return "".join(text)

    def render_prompt(self, state: Mapping[str, Any]) -> tuple[str, tuple[ContextBlock, ...]]:
        """Return the text, which only refers to documents, and apart these, which stand first."""
        blocks: dict[BlockKey, ContextBlock] = {}
        values = {name: state[name] for name in self.names if name in state}
        for name, value in values.items():
            documents = documents_in(value)
            if documents is not None:
                values[name] = DOCUMENTS_ABOVE if documents else NO_DOCUMENTS
                for block in documents:
                    blocks.setdefault(block.key, block)
        return self.render_text(values), tuple(blocks.values())
