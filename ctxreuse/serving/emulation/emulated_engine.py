"""An OpenAI-compatible server without a socket, a model or a GPU, for tests."""

from __future__ import annotations

import asyncio
import importlib
import json
import re
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from types import ModuleType
from typing import Any, Literal, NamedTuple, TypeAlias

from ctxreuse.cache.simulator import CacheUsage, PrefixCacheSimulator
from ctxreuse.context.checks import check_function
from ctxreuse.context.copies import OnePerProcess
from ctxreuse.context.fork_safety import ForkSafeLock
from ctxreuse.errors import InvalidRequestError, MissingExtraError, describe
from ctxreuse.pipeline.engine_options import is_cache_salt
from ctxreuse.rules.cache_rules import States
from ctxreuse.serving.client.reply import ToolCall
from ctxreuse.serving.client.request import messages_of
from ctxreuse.serving.emulation.word_tokenizer import CLOSING, ENGINE_TOKENIZER, chat_markup

Json: TypeAlias = dict[str, Any]

Answer: TypeAlias = str | ToolCall | Sequence[ToolCall]
"""What the model says: a text, or tools that it wants to be called."""

Answering: TypeAlias = Callable[[Json], Answer | Awaitable[Answer] | AsyncIterator[str]]
"""From a request's body to the answer; an async iterator gives it piece by piece."""

_HTTP_LIBRARIES = ("httpx", "httpx2")
_PIECE = re.compile(r"\s*\S+|\s+")
Failure: TypeAlias = int | Literal["refuse", "break"] | None
"""An HTTP status, a refused connection, one that breaks after the first token, or nothing."""

_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_DETAILS = (True, False, "if cached")
_ERROR_TYPES = {400: "BadRequestError", 401: "AuthenticationError", 404: "NotFoundError"}
_NO_PROMPT = "messages must be a list of objects, or prompt a string"


