"""LlamaIndex's messages and prompt templates as the texts that are planned, and back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ContentBlock,
    MessageRole,
    TextBlock,
    ToolCallBlock,
)
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.prompts import BasePromptTemplate, ChatPromptTemplate, PromptTemplate

from ctxreuse.context.blocks import Message
from ctxreuse.context.reported_usage import reported_field
from ctxreuse.pipeline.prompt_turn import PromptPart

_OPENAI_ROLES = {
    MessageRole.DEVELOPER: "system",  # what OpenAI's reasoning models call it
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.FUNCTION: "tool",
}
_BESIDE_THE_MESSAGES = ("model", "tools", "functions", "response_format")
"""Arguments of a call that change what stands before its messages."""


def openai_role(role: MessageRole) -> str:
    """Return a role as OpenAI names it."""
    return _OPENAI_ROLES.get(role, role.value)


def message_text(message: ChatMessage) -> str:
    """Return the texts of a message as one."""
    return message.content or ""


def copied_message(message: ChatMessage) -> ChatMessage:
    """Return a copy that shares nothing that is written into."""
    options = copy(message.additional_kwargs)
    return message.model_copy(
        update={"blocks": copied_blocks(message.blocks), "additional_kwargs": options}
    )


def copied_blocks(blocks: Iterable[ContentBlock]) -> list[ContentBlock]:
    """Return copies, because agents write into the messages that they get."""
    return [block.model_copy() for block in blocks]


def message_as_openai(message: ChatMessage) -> Message:
    """Return a message's texts as an OpenAI chat message, for the planner to read."""
    texts = [block.text for block in message.blocks if isinstance(block, TextBlock)]
    content: Any = [{"type": "text", "text": text} for text in texts]
    return {"role": openai_role(message.role), "content": texts[0] if len(texts) == 1 else content}


def prompt_parts(messages: Iterable[ChatMessage]) -> tuple[PromptPart, ...]:
    """Return what chat messages say: a part for each block, and for tool calls beside them."""
    return tuple(part for message in messages for _, part in _parts(message))


def said_beside(arguments: Mapping[str, Any]) -> str:
    """Return what a call has beside its messages, as JSON: tools, and the schema of its answer."""
    beside = {name: arguments[name] for name in _BESIDE_THE_MESSAGES if arguments.get(name)}
    return json.dumps(beside, sort_keys=True, default=_as_json) if beside else ""


def _as_json(value: Any) -> Any:
    """Return the schema of a model's class; of anything else its class: texts have addresses."""
    is_model = isinstance(value, type) and issubclass(value, BaseModel)
    return value.model_json_schema() if is_model else str(type(value))


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
    """Return a message's parts, the texts among them with the positions of their blocks.

    A message that was stored and loaded says the same: its tool calls count as they are sent.
    """
    role = openai_role(message.role)
    parts: list[tuple[int | None, PromptPart]] = []
    for position, block in enumerate(message.blocks):
        if not isinstance(block, (TextBlock, ToolCallBlock)):
            parts.append((None, PromptPart.of_value(role, block.model_dump())))
        elif isinstance(block, TextBlock) and block.text:
            parts.append((position, PromptPart(role, block.text)))
    calls = [one for one in message.blocks if isinstance(one, ToolCallBlock)]
    beside = calls or message.additional_kwargs.get("tool_calls")  # as LlamaIndex sends them
    if beside:
        told = list(map(_as_sent, beside)) if isinstance(beside, list) else beside
        parts.append((None, PromptPart.of_value(role, told)))
    return parts or [(None, PromptPart(role, ""))]


def _as_sent(call: Any) -> Any:
    """Return id, name and arguments of a tool call: an object's, a dict's, or a block's."""
    if isinstance(call, ToolCallBlock):
        told = {"id": call.tool_call_id, "name": call.tool_name, "arguments": call.tool_kwargs}
    else:
        function = reported_field(call, "function") or call
        told = {name: reported_field(function, name) for name in ("name", "arguments")}
        told["id"] = reported_field(call, "id")
    if isinstance(told["arguments"], str):
        with suppress(ValueError):  # half a call, as a model may end
            told["arguments"] = json.loads(told["arguments"])
    return told


def _with_texts(message: ChatMessage, texts: Iterator[str]) -> ChatMessage:
    blocks = list(message.blocks)
    for position, part in _parts(message):
        text = next(texts)
        if position is not None and text != part.text:
            blocks[position] = blocks[position].model_copy(update={"text": text})
    if any(new is not old for new, old in zip(blocks, message.blocks, strict=True)):
        return message.model_copy(update={"blocks": blocks})
    return message


def filled_template(
    template: BasePromptTemplate, messages: Sequence[ChatMessage], *, is_text: bool
) -> BasePromptTemplate:
    """Return a template whose messages are filled in, or are all of them one text."""
    parser, metadata = template.output_parser, {**template.metadata}
    if is_text:
        return PromptTemplate(message_text(messages[0]), output_parser=parser, metadata=metadata)
    return ChatPromptTemplate(messages, output_parser=parser, metadata=metadata)
