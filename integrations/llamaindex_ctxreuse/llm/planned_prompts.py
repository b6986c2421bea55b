"""LlamaIndex's messages as the texts that are planned, and back, with cache points."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from functools import cache
from typing import Any

from llama_index.core.base.llms.types import (
    CacheControl,
    CachePoint,
    ChatMessage,
    ContentBlock,
    MessageRole,
    TextBlock,
    ToolCallBlock,
)
from llama_index.core.bridge.pydantic import BaseModel

from ctxreuse.context.blocks import Message
from ctxreuse.context.content_parts import ContentPart
from ctxreuse.context.reported_usage import reported_field
from ctxreuse.pipeline.prompt_turn import PlannedPrompt, PromptPart
from ctxreuse.rules.cache_rules import CacheRules
from ctxreuse.rules.prompt_forms import marked_prompt

_OPENAI_ROLES = {
    MessageRole.DEVELOPER: "system",  # what OpenAI's reasoning models call it
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.FUNCTION: "tool",
}
_BESIDE_THE_MESSAGES = ("model", "tools", "functions", "response_format")
"""Arguments of a call that change what stands before its messages."""

_TAKE_CACHE_POINTS = ("Anthropic", "BedrockConverse")
"""Classes that send cache points, and classes made of them; not imported here."""

_SYSTEM = (MessageRole.SYSTEM, MessageRole.DEVELOPER)
_log = logging.getLogger("ctxreuse")


def openai_role(role: MessageRole) -> str:
    """Return a role as OpenAI names it."""
    return _OPENAI_ROLES.get(role, role.value)


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
    changed: list[ChatMessage] = []
    for message in messages:
        blocks, is_same = list(message.blocks), True
        for position, part in _parts(message):
            text = next(remaining)
            if position is not None and text != part.text:
                blocks[position] = blocks[position].model_copy(update={"text": text})
                is_same = False
        changed.append(message if is_same else message.model_copy(update={"blocks": blocks}))
    return changed


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


def takes_cache_points(model: object) -> bool:
    """Return whether a model sends cache points; say once that another one does not."""
    kind = type(model)
    if any(one.__name__ in _TAKE_CACHE_POINTS for one in kind.__mro__):
        return True
    _log_no_marks(kind.__name__)
    return False


def with_cache_points(
    messages: Sequence[ChatMessage], planned: PlannedPrompt, profile: CacheRules, model: object
) -> list[ChatMessage]:
    """Add cache points to all but system messages; drop those that a provider would refuse."""
    cuts: dict[tuple[int, int], Sequence[ContentPart]] = {
        place: parts
        for place, parts in zip(text_positions(messages), planned.parts, strict=True)
        if place is not None and messages[place[0]].role not in _SYSTEM
    }
    last_marked = getattr(model, "cache_idx", None)  # of those that it marks itself
    prompt: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        content: list[Any] = []
        for position, block in enumerate(message.blocks):
            own = cuts.get((number, position), ())
            if len(own) > 1 or any(part.is_marked for part in own):
                content += own
            elif isinstance(block, CachePoint):
                control = {"type": "ephemeral", "ttl": block.cache_control.ttl}
                content.append({"cache_control": control, "block": block})
            else:
                content.append({"block": block})
        one: dict[str, Any] = {"content": content}
        if isinstance(last_marked, int) and (number <= last_marked or last_marked == -1):
            one["cache_control"] = {"type": "ephemeral"}
        elif message.additional_kwargs.get("cache_control"):
            one["cache_control"] = message.additional_kwargs["cache_control"]
        prompt.append(one)
    is_bedrock = any(one.__name__ == "BedrockConverse" for one in type(model).__mro__)
    kind = "default" if is_bedrock else "ephemeral"
    marked, _ = marked_prompt(prompt, profile, "cache_control")
    rebuilt = zip(messages, marked, strict=True)
    return [_rebuilt(message, one["content"], kind) for message, one in rebuilt]


def _rebuilt(message: ChatMessage, content: Sequence[Any], kind: str) -> ChatMessage:
    blocks: list[ContentBlock] = []
    for part in content:
        block, control = part.get("block"), part.get("cache_control")
        if block is None:
            blocks.append(TextBlock(text=part["text"]))
            if control is not None:
                life = control.get("ttl", "5m")
                blocks.append(CachePoint(cache_control=CacheControl(type=kind, ttl=life)))
        elif control is not None or not isinstance(block, CachePoint):
            blocks.append(block)
    return message.model_copy(update={"blocks": blocks})


@cache
def _log_no_marks(kind: str) -> None:
    _log.warning(
        "the planner's cache keeps prefixes up to marks, and LlamaIndex's %s sends none; prompts "
        "are sent without. Take a class that sends cache points (Anthropic, BedrockConverse), or "
        "LangChain's ChatOpenAI, or EngineClient.",
        kind,
    )
