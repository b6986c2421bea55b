"""LlamaIndex's messages and prompt templates as the texts that are planned, and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ContentBlock, MessageRole, TextBlock
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.prompts import BasePromptTemplate

from ctxreuse.adapters.context_cuts import PlannedTexts
from ctxreuse.adapters.prompt_draft import PromptPart, ScopedPrompt
from ctxreuse.context.blocks import ContextBlock, Message
from ctxreuse.context.scope import RequestScope

_OPENAI_ROLES = {
    MessageRole.DEVELOPER: "system",  # what OpenAI's reasoning models call it
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.FUNCTION: "tool",
}


def openai_role(role: MessageRole) -> str:
    """Return a role as OpenAI names it."""
    return _OPENAI_ROLES.get(role, role.value)


def message_text(message: ChatMessage) -> str:
    """Return the texts of a message as one."""
    return message.content or ""


def copied_message(message: ChatMessage) -> ChatMessage:
    """Return a copy that shares nothing that is written into."""
    options = {"blocks": copied_blocks(message.blocks)}
    return message.model_copy(
        update={**options, "additional_kwargs": copy(message.additional_kwargs)}
    )


def copied_blocks(blocks: Iterable[ContentBlock]) -> list[ContentBlock]:
    """Return copies, because agents write into the messages that they get."""
    return [block.model_copy() for block in blocks]


def message_as_openai(message: ChatMessage) -> Message:
    """Return a message's texts as an OpenAI chat message, for the planner to read."""
    texts = [block.text for block in message.blocks if isinstance(block, TextBlock)]
    content: Any = [{"type": "text", "text": text} for text in texts]
    return {"role": openai_role(message.role), "content": texts[0] if len(texts) == 1 else content}


def prompt_of_messages(
    messages: Iterable[ChatMessage],
    scope: RequestScope,
    retrieved: tuple[tuple[ContextBlock, ...], ...] = (),
    planned: tuple[PlannedTexts, ...] = (),
) -> ScopedPrompt:
    """Return chat messages as a prompt: a part for each block, and for tool calls beside them."""
    parts = tuple(part for message in messages for _, part in _parts(message))
    return ScopedPrompt(parts, scope, retrieved, planned)


def text_positions(messages: Iterable[ChatMessage]) -> list[tuple[int, int] | None]:
    """Return message and block of each part of a prompt; None for what is no text."""
    return [
        None if position is None else (number, position)
        for number, message in enumerate(messages)
        for position, _ in _parts(message)
    ]


def messages_with(messages: Iterable[ChatMessage], texts: Iterable[str]) -> list[ChatMessage]:
    """Return messages with the texts of their text blocks replaced; changed ones are copies."""
    remaining = iter(texts)
    return [_with_texts(message, remaining) for message in messages]


def _parts(message: ChatMessage) -> list[tuple[int | None, PromptPart]]:
    """Return a message's parts, the texts among them with the positions of their blocks."""
    role = openai_role(message.role)
    parts: list[tuple[int | None, PromptPart]] = []
    for position, block in enumerate(message.blocks):
        if isinstance(block, TextBlock):
            parts.append((position, PromptPart(role, block.text)))
        else:
            parts.append((None, PromptPart.of_value(role, block.model_dump())))
    calls = message.additional_kwargs.get("tool_calls")
    if calls:
        parts.append((None, PromptPart.of_value(role, calls)))
    return parts or [(None, PromptPart(role, ""))]


def _with_texts(message: ChatMessage, texts: Iterator[str]) -> ChatMessage:
    blocks = list(message.blocks)
    for position, part in _parts(message):
        text = next(texts)
        if position is not None and text != part.text:
            blocks[position] = blocks[position].model_copy(update={"text": text})
    if any(new is not old for new, old in zip(blocks, message.blocks, strict=True)):
        return message.model_copy(update={"blocks": blocks})
    return message


class PlannedTemplate(BasePromptTemplate):
    """A template whose contexts are planned once it is filled in."""

    _template: BasePromptTemplate = PrivateAttr()
    _replacements: list[tuple[str, str]] = PrivateAttr()

    def __init__(
        self, template: BasePromptTemplate, replacements: Iterable[tuple[str, str]]
    ) -> None:
        super().__init__(
            metadata=template.metadata,
            template_vars=template.template_vars,
            kwargs=template.kwargs,
            output_parser=template.output_parser,
        )
        self._template = template
        self._replacements = list(replacements)

    def partial_format(self, **kwargs: Any) -> PlannedTemplate:
        """Return the prompt with some variables filled in."""
        return PlannedTemplate(self._parsed().partial_format(**kwargs), self._replacements)

    def format(self, llm: Any = None, **kwargs: Any) -> str:
        """Return the prompt as a text."""
        text, _ = _replaced(self._parsed().format(llm=llm, **kwargs), self._replacements)
        return text

    def format_messages(self, llm: Any = None, **kwargs: Any) -> list[ChatMessage]:
        """Return the prompt as chat messages."""
        messages = self._parsed().format_messages(llm=llm, **kwargs)
        remaining: Sequence[tuple[str, str]] = self._replacements
        texts: list[str] = []
        for position, part in (one for message in messages for one in _parts(message)):
            text = part.text
            if position is not None:
                text, remaining = _replaced(text, remaining, most=1)
            texts.append(text)
        return messages_with(messages, texts)

    def get_template(self, llm: Any = None) -> str:
        """Return the template's words."""
        return self._template.get_template(llm=llm)

    def _parsed(self) -> BasePromptTemplate:
        return self._template.model_copy(update={"output_parser": self.output_parser})


def _replaced(
    text: str, replacements: Sequence[tuple[str, str]], most: int | None = None
) -> tuple[str, Sequence[tuple[str, str]]]:
    """Return a text with replacements applied from left to right, and those behind the last one."""
    pieces: list[str] = []
    end = 0
    remaining = replacements
    for number, (old, new) in enumerate(replacements, start=1):
        start = -1 if most == 0 else text.find(old, end)
        if start >= 0:
            pieces += [text[end:start], new]
            end = start + len(old)
            remaining = replacements[number:]
            most = None if most is None else most - 1
    return "".join([*pieces, text[end:]]), remaining
