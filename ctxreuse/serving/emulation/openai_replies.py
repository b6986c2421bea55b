"""What an OpenAI-compatible server answers, in vLLM's variant of it: pages, JSON and events."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ctxreuse.cache.simulator import CacheUsage
from ctxreuse.serving.client.reply import ToolCall

Json = dict[str, Any]

_ERROR_TYPES = {400: "BadRequestError", 401: "AuthenticationError", 404: "NotFoundError"}


class HttpPage(NamedTuple):
    """An HTTP response that is known at once; status 0 refuses the connection."""

    status: int
    content: bytes
    media_type: str = "text/plain"


def json_page(status: int, body: Json) -> HttpPage:
    """Return a JSON object as a response."""
    return HttpPage(status, json.dumps(body).encode(), "application/json")


def refusal(status: int, message: str) -> HttpPage:
    """Return an error object as a response."""
    kind = _ERROR_TYPES.get(status, "InternalServerError")
    error = {"message": message, "type": kind, "param": None, "code": status}
    return json_page(status, {"error": error})


@dataclass(eq=False)
class EmulatedReply:
    """One reply: takes the answer part by part, gives what goes over the wire."""

    is_chat: bool
    number: int  # the request's, for the reply's id
    model: str
    body: Json
    prompt: list[int]
    usage: CacheUsage
    shows_cached: bool
    breaks: bool  # whether the connection breaks after the first part
    tokenize: Callable[[str], Sequence[int]]
    register: Callable[[list[int]], object]  # takes the answer's tokens at its end

    def __post_init__(self) -> None:
        body = self.body
        self.streams = bool(body.get("stream"))
        self.is_full = False
        self._limit: int | None = body.get("max_completion_tokens") or body.get("max_tokens")
        self._returns_tokens = bool(body.get("return_token_ids"))
        self._has_begun = False
        self._finish_reason = "stop"
        self._text = ""
        self._tokens: list[int] = []
        self._calls: list[ToolCall] = []

    def take(self, part: str | ToolCall) -> bytes:
        """Take a part of the answer; return what a stream sends for it."""
        begin = self._begin()
        if isinstance(part, ToolCall):
            self._calls.append(part)
            return begin
        self._text += part
        tokens = len(self.tokenize(self._text))
        self.is_full = self._limit is not None and tokens >= self._limit
        return begin + self._event(self._said(part))

    def end(self) -> bytes:
        """End the answer; return what a stream sends then."""
        self._tokens = list(self.tokenize(self._text))[: self._limit]
        self.register(self._tokens)
        self._finish_reason = "tool_calls" if self._calls else "length" if self.is_full else "stop"
        sent = self._begin()
        if self._calls:
            numbered = [{"index": n} | _call_json(call) for n, call in enumerate(self._calls)]
            sent += self._event({"delta": {"tool_calls": numbered}})
        sent += self._event(self._said(""), self._finish_reason)
        if (self.body.get("stream_options") or {}).get("include_usage"):
            sent += self._event(None, fields=self._usage_json())
        return sent + b"data: [DONE]\n\n"

    def page(self) -> HttpPage:
        """Return the complete answer as one response, after `end`."""
        choice: Json = {"index": 0, "finish_reason": self._finish_reason, "logprobs": None}
        if self.is_chat:
            message: Json = {"role": "assistant", "content": self._text}
            if self._calls:
                message |= {"content": None, "tool_calls": list(map(_call_json, self._calls))}
            choice["message"] = message
        else:
            choice["text"] = self._text
        reply = self._envelope("chat.completion", [choice]) | self._usage_json()
        if self._returns_tokens:
            choice["token_ids"] = self._tokens
            reply["prompt_token_ids"] = self.prompt
        return json_page(200, reply)

    def _begin(self) -> bytes:
        """Return the first chunk of a chat's stream, which comes with the first token."""
        if self._has_begun or not self.is_chat:
            return b""
        self._has_begun = True
        opening = {"delta": {"role": "assistant", "content": ""}}
        tokens: Json = {"prompt_token_ids": self.prompt} if self._returns_tokens else {}
        return self._event(opening, fields=tokens)

    def _said(self, text: str) -> Json:
        return {"delta": {"content": text}} if self.is_chat else {"text": text}

    def _event(
        self, said: Json | None, finish_reason: str | None = None, fields: Json | None = None
    ) -> bytes:
        """Return a chunk of the stream as a server-sent event; None makes one without a choice."""
        choice = {"index": 0, "logprobs": None, "finish_reason": finish_reason}
        choices = [] if said is None else [choice | said]
        chunk = self._envelope("chat.completion.chunk", choices) | (fields or {})
        return b"data: " + json.dumps(chunk).encode() + b"\n\n"

    def _envelope(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{self.number}",
            "object": kind if self.is_chat else "text_completion",
            "created": 0,
            "model": self.model,
            "choices": choices,
        }

    def _usage_json(self) -> Json:
        prompt, answer = self.usage.prompt_tokens, len(self._tokens)
        cached = {"cached_tokens": self.usage.cached_tokens} if self.shows_cached else None
        return {
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": answer,
                "total_tokens": prompt + answer,
                "prompt_tokens_details": cached,
            }
        }


def _call_json(call: ToolCall) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}
