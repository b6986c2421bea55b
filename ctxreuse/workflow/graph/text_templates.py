"""Texts with variables: prompts and queries, filled in from the state."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ctxreuse.context.blocks import BlockKey, ContextBlock
from ctxreuse.errors import describe
from ctxreuse.workflow.errors import GraphError, StateKeyError, quoted
from ctxreuse.workflow.graph.state import documents_in

DOCUMENTS_ABOVE = "the documents above"
NO_DOCUMENTS = "no documents"

_BRACES = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt that is ready to be planned.

    Attributes:
        query: The text, in which documents are only referred to.
        blocks: The documents, each once, best first.
    """

    query: str
    blocks: tuple[ContextBlock, ...] = ()


@dataclass(frozen=True, slots=True)
class Template:
    """A text with `{name}` variables; `{{` and `}}` are braces.

    A variable has no attributes, indexes, conversions or formats, so that a template from elsewhere
    shows nothing but values of the state. Values are never read as templates.

    Args:
        literals: The texts around the variables, one more than there are variables.
        names: The variables, in the text's order.
        where: The template's place, for error messages.

    Example:
        >>> Template.parse("Answer {input} in {{one}} line.").render_text({"input": "Why?"})
        'Answer Why? in {one} line.'
    """

    literals: tuple[str, ...]
    names: tuple[str, ...]
    where: str = field(default="a template", compare=False)

    @classmethod
    def parse(cls, text: str, where: str = "a template") -> Template:
        """Return the template that a text describes.

        Args:
            text: The text.
            where: Its place, such as "the prompt of node 'answer'".

        Raises:
            GraphError: wrong type, a lone brace, or a variable that is not an identifier.
        """
        if not isinstance(text, str):
            raise GraphError(f"{where} must be a string, not {describe(text)}")
        literals, names, end = [""], [], 0
        for found in _BRACES.finditer(text):
            literals[-1] += text[end : found.start()]
            end = found.end()
            if found[0] in ("{{", "}}"):
                literals[-1] += found[0][0]
            elif found[1] is None:
                raise GraphError(
                    f"{where} has a lone {found[0]!r} at character {found.start()}; "
                    f"write {2 * found[0]!r} for a brace, {{name}} for a variable"
                )
            elif not found[1].isidentifier():
                raise GraphError(
                    f"{where} has the variable {quoted([found[1]])}; a variable is the bare name "
                    "of a key, without attributes, indexes, conversions or formats"
                )
            else:
                names.append(found[1])
                literals.append("")
        literals[-1] += text[end:]
        return cls(tuple(literals), tuple(names), where)

    @property
    def variables(self) -> tuple[str, ...]:
        """The names of its variables, each once."""
        return tuple(dict.fromkeys(self.names))

    def render_text(
        self, state: Mapping[str, Any], shown: Callable[[object], str] | None = None
    ) -> str:
        """Return the text with the state's values: a query or a system text.

        Args:
            state: The state.
            shown: Returns the text of a value. None shows documents as their texts with blank lines
                between them, other lists and tuples as one item a line, everything else as `str`
                makes it.

        Raises:
            StateKeyError: If the state lacks a variable.
        """
        text = [self.literals[0]]
        for name, literal in zip(self.names, self.literals[1:], strict=True):
            if name not in state:
                raise StateKeyError(
                    f"{self.where} reads {{{name}}}, which nothing has written yet; give it a "
                    "value with defaults={...}, or go to a node that writes it first",
                    key=name,
                )
            text += ((shown or _as_text)(state[name]), literal)
        return "".join(text)

    def render_prompt(self, state: Mapping[str, Any]) -> RenderedPrompt:
        """Return the text with the state's values, and the documents apart.

        Documents must stand before all that changes from request to request for a prefix cache to
        hit, so the text refers to them as "the documents above", or as "no documents" where there
        are none. Everything else is shown as in `render_text`.

        Raises:
            StateKeyError: If the state lacks a variable.
        """
        blocks: dict[BlockKey, ContextBlock] = {}

        def referring(value: object) -> str:
            documents = documents_in(value)
            if documents is None:
                return _as_text(value)
            for block in documents:
                blocks.setdefault(block.key, block)
            return DOCUMENTS_ABOVE if documents else NO_DOCUMENTS

        query = self.render_text(state, referring)
        return RenderedPrompt(query, tuple(blocks.values()))


def _as_text(value: object) -> str:
    documents = documents_in(value)
    if documents is not None:
        return "\n\n".join(block.text for block in documents)
    if isinstance(value, (list, tuple)):
        return "\n".join(
            item.text if isinstance(item, ContextBlock) else str(item) for item in value
        )
    return str(value)
