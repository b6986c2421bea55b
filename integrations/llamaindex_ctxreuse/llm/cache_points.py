"""Cache points in LlamaIndex messages: planned contexts in a text block a document, with marks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

from llama_index.core.base.llms.types import (
    CacheControl,
    CachePoint,
    ChatMessage,
    ContentBlock,
    MessageRole,
    TextBlock,
)

from ctxreuse.context.content_parts import ContentPart
from ctxreuse.pipeline.prompt_turn import PlannedPrompt
from ctxreuse.rules.cache_rules import CacheRules
from ctxreuse.rules.prompt_forms import marked_prompt
from llamaindex_ctxreuse.llm.planned_prompts import text_positions

_TAKE_CACHE_POINTS = ("Anthropic", "BedrockConverse")
"""Classes that send cache points, and classes made of them; not imported here."""

_SYSTEM = (MessageRole.SYSTEM, MessageRole.DEVELOPER)
_log = logging.getLogger("ctxreuse")


def takes_cache_points(model: object) -> bool:
    """Return whether a model sends cache points; say once that another one does not."""
    kind = type(model)
    if any(one.__name__ in _TAKE_CACHE_POINTS for one in kind.__mro__):
        return True
    _log_no_marks(kind.__name__)
    return False


def with_cache_points(
    messages: Sequence[ChatMessage],
    planned: PlannedPrompt,
    profile: CacheRules,
    model: object,
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
    return [
        _rebuilt(message, one["content"], kind)
        if any(
            isinstance(part, ContentPart) or "cache_control" in part for part in given["content"]
        )
        else message
        for message, given, one in zip(messages, prompt, marked, strict=True)
    ]


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
    """Say once that a model cannot carry marks."""
    _log.warning(
        "the planner's cache keeps prefixes up to marks, and LlamaIndex's %s sends none; prompts "
        "are sent without. Take a class that sends cache points (Anthropic, BedrockConverse), or "
        "LangChain's ChatOpenAI, or EngineClient.",
        kind,
    )