class EmulatedEngine(OnePerProcess):
    """Answers chat completions with the usage that vLLM would report; for threads and tasks.

    Serves `/v1/models`, `/v1/chat/completions` and `/v1/completions` (whole and streamed),
    `/tokenize`, `/metrics`, `/health` and `/reset_prefix_cache`; knows the parameters `max_tokens`,
    `max_completion_tokens`, `cache_salt`, `return_token_ids` and `continue_final_message`. The
    blocks of a prompt are cached when it arrives, those of an answer when it is complete.

    Args:
        block_size: Tokens of a cache block.
        capacity_tokens: Size of the cache, vLLM's null block included; None is unlimited.
        answer: What the model says: a text, or a function from the request's body to a text, to
            tool calls, or, for async clients, to an awaitable or async iterator of texts.
        model: The model's name.
        tokenize: From a text to its token ids; None counts words.
        prompt_tokens_details: Whether usage tells the cached tokens; "if cached": only if there are
            any.
        fail: What goes wrong with which completion request: a list, in order of arrival, or a
            function from the request's number (from 0) and body. An HTTP status, "refuse" for a
            refused connection, "break" for one that breaks after the first token, None for nothing.
        max_model_len: Tokens of the longest prompt that is not refused; None is unlimited.
        states: Where the cache can be read, as of `PrefixCacheSimulator`.

    Attributes:
        usage: The tokens of all prompts so far, and how many of them were cached.
        requests: The bodies of all completion requests, in order of arrival.

    Example:
        >>> import httpx
        >>> engine = EmulatedEngine(answer="In France.")
        >>> client = httpx.Client(transport=engine.transport(), base_url="http://engine")
    """

    def __init__(
        self,
        block_size: int = 16,
        capacity_tokens: int | None = None,
        answer: str | Answering = "OK.",
        model: str = "emulated",
        *,
        tokenize: Callable[[str], Sequence[int]] | None = None,
        prompt_tokens_details: bool | Literal["if cached"] = True,
        fail: Sequence[Failure] | Callable[[int, Json], Failure] = (),
        max_model_len: int | None = None,
        states: States = "everywhere",
    ) -> None:
        if not isinstance(answer, str):
            check_function("answer", answer, "a text or a function")
        if not isinstance(fail, (list, tuple)):
            check_function("fail", fail, "a list or a function")
        if prompt_tokens_details not in _DETAILS:
            raise InvalidRequestError(
                "prompt_tokens_details must be True, False or 'if cached', not "
                f"{describe(prompt_tokens_details)}"
            )
        self._new_cache = partial(
            PrefixCacheSimulator, capacity_tokens, block_size, null_block=True, states=states
        )
        self._sizes = block_size, capacity_tokens
        self._forget()
        self._answer: Answering = answer if callable(answer) else lambda body: answer
        self._model = model
        self._tokenize = tokenize or ENGINE_TOKENIZER.ids
        self._details = prompt_tokens_details
        # a list may grow later
        self._fail = fail if callable(fail) else lambda n, body: next(islice(fail, n, None), None)
        self._max_model_len = max_model_len
        self._lock = ForkSafeLock(self._forget)
        self._numbers = count()
        self.usage = CacheUsage()
        self.requests: list[Json] = []

    def _forget(self) -> None:
        self._cache = self._new_cache()

    def prompt_tokens(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the tokens of a chat prompt."""
        return list(self._tokenize(chat_markup(messages_of(messages))))

    def metrics(self) -> str:
        """Return what `/metrics` shows: the part of vLLM's that describes the prefix cache."""
        labels, (block_size, capacity) = f'engine="0",model_name="{self._model}"', self._sizes
        num_blocks = None if capacity is None else capacity // block_size
        tokens = None if num_blocks is None else num_blocks * block_size
        config = (
            f'block_size="{block_size}",engine="0",kv_cache_size_tokens="{tokens}",'
            f'num_gpu_blocks="{num_blocks}"'
        )
        return f"""\
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{{labels}}} 0.0
# TYPE vllm:prefix_cache_queries counter
vllm:prefix_cache_queries_total{{{labels}}} {self.usage.prompt_tokens}
# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total{{{labels}}} {self.usage.cached_tokens}
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{{config}}} 1.0
"""

    def reset_prefix_cache(self) -> None:
        """Forget all cached blocks, as a restart does."""
        with self._lock:
            self._forget()

    def transport(self, library: ModuleType | None = None) -> Any:
        """Return a transport for `httpx.Client` and `httpx.AsyncClient`.

        Args:
            library: The client's library, `httpx` or `httpx2`; None takes the installed one.

        Raises:
            MissingExtraError: Neither is installed.
        """
        if library is not None and getattr(library, "__name__", None) not in _HTTP_LIBRARIES:
            raise InvalidRequestError(f"library must be httpx or httpx2, not {describe(library)}")
        return transport_of(self._receive, self._answer, library)

    def _receive(self, method: str, path: str, content: bytes) -> HttpPage | EmulatedReply:
        """Take a request; return the response, or a reply that waits for the model's answer."""
        if method == "GET":
            return self._get(path)
        if path == "/reset_prefix_cache":
            self.reset_prefix_cache()
            return HttpPage(200, b"")
        if path not in (_CHAT, _COMPLETIONS, "/tokenize"):
            return refusal(404, f"there is no route {path}")
        try:
            body = json.loads(content)
        except ValueError:
            body = None
        if not isinstance(body, dict):
            return refusal(400, "the body must be a JSON object")
        tokens = self._prompt(body)
        if path == "/tokenize":
            if tokens is None:
                return refusal(400, _NO_PROMPT)
            limit = self._max_model_len
            return json_page(200, {"count": len(tokens), "max_model_len": limit, "tokens": tokens})
        with self._lock:
            number = next(self._numbers)
            self.requests.append(body)
        failure = self._fail(number, body)
        if isinstance(failure, int):
            return refusal(failure, "failed on demand")
        if failure == "refuse":
            return HttpPage(0, b"")
        if tokens is None:
            return refusal(400, _NO_PROMPT)
        return self._begin(path, number, body, tokens, breaks=failure == "break")

    def _get(self, path: str) -> HttpPage:
        if path == "/health":
            return HttpPage(200, b"")
        if path == "/metrics":
            return HttpPage(200, self.metrics().encode(), "text/plain; version=0.0.4")
        if path == "/v1/models":
            card = {"id": self._model, "object": "model", "created": 0, "owned_by": "ctxreuse"}
            card["max_model_len"] = self._max_model_len
            return json_page(200, {"object": "list", "data": [card]})
        return refusal(404, f"there is no route {path}")

    def _begin(
        self, path: str, number: int, body: Json, tokens: list[int], *, breaks: bool
    ) -> HttpPage | EmulatedReply:
        salt = body.get("cache_salt")
        if body.get("model", self._model) != self._model:
            return refusal(404, "the model does not exist")
        if body.get("n", 1) not in (1, None):
            return refusal(400, "n must be 1")
        limits = body.get("max_tokens"), body.get("max_completion_tokens")
        if not all(isinstance(one, int | None) for one in limits):
            return refusal(400, "max_tokens must be an integer")
        if salt is not None and not is_cache_salt(salt):
            return refusal(400, "cache_salt must be a non-empty string of 128 characters at most")
        if self._max_model_len is not None and len(tokens) > self._max_model_len:
            return refusal(
                400,
                f"This model's maximum context length is {self._max_model_len} tokens. However, "
                f"your request has {len(tokens)} input tokens.",
            )
        with self._lock:
            usage = self._cache.serve(tokens, salt or "")
            self.usage += usage
        return EmulatedReply(self, path == _CHAT, number, body, tokens, usage, breaks)

    def _prompt(self, body: Json) -> list[int] | None:
        messages, prompt = body.get("messages"), body.get("prompt")
        if isinstance(messages, list) and messages:
            if all(isinstance(message, dict) for message in messages):
                text = chat_markup(messages, body.get("tools"))
                if body.get("continue_final_message"):
                    text = text.removesuffix(CLOSING)
                return list(self._tokenize(text))
        elif isinstance(prompt, str):
            return list(self._tokenize(prompt))
        elif isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
            return prompt
        return None

    def _register(self, prompt: list[int], salt: str, answer: list[int]) -> None:
        """Register an answer's blocks; its last token is never computed."""
        if len(answer) > 1:
            with self._lock:
                self._cache.serve([*prompt, *answer[:-1]], salt)


def transport_of(
    receive: Callable[[str, str, bytes], HttpPage | EmulatedReply],
    answer: Answering,
    module: ModuleType | None,
) -> Any:
    """Return a transport, sync and async, of an HTTP library's own class."""
    library: Any = _http_library() if module is None else module

    def respond(request: Any, page: HttpPage) -> Any:
        if page.status == 0:
            raise library.ConnectError("connection refused", request=request)
        headers = {"content-type": page.media_type}
        return library.Response(page.status, headers=headers, content=page.content)

    def end(reply: EmulatedReply, request: Any) -> bytes:
        if reply.breaks:
            raise library.ReadError("connection broken", request=request)
        return reply.end()

    def stream(reply: EmulatedReply, request: Any) -> Iterator[bytes]:
        for part in _parts(answer(reply.body)):
            yield reply.take(part)
            if reply.is_full:
                break
        yield end(reply, request)

    async def stream_async(reply: EmulatedReply, request: Any) -> AsyncIterator[bytes]:
        async for part in _parts_async(answer(reply.body)):
            yield reply.take(part)
            if reply.is_full:
                break
        yield end(reply, request)

    events = {"content-type": "text/event-stream"}

    class EmulatedTransport(library.AsyncBaseTransport, library.BaseTransport):  # type: ignore[misc]
        def handle_request(self, request: Any) -> Any:
            reply = receive(request.method, request.url.path, request.read())
            if isinstance(reply, EmulatedReply):
                content = stream(reply, request)
                if reply.streams:
                    return library.Response(200, headers=events, content=content)
                deque(content, maxlen=0)
                reply = reply.page()
            return respond(request, reply)

        async def handle_async_request(self, request: Any) -> Any:
            reply = receive(request.method, request.url.path, await request.aread())
            if isinstance(reply, EmulatedReply):
                content = stream_async(reply, request)
                if reply.streams:
                    return library.Response(200, headers=events, content=content)
                async for _ in content:
                    pass
                reply = reply.page()
            return respond(request, reply)

    return EmulatedTransport()


def _http_library() -> ModuleType:
    for name in _HTTP_LIBRARIES:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise MissingExtraError("EmulatedEngine.transport", "openai")


def _parts(answer: object) -> Iterator[str | ToolCall]:
    if isinstance(answer, str):
        yield from _PIECE.findall(answer)
    elif isinstance(answer, ToolCall):
        yield answer
    elif isinstance(answer, (list, tuple)) and all(isinstance(one, ToolCall) for one in answer):
        yield from answer
    else:
        raise InvalidRequestError(
            f"the emulated engine's answer must be a text or ToolCalls, not {describe(answer)}; "
            "awaitables and async iterators need an async client"
        )


async def _parts_async(answer: object) -> AsyncIterator[str | ToolCall]:
    if isinstance(answer, AsyncIterator):
        async for part in answer:
            yield part
        return
    for part in _parts(await answer if isinstance(answer, Awaitable) else answer):
        yield part
        await asyncio.sleep(0)  # other requests go on between two tokens, as on a server


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

    engine: EmulatedEngine
    is_chat: bool
    number: int  # the request's, for the reply's id
    body: Json
    prompt: list[int]
    usage: CacheUsage
    breaks: bool  # whether the connection breaks after the first part

    def __post_init__(self) -> None:
        body = self.body
        self.streams = body.get("stream")
        self.is_full = self.breaks
        self._limit: int | None = body.get("max_completion_tokens") or body.get("max_tokens")
        self._returns_tokens = body.get("return_token_ids")
        self._has_begun = False
        self._text = ""
        self._calls: list[ToolCall] = []

    def take(self, part: str | ToolCall) -> bytes:
        """Take a part of the answer; return what a stream sends for it."""
        begin = self._begin()
        if isinstance(part, ToolCall):
            self._calls.append(part)
            return begin
        self._text += part
        tokens = len(self.engine._tokenize(self._text))
        self.is_full |= self._limit is not None and tokens >= self._limit
        return begin + self._event(self._said(part))

    def end(self) -> bytes:
        """End the answer; return what a stream sends then."""
        self._tokens = list(self.engine._tokenize(self._text))[: self._limit]
        self.engine._register(self.prompt, self.body.get("cache_salt") or "", self._tokens)
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
            "model": self.engine._model,
            "choices": choices,
        }

    def _usage_json(self) -> Json:
        prompt, answer = self.usage.prompt_tokens, len(self._tokens)
        details, cached = self.engine._details, self.usage.cached_tokens
        is_shown = details is True or (details and cached)
        return {
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": answer,
                "total_tokens": prompt + answer,
                "prompt_tokens_details": {"cached_tokens": cached} if is_shown else None,
            }
        }


def _call_json(call: ToolCall) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}
