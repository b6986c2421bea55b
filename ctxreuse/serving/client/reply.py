"""The border to an engine: what it sends is bytes, what goes on from here is typed and bounded."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ctxreuse.context.checks import reported_count
from ctxreuse.context.reported_usage import ReportedMiss, ReportedTokens, reported_miss, usage_of

_MAX_TOOL_CALLS = 10_000
_NAMES: dict[type, str] = {dict: "an object", list: "a list", str: "a text"}
_Kind = TypeVar("_Kind", dict[str, Any], list[Any], str)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A model's tool call: `arguments` is its JSON text, and the tool's result refers to `id`."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """An answer, with what it cost.

    Attributes:
        text: The answer's text.
        request_id: The plan's request id; for bare messages the engine's id of the reply.
        finish_reason: Why the answer ends: "stop", "length", "tool_calls", ...
        prompt_tokens: Tokens of the prompt; None if the server reports no usage.
        cached_tokens: Those that came from the prefix cache; None is unknown, not 0.
        completion_tokens: Tokens of the answer; None if the server reports no usage.
        time_to_first_token_s: Seconds from sending the attempt that succeeded to its first token.
        total_s: Seconds from sending the first attempt to the end of the answer.
        attempts: How often the request was sent.
        prompt_token_ids: The prompt's tokens, if they were asked for and came.
        tool_calls: The tools that the model wants to be called.
        written_tokens: Prompt tokens written into the cache, by time to live ("5m", "1h", ""); None
            is unknown.
        miss: Why the prompt was not read from the cache, as the provider says; None if not asked.
    """

    text: str
    request_id: str | int
    finish_reason: str
    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int | None
    time_to_first_token_s: float
    total_s: float
    attempts: int
    prompt_token_ids: tuple[int, ...] | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    written_tokens: Mapping[str, int] | None = None
    miss: ReportedMiss | None = None


class BrokenReplyError(Exception):
    """A reply against the protocol, or without its end; the message never quotes the engine."""

    def __init__(self, what: str, type: str = "") -> None:  # noqa: A002 - as in openai's errors
        super().__init__(what)
        self.type = type  # the error that the engine reports in the reply, if any


def parsed_json(text: str | bytes) -> Any:
    """Return what a JSON text says."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # UnicodeDecodeError and too long integers included
        raise BrokenReplyError("the reply is not JSON") from None


def field_of(parsed: object, *path: str | int) -> Any:
    """Return what stands at a path of keys and positions in parsed JSON; None if nothing does."""
    for step in path:
        if isinstance(step, str):
            parsed = parsed.get(step) if isinstance(parsed, dict) else None
        else:
            parsed = parsed[step] if isinstance(parsed, list) and step < len(parsed) else None
    return parsed


