"""The JSON that an OpenAI-compatible server answers with, in vLLM's variant of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ctxreuse.cache.usage import CacheUsage
from ctxreuse.serving.client.completion import ToolCall

Json = dict[str, Any]
Api = Literal["chat", "text"]


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """What all messages of one reply have in common.

    Attributes:
        api: "chat" for chat completions, "text" for plain completions.
        reply_id: The id that the server gives the reply.
        model: The model's name.
        prompt_token_ids: The prompt's tokens, if the client asked for them.
    """

    api: Api
    reply_id: str
    model: str
    prompt_token_ids: Sequence[int] | None = None

    def whole(
        self, text: str, calls: Sequence[ToolCall], tokens: Sequence[int], finish: str, usage: Json
    ) -> Json:
        """Return the reply as one message.

        Args:
            text: The answer.
            calls: The tools to call.
            tokens: The answer's tokens.
            finish: Why the answer ends: "stop", "length" or "tool_calls".
            usage: From `usage_json`.
        """
        choice: Json = {"index": 0, "finish_reason": finish, "logprobs": None}
        if self.api == "text":
            choice["text"] = text
        else:
            message: Json = {"role": "assistant", "content": None if calls else text}
            if calls:
                message["tool_calls"] = [_call_json(call) for call in calls]
            choice["message"] = message
        reply = self._envelope("chat.completion", [choice]) | {"usage": usage}
        if self.prompt_token_ids is not None:
            choice["token_ids"] = list(tokens)
            reply["prompt_token_ids"] = list(self.prompt_token_ids)
        return reply

    def opening(self) -> Json:
        """Return the first chunk of a chat's stream, which comes with the first token."""
        chunk = self._chunk({"delta": {"role": "assistant", "content": ""}}, None)
        if self.prompt_token_ids is not None:
            chunk["prompt_token_ids"] = list(self.prompt_token_ids)
        return chunk

    def piece(self, text: str) -> Json:
        """Return the chunk that carries a piece of the answer."""
        return self._chunk({"text": text} if self.api == "text" else _delta(content=text), None)

    def calls(self, calls: Sequence[ToolCall]) -> Json:
        """Return the chunk that carries tool calls."""
        numbered = [{"index": index} | _call_json(call) for index, call in enumerate(calls)]
        return self._chunk(_delta(tool_calls=numbered), None)

    def ending(self, finish: str) -> Json:
        """Return the chunk that says why the answer ends."""
        return self._chunk({"text": ""} if self.api == "text" else _delta(content=""), finish)

    def closing(self, usage: Json) -> Json:
        """Return the last chunk, which carries the usage and no choice."""
        return self._envelope("chat.completion.chunk", []) | {"usage": usage}

    def _chunk(self, content: Json, finish: str | None) -> Json:
        choice = {"index": 0, "logprobs": None, "finish_reason": finish} | content
        return self._envelope("chat.completion.chunk", [choice])

    def _envelope(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self.reply_id,
            "object": "text_completion" if self.api == "text" else kind,
            "created": 0,
            "model": self.model,
            "choices": choices,
        }


def _delta(**fields: Any) -> Json:
    return {"delta": fields}


def _call_json(call: ToolCall) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def usage_json(usage: CacheUsage, answer_tokens: int, *, details: bool) -> Json:
    """Return a usage object.

    Args:
        usage: The prompt's tokens and how many were cached.
        answer_tokens: The answer's tokens.
        details: Whether the server says how many were cached; vLLM does so only with
            `--enable-prompt-tokens-details`.
    """
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": answer_tokens,
        "total_tokens": usage.prompt_tokens + answer_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens} if details else None,
    }


def error_json(message: str, status: int) -> Json:
    """Return an error object."""
    kind = {400: "BadRequestError", 401: "AuthenticationError", 404: "NotFoundError"}
    return {
        "error": {
            "message": message,
            "type": kind.get(status, "InternalServerError"),
            "param": None,
            "code": status,
        }
    }


def event_line(message: Mapping[str, Any]) -> bytes:
    """Return a message as a server-sent event."""
    return b"data: " + json.dumps(message).encode() + b"\n\n"


DONE_LINE = b"data: [DONE]\n\n"


def metrics_text(usage: CacheUsage, model: str, block_size: int, num_blocks: int | None) -> str:
    """Return the part of vLLM's `/metrics` that tells of the prefix cache.

    Args:
        usage: All prompts so far.
        model: The model's name.
        block_size: Tokens of a block.
        num_blocks: Blocks of the cache; None for an unlimited one.
    """
    engine = {"engine": "0", "model_name": model}
    size = None if num_blocks is None else num_blocks * block_size
    config = {
        "block_size": block_size,
        "engine": "0",
        "kv_cache_size_tokens": size,
        "num_gpu_blocks": num_blocks,
    }
    families: Iterable[tuple[str, str, Mapping[str, object], float]] = (
        ("vllm:kv_cache_usage_perc", "gauge", engine, 0.0),
        ("vllm:prefix_cache_queries_total", "counter", engine, usage.prompt_tokens),
        ("vllm:prefix_cache_hits_total", "counter", engine, usage.cached_tokens),
        ("vllm:cache_config_info", "gauge", config, 1.0),
    )
    lines = []
    for name, kind, labels, value in families:
        shown = ",".join(f'{label}="{_escaped(str(text))}"' for label, text in labels.items())
        lines += [f"# TYPE {name.removesuffix('_total')} {kind}", f"{name}{{{shown}}} {value}"]
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
