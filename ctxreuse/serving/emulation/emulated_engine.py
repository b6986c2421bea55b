"""An OpenAI-compatible server without a socket, a model or a GPU, for tests.

It stands where a client's HTTP transport would: requests go in, replies in vLLM's format come out,
and a simulation of vLLM's prefix cache says how many tokens of each prompt were cached.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import count
from threading import Lock
from types import ModuleType
from typing import Any, Literal, TypeAlias

from ctxreuse.adapters.engine_options import is_cache_salt
from ctxreuse.cache.simulator import PrefixCacheSimulator
from ctxreuse.cache.usage import CacheUsage
from ctxreuse.context.rendering import message_texts
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.serving.client.completion import ToolCall
from ctxreuse.serving.emulation.openai_replies import (
    DONE_LINE,
    Api,
    Json,
    ReplyFormat,
    error_json,
    event_line,
    metrics_text,
    usage_json,
)
from ctxreuse.serving.emulation.transport import Page, Said, transport_of

Answering: TypeAlias = Callable[[Json], Said]
"""From a request's body to the answer; an async iterator gives it piece by piece."""

Failure: TypeAlias = int | Literal["refuse", "break"] | None
"""An HTTP status, a refused connection, one that breaks after the first token, or nothing."""

_APIS: dict[str, Api] = {"/v1/chat/completions": "chat", "/v1/completions": "text"}
_DETAILS = (True, False, "if cached")
_WORD = re.compile(r"<\|\w+\|>| ?\w{1,8}| ?[^\w\s]|\s+")


def word_pieces(text: str) -> list[str]:
    """Return the pieces of a text that are a token each; together they are the text."""
    return _WORD.findall(text)


def word_tokens(text: str) -> list[int]:
    """Return tokens of a text: a number for each word, the same in every process."""
    return list(map(_token, word_pieces(text)))


@lru_cache(1 << 16)  # words come again and again
def _token(word: str) -> int:
    return zlib.crc32(word.encode("utf-8", "replace"))


def chat_markup(messages: Sequence[Mapping[str, Any]], tools: object = None) -> str:
    """Return a chat prompt as the text that a model reads (ChatML), with the answer's opening."""
    parts = [f"<|im_start|>tools\n{json.dumps(tools)}<|im_end|>\n"] if tools else []
    for message in messages:
        content = "".join(message_texts(message))
        calls = json.dumps(message["tool_calls"]) if message.get("tool_calls") else ""
        parts.append(f"<|im_start|>{message.get('role')}\n{content}{calls}<|im_end|>\n")
    return "".join(parts) + "<|im_start|>assistant\n"


