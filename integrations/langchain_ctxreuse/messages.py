"""The texts in LangChain messages: read to be planned, and put back as planned."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from langchain_core.messages import BaseMessage, ChatMessage, ToolMessage
from langchain_core.outputs import ChatResult

from ctxreuse.context.content_parts import ContentPart
from ctxreuse.context.reported_usage import ReportedTokens, usage_in, usage_of
from ctxreuse.pipeline.engine_options import marks_the_end
from ctxreuse.pipeline.prompt_turn import PromptPart, TextPosition, marked_contents
from ctxreuse.rules.cache_marks import MarkField, mark_field
from ctxreuse.rules.cache_rules import CacheRules

_ROLES = {
    "HumanMessage": "user",
    "AIMessage": "assistant",
    "SystemMessage": "system",
    "ToolMessage": "tool",
    "FunctionMessage": "function",
}
_BEFORE_THE_MESSAGES = ("model", "tools", "functions", "response_format")
"""Arguments of a call that change what stands before its messages."""

MARK_FIELDS: dict[str, MarkField] = {
    "ChatAnthropic": "cache_control",
    "ChatBedrock": "cache_control",
    "ChatBedrockConverse": "cachePoint",
}
"""By the name of a model's class, not imported here, what marks a content part; middleware asks for
these classes, to set marks of its own."""

_Message = TypeVar("_Message", bound=BaseMessage)


class TextPart(NamedTuple):
    """A text in a message's content."""

    text: str
    part: int | None


def role_of(message: BaseMessage) -> str:
    """Return who says a message, as OpenAI names it."""
    if isinstance(message, ChatMessage):
        return message.role
    kinds = [one.__name__ for one in type(message).__mro__]  # a subclass may have another type
    return next((_ROLES[one] for one in kinds if one in _ROLES), message.type)


def text_parts(message: BaseMessage) -> list[TextPart]:
    """Return the texts in a message's content."""
    if isinstance(message.content, str):
        return [TextPart(message.content, None)]
    texts = [
        (one if isinstance(one, str) else one.get("text"), number)
        for number, one in enumerate(message.content or ())
        if isinstance(one, (str, dict))
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


@dataclass(frozen=True, slots=True)
class PromptTexts:
    """A prompt's parts: texts, and digests of what is no text."""

    parts: tuple[PromptPart, ...]
    positions: tuple[TextPosition | None, ...]  # None for what is no text
    beside: str = ""  # the model, its tools, and the schema of its answer, as JSON

    @property
    def said(self) -> tuple[object, ...]:
        """The texts and where they stand: equal for prompts that say the same."""
        return tuple(
            (position, part.text)
            for position, part in zip(self.positions, self.parts, strict=True)
            if position is not None
        )


def with_marks(
    messages: Sequence[BaseMessage],
    texts: PromptTexts,
    parts: Sequence[tuple[ContentPart, ...]],
    profile: CacheRules,
    model: object,
    tools: Sequence[Any],
    body: Mapping[str, Any],  # what of it the user has set
) -> tuple[list[BaseMessage], list[Any]]:
    """Return messages in content parts, with marks, and the call's tools."""
    field, marks_end = mark_field_for(model, profile), marks_the_end(body)
    if field == "cachePoint":
        parts = list(_marked_behind(messages, texts.positions, parts))
    contents = [message.content for message in messages]
    given = contents, parts, texts.positions
    marked, sent_tools = marked_contents(*given, profile, field, tools, marks_end=marks_end)
    return [
        message if content is message.content else message.model_copy(update={"content": content})
        for message, content in zip(messages, marked, strict=True)
    ], sent_tools


def _marked_behind(
    messages: Sequence[BaseMessage],
    positions: Sequence[TextPosition | None],
    parts: Sequence[tuple[ContentPart, ...]],
) -> Iterator[tuple[ContentPart, ...]]:
    """Yield the parts of texts; where cache points go behind a tool's result, one at its end."""
    for position, own in zip(positions, parts, strict=True):
        is_result = position and isinstance(messages[position.message], ToolMessage)
        if not is_result or not any(part.is_marked for part in own):
            yield own
            continue
        end = own[-1].as_spare() if all(part.is_spare for part in own) else own[-1].as_end()
        yield (*(part._replace(is_marked=False) for part in own[:-1]), end)


def mark_field_for(model: object, profile: CacheRules) -> MarkField:
    """Return what marks a content part that a chat model of LangChain's sends."""
    if getattr(model, "beta_use_converse_api", False) is True:  # ChatBedrock then calls the other
        return "cachePoint"
    kinds = [one.__name__ for one in type(model).__mro__]
    return next((MARK_FIELDS[one] for one in kinds if one in MARK_FIELDS), mark_field(profile))


def prompt_texts(messages: Sequence[BaseMessage], arguments: Mapping[str, object]) -> PromptTexts:
    """Return the texts of a prompt."""
    parts: list[PromptPart] = []
    positions: list[TextPosition | None] = []
    before = {name: arguments[name] for name in _BEFORE_THE_MESSAGES if arguments.get(name)}
    beside = json.dumps(before, sort_keys=True, default=repr) if before else ""
    for number, message in enumerate(messages):
        role = role_of(message)
        is_list = isinstance(message.content, list)
        content: Sequence[Any] = message.content if is_list else [message.content]
        for part, one in enumerate(content):
            is_text_part = is_list and isinstance(one, dict) and one.get("type") == "text"
            text = one.get("text") if is_text_part else one
            if isinstance(text, str):
                parts.append(PromptPart(role, text))
                positions.append(TextPosition(number, part if is_list else None))
            else:
                parts.append(PromptPart.of_value(role, one))
                positions.append(None)
        # what is sent of a tool call is the same for one that was stored and loaded
        told = getattr(message, "tool_calls", None) or ()
        calls = [{name: one.get(name) for name in ("id", "name", "args")} for one in told]
        if calls or not content:
            parts.append(PromptPart.of_value(role, calls) if calls else PromptPart(role, ""))
            positions.append(None)
    return PromptTexts(tuple(parts), tuple(positions), beside)


def reported_usage(answer: object) -> ReportedTokens | None:
    """Return what the usage of an answer says, or of a piece of one; None if it has none."""
    whole = answer if isinstance(answer, ChatResult) else None
    piece = answer if whole is None else whole.generations[0]  # each has the usage of all
    usage: Any = getattr(getattr(piece, "message", None), "usage_metadata", None)
    if isinstance(piece, dict):  # an event of the model's own
        usage = piece.get("usage")
    told = None if usage is None else usage_of(usage)
    if whole is None or not whole.llm_output or (told and told.cached_tokens is not None):
        return told
    return usage_in(whole.llm_output) or told  # in the provider's own words
