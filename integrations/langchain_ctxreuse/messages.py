"""LangChain messages as the texts that are planned, and the planned texts put back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from ctxreuse.adapters.prompt_planner import PromptPart

_ROLES: tuple[tuple[type[BaseMessage], str], ...] = (
    (HumanMessage, "user"),
    (AIMessage, "assistant"),
    (SystemMessage, "system"),
    (ToolMessage, "tool"),
    (FunctionMessage, "function"),
)
_BEFORE_THE_MESSAGES = ("model", "tools", "functions")
"""Arguments of a call that change what stands before its messages."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a text stands: the whole content of a message, or a part of it."""

    message: int
    part: int | None = None


@dataclass(frozen=True, slots=True)
class PromptTexts:
    """A prompt's messages with the texts in them.

    What is no text (an image, a tool call, the tools) is a segment, too: a digest, so that prompts
    that differ in it are not taken for alike. It is never put back.

    Attributes:
        messages: The messages, never changed.
        parts: Their texts in order, at least one for each message.
        places: Where each segment stands; None for what is no text.
    """

    messages: tuple[BaseMessage, ...]
    parts: tuple[PromptPart, ...]
    places: tuple[_Place | None, ...]

    def says_the_same_as(self, other: PromptTexts) -> bool:
        """Return whether another prompt's texts are the same, and stand in the same places.

        What is no text does not count: LangChain rewrites it on the way from prompt to model.
        """
        return self.places == other.places and all(
            place is None or one == another
            for place, one, another in zip(self.places, self.parts, other.parts, strict=True)
        )

    def with_texts(self, texts: Sequence[str]) -> list[BaseMessage]:
        """Return the messages with each segment's text replaced, as copies where that changes them.

        Args:
            texts: One text a segment, in order.
        """
        messages = list(self.messages)
        for place, part, text in zip(self.places, self.parts, texts, strict=True):
            if place is not None and text != part.text:
                messages[place.message] = _with_text(messages[place.message], place.part, text)
        return messages


def prompt_texts(messages: Sequence[BaseMessage], arguments: Mapping[str, object]) -> PromptTexts:
    """Return the texts of a prompt.

    Args:
        messages: The prompt.
        arguments: What the model is called with besides.
    """
    parts: list[PromptPart] = []
    places: list[_Place | None] = []
    before = {name: arguments[name] for name in _BEFORE_THE_MESSAGES if arguments.get(name)}
    if before:
        parts.append(PromptPart("system", _digest(before)))
        places.append(None)
    for number, message in enumerate(messages):
        role = _role(message)
        for part, text in _texts(message):
            parts.append(PromptPart(role, text))
            places.append(None if part is _NO_TEXT else _Place(number, part))
    return PromptTexts(tuple(messages), tuple(parts), tuple(places))


_NO_TEXT = -1


def _texts(message: BaseMessage) -> Iterator[tuple[int | None, str]]:
    """Yield each text with its part's number: None for the whole content, -1 for no text."""
    if isinstance(message.content, str):
        yield None, message.content
    else:
        for number, part in enumerate(message.content):
            if isinstance(part, str):
                yield number, part
            elif part.get("type") == "text" and isinstance(part.get("text"), str):
                yield number, part["text"]
            else:
                yield _NO_TEXT, _digest(part)
    calls = message.tool_calls if isinstance(message, AIMessage) else []
    if calls or message.content == []:
        yield _NO_TEXT, _digest(calls) if calls else ""


def _with_text(message: BaseMessage, part: int | None, text: str) -> BaseMessage:
    if part is None:
        return message.model_copy(update={"content": text})
    content = list(message.content)
    old = content[part]
    content[part] = text if isinstance(old, str) else {**old, "text": text}
    return message.model_copy(update={"content": content})


def _role(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return message.role
    return next((role for kind, role in _ROLES if isinstance(message, kind)), message.type)


def _digest(value: object) -> str:
    written = json.dumps(value, sort_keys=True, default=repr)
    return hashlib.blake2b(written.encode(), digest_size=16).hexdigest()
