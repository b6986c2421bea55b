"""An engine's answer to one request, and its reader from a stream of chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool that the model wants to be called.

    Attributes:
        name: The tool's name.
        arguments: Its arguments, as the JSON text that the model wrote.
        id: The call's id; the tool's result refers to it.
    """

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
        cached_tokens: Those that came from the prefix cache; None is unknown, not 0. Many versions
            of vLLM report them only where there are some: what they leave out is unknown until
            the client has seen the engine report any, and 0 from then on.
        completion_tokens: Tokens of the answer; None if the server reports no usage.
        time_to_first_token_s: Seconds from sending the attempt that succeeded to its first token.
        total_s: Seconds from sending the first attempt to the end of the answer.
        attempts: How often the request was sent.
        prompt_token_ids: The prompt's tokens, if they were asked for and came.
        tool_calls: The tools that the model wants to be called.
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


class ChunkReader:
    """Collects the chunks of one streamed reply, whatever they leave out."""

    def __init__(self) -> None:
        self.reply_id = ""
        self.finish_reason: str | None = None
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.prompt_token_ids: tuple[int, ...] | None = None
        self._pieces: list[str] = []
        self._calls: dict[int, dict[str, str]] = {}

    @property
    def text(self) -> str:
        """The answer's text so far."""
        return "".join(self._pieces)

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The tool calls so far."""
        return tuple(ToolCall(**self._calls[index]) for index in sorted(self._calls))

    def take(self, chunk: Any) -> ChunkContent:
        """Read a chunk.

        Args:
            chunk: A `ChatCompletionChunk`, with vLLM's fields as extras.

        Returns:
            What it carries.
        """
        self.reply_id = getattr(chunk, "id", None) or self.reply_id
        ids = getattr(chunk, "prompt_token_ids", None)
        if isinstance(ids, list):
            self.prompt_token_ids = tuple(ids)
        usage = getattr(chunk, "usage", None)
        if usage is not None:
            self.prompt_tokens = getattr(usage, "prompt_tokens", None)
            self.completion_tokens = getattr(usage, "completion_tokens", None)
            details = getattr(usage, "prompt_tokens_details", None)
            self.cached_tokens = getattr(details, "cached_tokens", None)
        text, has_token = "", False
        for choice in getattr(chunk, "choices", None) or ():
            delta = getattr(choice, "delta", None)
            text += getattr(delta, "content", None) or ""
            called = getattr(delta, "tool_calls", None) or ()
            for piece in called:
                call = self._calls.setdefault(piece.index, {"id": "", "name": "", "arguments": ""})
                call["id"] = getattr(piece, "id", None) or call["id"]
                function = getattr(piece, "function", None)
                call["name"] += getattr(function, "name", None) or ""
                call["arguments"] += getattr(function, "arguments", None) or ""
            thought = getattr(delta, "reasoning_content", None) or getattr(delta, "reasoning", None)
            finish = getattr(choice, "finish_reason", None)
            self.finish_reason = finish or self.finish_reason
            has_token = has_token or bool(text or called or thought or finish)
        if text:
            self._pieces.append(text)
        return ChunkContent(text, has_token)


@dataclass(frozen=True, slots=True)
class ChunkContent:
    """What one chunk of a stream carries.

    Attributes:
        text: Text of the answer.
        has_token: Whether the model has said something: text, a thought, a tool call, or its end.
    """

    text: str
    has_token: bool
