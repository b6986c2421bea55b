"""A streamed reply of Anthropic's messages protocol, which vLLM speaks, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ctxreuse.context.reported_usage import reported_miss, usage_of
from ctxreuse.serving.client.reply import ReplyReader, checked, field_of

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
        self._told: dict[str, Any] = {}
        self._whole: int | None = None  # the prompt, as the beginning tells it without a cache

    def _take_chunk(self, chunk: Mapping[str, Any]) -> str:
        kind = chunk.get("type")
        if kind == "message_start":
            message = checked(chunk.get("message"), dict, "a message")
            self.reply_id = checked(message.get("id"), str, "a message's id", "") or self.reply_id
            self._take_usage(message.get("usage"))
            self.miss = reported_miss(message) or self.miss
        elif kind == "message_delta":
            reason = checked(field_of(chunk, "delta", "stop_reason"), str, "stop_reason", "")
            self._take_choice({"finish_reason": _FINISHED.get(reason, reason)})
            self._take_usage(chunk.get("usage"))
            self.miss = reported_miss(chunk) or reported_miss(chunk.get("delta")) or self.miss
        elif kind == "content_block_start":
            return self._take_choice({"delta": self._delta(chunk, "content_block")})
        elif kind == "content_block_delta":
            return self._take_choice({"delta": self._delta(chunk, "delta")})
        self.has_ended |= kind == "message_stop"
        return ""

    def _delta(self, event: Mapping[str, Any], field: str) -> dict[str, Any]:
        """Return a piece of a content block as OpenAI's protocol says it."""
        piece = checked(event.get(field), dict, field)
        call: dict[str, Any] = {"index": event.get("index", 0)}
        match piece.get("type"):
            case "text" | "text_delta":
                return {"content": piece.get("text")}
            case "thinking_delta":
                return {"reasoning": True}
            case "tool_use":
                function = {"name": piece.get("name")}
                return {"tool_calls": [{**call, "id": piece.get("id"), "function": function}]}
            case "input_json_delta":
                function = {"arguments": piece.get("partial_json")}
                return {"tool_calls": [{**call, "function": function}]}
        return {}

    def _take_usage(self, usage: object) -> None:
        """Read counts; `prompt_tokens` include what was read from the cache and written into it."""
        if not isinstance(usage, dict):
            return
        # counts come at the beginning and again, some of them, at the end
        names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        if not self._told and not any(name in usage for name in names[1:]):
            self._whole = self._count(usage, "input_tokens")
        self._told |= {name: count for name, count in usage.items() if count is not None}
        told = usage_of(self._told)
        for name in (*names, "output_tokens"):
            self._count(self._told, name)
        if told is None:
            return
        whole = self._whole
        if whole is not None and self._told["input_tokens"] == whole >= (told.cached_tokens or 0):
            told = told._replace(prompt_tokens=whole)  # what was read is among them
        self.usage = told