class EmulatedEngine:
    r"""Answers chat completions with the usage that vLLM would report.

    Serves `/v1/models`, `/v1/chat/completions` and `/v1/completions` (whole and streamed),
    `/tokenize`, `/metrics`, `/health` and `/reset_prefix_cache`. Of the sampling parameters it
    knows `max_tokens` and `max_completion_tokens`, of vLLM's own ones `cache_salt` and
    `return_token_ids`. A prompt's blocks are registered when it arrives, an answer's when it is
    complete, requests one after the other. It may be shared by threads and tasks.

    Args:
        block_size: Tokens of a cache block.
        capacity_tokens: Size of the cache, the one block included that vLLM keeps back; None is
            unlimited.
        answer: What the model says: a text, or a function from the request's body to a text, to
            tool calls, or, for async clients, to an awaitable or async iterator of texts.
        model: The model's name.
        tokenize: From a text to its token ids; None counts words.
        prompt_tokens_details: Whether usage tells the cached tokens; vLLM does so only with
            `--enable-prompt-tokens-details`, and many of its versions only for prompts of which
            some were: "if cached" does as these do.
        fail: What goes wrong with which completion request: a list, in order of arrival, or a
            function from the request's number, counted from 0, and its body. A number is answered
            as HTTP status, "refuse" refuses the connection, "break" breaks it after the first
            token, None goes well.
        max_model_len: Tokens of the longest prompt that is not refused; None takes all.

    Attributes:
        requests: The bodies of all completion requests, in order of arrival.

    Raises:
        InvalidRequestError: If an argument is of the wrong kind.

    Example:
        >>> import httpx
        >>> engine = EmulatedEngine(block_size=4, answer="In France.")
        >>> client = httpx.Client(transport=engine.transport(), base_url="http://engine")
        >>> question = {"role": "user", "content": "Where is Paris?"}
        >>> body = {"model": "emulated", "messages": [question]}
        >>> replies = [client.post("/v1/chat/completions", json=body).json() for _ in range(2)]
        >>> replies[1]["choices"][0]["message"]["content"]
        'In France.'
        >>> [reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in replies]
        [0, 12]
    """

    def __init__(
        self,
        block_size: int = 16,
        capacity_tokens: int | None = None,
        answer: str | Answering = "OK.",
        model: str = "emulated",
        *,
        tokenize: Callable[[str], Sequence[int]] = word_tokens,
        prompt_tokens_details: bool | Literal["if cached"] = True,
        fail: Sequence[Failure] | Callable[[int, Json], Failure] = (),
        max_model_len: int | None = None,
    ) -> None:
        if not isinstance(answer, str) and not callable(answer):
            raise InvalidRequestError(
                f"answer must be a text or a function, not {describe(answer)}"
            )
        if not isinstance(fail, (list, tuple)) and not callable(fail):
            raise InvalidRequestError(f"fail must be a list or a function, not {describe(fail)}")
        if prompt_tokens_details not in _DETAILS:
            raise InvalidRequestError(
                "prompt_tokens_details must be True, False or 'if cached', not "
                f"{describe(prompt_tokens_details)}"
            )
        self._block_size = block_size
        self._capacity_tokens = capacity_tokens
        self._answer = answer
        self._model = model
        self._tokenize = tokenize
        self._details = prompt_tokens_details
        self._fail = fail
        self._max_model_len = max_model_len
        self._lock = Lock()
        self._cache = self._empty_cache()
        self._number = count()
        self.usage = CacheUsage()
        """The tokens of all prompts so far, and how many of them were cached."""
        self.requests: list[Json] = []

    def prompt_tokens(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the tokens of a chat prompt."""
        return list(self._tokenize(chat_markup(messages)))

    def metrics(self) -> str:
        """Return what `/metrics` shows."""
        blocks = self._capacity_tokens
        if blocks is not None:
            blocks //= self._block_size
        return metrics_text(self.usage, self._model, self._block_size, blocks)

    def reset_prefix_cache(self) -> None:
        """Forget all cached blocks, as a restart does."""
        with self._lock:
            self._cache = self._empty_cache()

    def transport(self, library: ModuleType | None = None) -> Any:
        """Return a transport for `httpx.Client` and `httpx.AsyncClient`.

        Args:
            library: The library that the client is from, `httpx` or `httpx2`. None takes the one
                that is installed, of both `httpx`, which every version of `openai` accepts.

        Raises:
            MissingExtraError: If neither is installed.
        """
        return transport_of(self._receive, library)

    def _receive(self, method: str, path: str, content: bytes) -> Page | _Turn:
        """Take a request; return the answer, if it is known at once, or the model's turn."""
        if method == "GET":
            return self._get(path)
        if path == "/reset_prefix_cache":
            self.reset_prefix_cache()
            return Page(200, b"")
        if path not in _APIS and path != "/tokenize":
            return _refusal(404, f"there is no route {path}")
        try:
            body = json.loads(content)
        except ValueError:
            body = None
        if not isinstance(body, dict):
            return _refusal(400, "the body must be a JSON object")
        if path == "/tokenize":
            tokens = self._prompt(body)
            if tokens is None:
                return _refusal(400, "messages must be a list of objects, or prompt a string")
            limit = self._max_model_len
            return _json(200, {"count": len(tokens), "max_model_len": limit, "tokens": tokens})
        return self._open_turn(_APIS[path], body)

    def _get(self, path: str) -> Page:
        if path == "/health":
            return Page(200, b"")
        if path == "/metrics":
            return Page(200, self.metrics().encode(), "text/plain; version=0.0.4")
        if path == "/v1/models":
            card = {"id": self._model, "object": "model", "created": 0, "owned_by": "ctxreuse"}
            card["max_model_len"] = self._max_model_len
            return _json(200, {"object": "list", "data": [card]})
        return _refusal(404, f"there is no route {path}")

    def _open_turn(self, api: Api, body: Json) -> Page | _Turn:
        with self._lock:
            number = next(self._number)
            self.requests.append(body)
        failure = self._failure(number, body)
        if isinstance(failure, int):
            return _refusal(failure, "failed on demand")
        if failure == "refuse":
            return Page(0, b"")
        tokens, salt = self._prompt(body), body.get("cache_salt")
        if tokens is None:
            return _refusal(400, "messages must be a list of objects, or prompt a string")
        if body.get("model", self._model) != self._model:
            return _refusal(404, "the model does not exist")
        if body.get("n", 1) not in (1, None):
            return _refusal(400, "n must be 1")
        if salt is not None and not is_cache_salt(salt):
            return _refusal(400, "cache_salt must be a non-empty string of 128 characters at most")
        if self._max_model_len is not None and len(tokens) > self._max_model_len:
            return _refusal(400, f"the model's context holds {self._max_model_len} tokens")
        with self._lock:
            usage = self._cache.serve(tokens, salt or "")
            self.usage += usage
        reply = ReplyFormat(
            api,
            f"chatcmpl-{number}" if api == "chat" else f"cmpl-{number}",
            self._model,
            tokens if body.get("return_token_ids") else None,
        )
        return _Turn(self, body, reply, tokens, usage, breaks=failure == "break")

    def _failure(self, number: int, body: Json) -> Failure:
        if callable(self._fail):
            return self._fail(number, body)
        return self._fail[number] if number < len(self._fail) else None

    def _prompt(self, body: Json) -> list[int] | None:
        """Return a body's prompt as tokens; None if it has none."""
        messages, prompt = body.get("messages"), body.get("prompt")
        if isinstance(messages, list) and messages:
            if all(isinstance(message, dict) for message in messages):
                return list(self._tokenize(chat_markup(messages, body.get("tools"))))
        elif isinstance(prompt, str):
            return list(self._tokenize(prompt))
        elif isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
            return prompt
        return None

    def _say(self, body: Json) -> Said:
        return self._answer if isinstance(self._answer, str) else self._answer(body)

    def _register(self, prompt: list[int], answer: list[int], body: Json) -> None:
        """Register an answer's blocks; its last token is never computed."""
        if len(answer) > 1:
            with self._lock:
                self._cache.serve([*prompt, *answer[:-1]], body.get("cache_salt") or "")

    def _empty_cache(self) -> PrefixCacheSimulator:
        return PrefixCacheSimulator(self._capacity_tokens, self._block_size, null_block=True)


class _Turn:
    """The model's turn: takes what it says part by part, gives what goes over the wire."""

    def __init__(
        self,
        engine: EmulatedEngine,
        body: Json,
        reply: ReplyFormat,
        prompt: list[int],
        usage: CacheUsage,
        *,
        breaks: bool,
    ) -> None:
        self.body = body
        self.prompt = prompt
        self.breaks = breaks
        self.streams = bool(body.get("stream"))
        self.is_full = False
        self._engine = engine
        self._reply = reply
        self._usage = usage
        self._limit: int | None = body.get("max_completion_tokens") or body.get("max_tokens")
        self._has_begun = False
        self._text = ""
        self._tokens: list[int] = []
        self._calls: list[ToolCall] = []

    def say(self) -> Said:
        """Return what the model says."""
        return self._engine._say(self.body)

    def take(self, part: str | ToolCall) -> bytes:
        """Take a part of the answer; return what a stream sends for it."""
        begin = self._begin()
        if isinstance(part, ToolCall):
            self._calls.append(part)
            return begin
        self._text += part
        tokens = len(self._engine._tokenize(self._text))
        self.is_full = self._limit is not None and tokens >= self._limit
        return begin + event_line(self._reply.piece(part))

    def end(self) -> bytes:
        """Register the answer's blocks; return what a stream sends when it is complete."""
        tokens = list(self._engine._tokenize(self._text))[: self._limit]
        self._tokens = tokens
        self._engine._register(self.prompt, tokens, self.body)
        lines = [self._begin()]
        if self._calls:
            lines.append(event_line(self._reply.calls(self._calls)))
        lines.append(event_line(self._reply.ending(self._finish)))
        if (self.body.get("stream_options") or {}).get("include_usage"):
            lines.append(event_line(self._reply.closing(self._usage_json)))
        return b"".join([*lines, DONE_LINE])

    def page(self) -> Page:
        """Return the complete answer as one message."""
        return _json(
            200,
            self._reply.whole(
                self._text, self._calls, self._tokens, self._finish, self._usage_json
            ),
        )

    def _begin(self) -> bytes:
        if self._has_begun or self._reply.api == "text":
            return b""
        self._has_begun = True
        return event_line(self._reply.opening())

    @property
    def _finish(self) -> str:
        return "tool_calls" if self._calls else "length" if self.is_full else "stop"

    @property
    def _usage_json(self) -> Json:
        details = self._engine._details
        tells = self._usage.cached_tokens > 0 if details == "if cached" else bool(details)
        return usage_json(self._usage, len(self._tokens), details=tells)


def _json(status: int, body: Json) -> Page:
    return Page(status, json.dumps(body).encode(), "application/json")


def _refusal(status: int, message: str) -> Page:
    return _json(status, error_json(message, status))
