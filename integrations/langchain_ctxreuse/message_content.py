"""The texts in a message's content, which is a string or a list of parts."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

from langchain_core.messages import BaseMessage

_Message = TypeVar("_Message", bound=BaseMessage)


class TextPart(NamedTuple):
    """A text in a message's content.

    Attributes:
        text: The text.
        part: Which part of a multi-part content it is; None if the content is a string.
    """

    text: str
    part: int | None


def text_parts(message: BaseMessage) -> list[TextPart]:
    """Return the texts in a message's content."""
    if isinstance(message.content, str):
        return [TextPart(message.content, None)]
    texts = [
        (one if isinstance(one, str) else one.get("text"), number)
        for number, one in enumerate(message.content)
    ]
    return [TextPart(text, number) for text, number in texts if isinstance(text, str)]


def with_text(message: _Message, new: TextPart) -> _Message:
    """Return a copy of a message with one of its texts replaced; the other parts stay."""
    content: Any = new.text
    if new.part is not None:
        content = list(message.content)
        old = content[new.part]
        content[new.part] = new.text if isinstance(old, str) else {**old, "text": new.text}
    return message.model_copy(update={"content": content})
