"""A streamed reply of Anthropic's messages protocol, which vLLM speaks, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ctxreuse.context.miss_reasons import reported_miss
from ctxreuse.context.reported_usage import usage_of
from ctxreuse.serving.client.reply import (
    BrokenReplyError,
    ReplyReader,
    checked_object,
    checked_text,
    field_of,
)

_FINISHED = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}
"""Why an answer ends, in OpenAI's words; others stay as they are."""


class AnthropicReplyReader(ReplyReader):
    """Reads a streamed message as `ReplyReader` reads a chat completion."""

    def __init__(self) -> None:
        super().__init__()
        self._usage: dict[str, Any] = {}
        self._whole: int | None = None  # the prompt, as the beginning tells it without a cache

    def _take_chunk(self, chunk: object) -> str:
        event = checked_object(chunk, "an event")
        kind = event.get("type")
        if kind == "error":
            named = field_of(event, "error", "type")
            raise BrokenReplyError(
                "the engine reports an error", named if isinstance(named, str) else ""
            )
        if kind == "message_start":
            message = checked_object(event.get("message"), "a message")
            self.reply_id = checked_text(message.get("id"), "a message's id") or self.reply_id
            self._take_usage(message.get("usage"))
            self.miss = reported_miss(message) or self.miss
        elif kind == "content_block_start":
            return self._take_block(event)
        elif kind == "content_block_delta":
            return self._take_delta(event)
        elif kind == "message_delta":
            reason = checked_text(field_of(event, "delta", "stop_reason"), "stop_reason")
            if reason:
                self.finish_reason = _FINISHED.get(reason, reason)
                self.has_token = True
            self._take_usage(event.get("usage"))
            self.miss = reported_miss(event) or reported_miss(event.get("delta")) or self.miss
        elif kind == "message_stop":
            self.has_ended = True
        return ""

    def _take_block(self, event: Mapping[str, Any]) -> str:
        block = checked_object(event.get("content_block"), "a content block")
        if block.get("type") == "tool_use":
            function = {"name": block.get("name")}
            self._take_call(0, self._piece(event, function) | {"id": block.get("id")})
            self.has_token = True
        return self._said(block.get("text") if block.get("type") == "text" else None)

    def _take_delta(self, event: Mapping[str, Any]) -> str:
        delta = checked_object(event.get("delta"), "delta")
        if delta.get("type") == "input_json_delta":
            self._take_call(0, self._piece(event, {"arguments": delta.get("partial_json")}))
            self.has_token = True
        elif delta.get("type") == "thinking_delta":
            self.has_token = True
        return self._said(delta.get("text") if delta.get("type") == "text_delta" else None)

    def _piece(self, event: Mapping[str, Any], function: dict[str, Any]) -> dict[str, Any]:
        return {"index": event.get("index", 0), "function": function}

    def _said(self, value: object) -> str:
        text = checked_text(value, "a text")
        if text:
            self.has_token = True
            self._pieces.append(text)
        return text

    def _take_usage(self, usage: object) -> None:
        """Read counts; `prompt_tokens` include what was read from the cache and written into it."""
        if not isinstance(usage, dict):
            return
        # counts come at the beginning and again, some of them, at the end
        names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        if not self._usage and not any(name in usage for name in names[1:]):
            self._whole = self._count(usage, "input_tokens")
        self._usage |= {name: count for name, count in usage.items() if count is not None}
        told = usage_of(self._usage)
        for name in (*names, "output_tokens"):
            self._count(self._usage, name)
        if told is None:
            return
        self.prompt_tokens, self.cached_tokens = told.prompt_tokens, told.cached_tokens
        whole = self._whole
        if whole is not None and self._usage["input_tokens"] == whole >= (told.cached_tokens or 0):
            self.prompt_tokens = whole  # what was read is among them
        self.completion_tokens, self.written_tokens = told.completion_tokens, told.written_tokens