class ReplyReader:
    """Reads a streamed completion, trusting nothing, in linear time; a wrong count is None."""

    def __init__(self) -> None:
        self.reply_id = ""
        self.finish_reason: str | None = None
        self.usage = ReportedTokens()
        self.miss: ReportedMiss | None = None
        self.prompt_token_ids: tuple[int, ...] | None = None
        self.has_token = False  # text, a thought, a tool call or the answer's end
        self.has_ended = False
        self.has_odd_counts = False
        self._line: list[bytes] = []
        self._data: list[bytes] = []
        self._pieces: list[str] = []
        self._calls = defaultdict[int, _Call](_Call)

    @property
    def text(self) -> str:
        """The answer's text so far."""
        return "".join(self._pieces)

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The tool calls so far."""
        calls = (call for _, call in sorted(self._calls.items()))
        return tuple(ToolCall("".join(one.name), "".join(one.arguments), one.id) for one in calls)

    def take(self, received: bytes) -> Iterator[str]:
        """Read bytes as they come; yield the text of each event, which may be empty."""
        *lines, rest = received.split(b"\n")
        for line in lines:
            if self.has_ended:
                return
            whole, self._line = b"".join([*self._line, line]).removesuffix(b"\r"), []
            if whole.startswith(b"data:"):
                self._data.append(whole[5:].removeprefix(b" "))
            elif not whole and self._data:
                data, self._data = b"\n".join(self._data), []
                self.has_ended = data.startswith(b"[DONE]")
                if not self.has_ended:
                    event = checked(parsed_json(data), dict, "an event")
                    if event.get("error") or event.get("type") == "error":
                        kind = field_of(event, "error", "type")
                        kind = kind if isinstance(kind, str) else ""
                        raise BrokenReplyError("the engine reports an error", kind)
                    yield self._take_chunk(event)
        self._line.append(rest)

    def end(self) -> None:
        """Raise BrokenReplyError unless the answer has ended."""
        if self.finish_reason is None:
            raise BrokenReplyError("the stream that it was asked for ended before the answer did")

    def _take_chunk(self, chunk: Mapping[str, Any]) -> str:
        reply_id = chunk.get("id")
        self.reply_id = reply_id if isinstance(reply_id, str) and reply_id else self.reply_id
        ids = chunk.get("prompt_token_ids")
        if isinstance(ids, list):
            is_right = all(reported_count(one) is not None for one in ids)
            self.prompt_token_ids = tuple(ids) if is_right else None
            self.has_odd_counts |= not is_right
        if (usage := chunk.get("usage")) is not None:
            self._count(usage, "prompt_tokens")
            self._count(usage, "prompt_tokens_details", "cached_tokens")
            told = usage_of(usage) or ReportedTokens()
            cached, prompt = told.cached_tokens, told.prompt_tokens
            if cached is not None and prompt is not None and cached > prompt:
                cached, self.has_odd_counts = None, True
            answer = self._count(usage, "completion_tokens")
            self.usage = told._replace(cached_tokens=cached, completion_tokens=answer)
        choices = checked(chunk.get("choices"), list, "choices", [])
        return "".join([self._take_choice(one) for one in choices])

    def _count(self, usage: object, *path: str) -> int | None:
        told = field_of(usage, *path)
        count = reported_count(told)
        self.has_odd_counts |= count is None and told is not None
        return count

    def _take_choice(self, choice: object) -> str:
        choice = checked(choice, dict, "a choice")
        delta = checked(choice.get("delta") or {}, dict, "delta")
        text = checked(delta.get("content"), str, "content", "")
        called = checked(delta.get("tool_calls"), list, "tool_calls", [])
        for position, piece in enumerate(called):
            piece = checked(piece, dict, "a tool call")
            index = piece.get("index", position)
            if reported_count(index) is None or index >= _MAX_TOOL_CALLS:
                raise BrokenReplyError("a tool call's index is no number that it may be")
            function = checked(piece.get("function") or {}, dict, "a tool call's function")
            call = self._calls[index]
            call.id = checked(piece.get("id"), str, "a tool call's id", "") or call.id
            call.name.append(checked(function.get("name"), str, "a tool's name", ""))
            call.arguments.append(checked(function.get("arguments"), str, "a tool's arguments", ""))
        finish = checked(choice.get("finish_reason"), str, "finish_reason", "")
        self.finish_reason = finish or self.finish_reason
        thought = delta.get("reasoning_content") or delta.get("reasoning")
        self.has_token |= bool(text or called or thought or finish)
        if text:
            self._pieces.append(text)
        return text


@dataclass(slots=True)
class _Call:
    id: str = ""
    name: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)


def checked(value: object, kind: type[_Kind], what: str, null: _Kind | None = None) -> _Kind:
    """Return parsed JSON that must be of a kind, or what null stands for."""
    value = null if value is None else value
    if not isinstance(value, kind):
        raise BrokenReplyError(f"{what} is not {_NAMES[kind]}")
    return value


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
        match piece.get("type"):
            case "text" | "text_delta":
                return {"content": piece.get("text")}
            case "thinking_delta":
                return {"reasoning": True}
            case "tool_use" | "input_json_delta":
                function = {"name": piece.get("name"), "arguments": piece.get("partial_json")}
                call = {"index": event.get("index", 0), "id": piece.get("id"), "function": function}
                return {"tool_calls": [call]}
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
