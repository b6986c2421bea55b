"""A plan as chat messages: stable text first, then blocks, annotation, question.

Everything that requests can share comes before anything that changes per request: an engine's
prefix cache stops at the first token that differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ctxreuse.context.blocks import BlockId, ContextBlock, Message, copied_message
from ctxreuse.context.templates import Templates


class SentBlock(NamedTuple):
    """A block that this turn's message shows, under its label.

    Attributes:
        label: Its label.
        block: The block, whole.
        repeated: Characters at its start that the rendering leaves out because they stand before.
        repeats: The label under which they stand.
    """

    label: str
    block: ContextBlock
    repeated: int = 0
    repeats: str = ""


class Reference(NamedTuple):
    """A block that is left out because an earlier message shows it under `label`."""

    label: str
    id: BlockId
    annotation: str


Part = SentBlock | Reference


def render_block(label: str, text: str, templates: Templates) -> str:
    """Return a block as it stands in the message; the text itself is not altered."""
    return templates.before_text(label) + text + templates.after_text


def _shown_text(part: SentBlock, templates: Templates) -> str:
    if not part.repeated:
        return part.block.text
    return templates.overlap_annotation(part.repeats) + part.block.text[part.repeated :]


def render_turn(
    parts: Iterable[Part], order_annotation: str | None, query: str, templates: Templates
) -> str:
    """Return the content of one turn's user message.

    Args:
        parts: Sent blocks and references, in the order in which they are shown.
        order_annotation: The ranking in words, or None.
        query: The question; an empty one adds nothing.
        templates: The words around all this.
    """
    pieces = [
        render_block(part.label, _shown_text(part, templates), templates)
        if isinstance(part, SentBlock)
        else part.annotation
        for part in parts
    ]
    closing = [order_annotation, query]
    if templates.order_position == "after_question":
        closing.reverse()
    pieces += [piece for piece in closing if piece]
    return templates.separator.join(pieces)


def render_messages(
    system: str | None, history: Sequence[Message] | None, content: str | None = None
) -> list[dict[str, Any]]:
    """Return OpenAI chat messages: system text, history as it was sent, this turn if any."""
    messages: list[dict[str, Any]] = []
    if system is not None:
        messages.append({"role": "system", "content": system})
    messages += [copied_message(message) for message in history or ()]
    if content is not None:
        messages.append({"role": "user", "content": content})
    return messages


def message_texts(message: Message) -> list[str]:
    """Return the texts in a chat message: its content, or the text parts of a multi-part one."""
    content = message.get("content")
    if isinstance(content, str):
        return [content]
    if not isinstance(content, (list, tuple)):
        return []
    texts = (part.get("text") for part in content if isinstance(part, Mapping))
    return [text for text in texts if isinstance(text, str)]
