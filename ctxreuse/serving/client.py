"""A client for engines that speak OpenAI's protocol, which tells what each prompt cost."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias
from urllib.parse import urlsplit

from ctxreuse.blocks import Message, copied_message
from ctxreuse.cache.metrics import EngineMetrics
from ctxreuse.errors import EngineError, InvalidRequestError, MissingExtraError, describe
from ctxreuse.fail_open import FailOpen
from ctxreuse.planner import ReusePlanner
from ctxreuse.plans import Plan
from ctxreuse.serving.cache_salt import checked_cache_salt, conversation_session, tenant_salt
from ctxreuse.serving.completion import ChunkReader, Completion
from ctxreuse.serving.transient_errors import (
    BrokenReplyError,
    foreign_errors,
    is_transient,
    status_of,
    waiting,
)

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from ctxreuse.cache.events import KVEventSync
    from ctxreuse.cache.shadow import ShadowCache

Prompt: TypeAlias = Plan | Sequence[Message]
"""What is sent: a plan, or chat messages as they are."""

_log = logging.getLogger("ctxreuse")
_RESERVED = ("messages", "stream")
_NO_DETAILS = (
    "%s does not report cached tokens, so they are unknown, not 0: "
    "start vLLM with --enable-prompt-tokens-details"
)


class EngineClient:
    """Sends plans to an OpenAI-compatible engine and measures each request.

    Answers are streamed inside, to see the first token. Broken connections, 429 and 5xx are tried
    again, with growing random waits, but never once the caller has got a piece of the answer. A
    request that fails for good or is cancelled is told to the planner, which then does not expect
    its prompt in the engine's cache. Nothing is added to a call that was not asked for.

    Args:
        base_url: The engine's address, with or without `/v1`.
        model: The model's name; None asks the engine, once.
        api_key: Its key; vLLM takes any unless it was started with one.
        planner: Who is told of failed requests.
        shadow: Who is told of answered requests, for engines that report no evictions.
        events: Who is told which tokens a prompt had, for engines that do.
        http_client: An `httpx.AsyncClient` of your own, which you close; None makes one.
        retries: How often a request is sent again.
        backoff_s: Longest wait before the first retry, in seconds; it doubles with each.
        timeout_s: Seconds without a sign of the engine after which an attempt has failed.
        cache_salt: "tenant" sends a hash of each plan's tenant as vLLM's `cache_salt`, so that
            tenants cannot tell from response times what others asked.
        session_id: "conversation" sends a hash of tenant and conversation as header
            `X-Session-ID`, for routers that keep a conversation on one engine.
        salt_key: A secret for both hashes; processes that share it share the cache.
        clock: Seconds from any start.

    Raises:
        InvalidRequestError: If an argument is of the wrong kind.
        MissingExtraError: If `openai` or `tenacity` is not installed.

    Example:
        >>> import asyncio, httpx
        >>> from ctxreuse import ContextRequest, ReusePlanner
        >>> from ctxreuse.serving import EmulatedEngine
        >>> async def main():
        ...     transport = EmulatedEngine(answer="In France.").transport()
        ...     async with httpx.AsyncClient(transport=transport) as http:
        ...         planner = ReusePlanner()
        ...         client = EngineClient("http://engine", planner=planner, http_client=http)
        ...         plan = planner.plan(ContextRequest(["Paris is in France."], "Where is Paris?"))
        ...         return await client.complete(plan, max_tokens=20)
        >>> asyncio.run(main()).text
        'In France.'
    """

    def __init__(
        self,
        base_url: str,
        model: str | None = None,
        *,
        api_key: str = "EMPTY",
        planner: ReusePlanner | None = None,
        shadow: ShadowCache | None = None,
        events: KVEventSync | None = None,
        http_client: Any = None,
        retries: int = 2,
        backoff_s: float = 0.5,
        timeout_s: float | None = 600.0,
        cache_salt: Literal["tenant"] | None = None,
        session_id: Literal["conversation"] | None = None,
        salt_key: str = "",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if planner is not None and not isinstance(planner, ReusePlanner):
            raise InvalidRequestError(f"planner must be a ReusePlanner, not {describe(planner)}")
        if not isinstance(retries, int) or retries < 0:
            raise InvalidRequestError(f"retries must be an integer from 0, not {describe(retries)}")
        for name, value, known in (
            ("cache_salt", cache_salt, "tenant"),
            ("session_id", session_id, "conversation"),
        ):
            if value not in (known, None):
                raise InvalidRequestError(
                    f"{name} must be {known!r} or None, not {describe(value)}; "
                    f"a literal one goes into complete(..., {name}=...)"
                )
        self._root = _root_of(base_url)
        self._host = urlsplit(self._root).netloc.rpartition("@")[2]
        self._openai = _openai_client(f"{self._root}/v1", api_key, http_client, timeout_s)
        self._owns_http = http_client is None
        self._model = model
        self._model_lock = asyncio.Lock()
        self._planner = planner
        self._shadow = shadow
        self._events = events
        self._retries = retries
        self._backoff_s = backoff_s
        self._salts_tenants = cache_salt is not None
        self._names_sessions = session_id is not None
        self._salt_key = salt_key
        self._clock = clock
        self._has_said_no_details = False
        self._bookkeeping = FailOpen("EngineClient", "the answer is returned all the same")

    async def complete(
        self,
        prompt: Prompt,
        *,
        cache_salt: str | None = None,
        session_id: str | None = None,
        on_first_token: Callable[[], object] | None = None,
        **params: Any,
    ) -> Completion:
        """Send a prompt and wait for the whole answer.

        Args:
            prompt: A plan, or chat messages.
            cache_salt: vLLM's `cache_salt` for this request, instead of the tenant's.
            session_id: The `X-Session-ID` of this request, instead of the conversation's.
            on_first_token: Called when the first token has come.
            **params: What `chat.completions.create` takes: `max_tokens`, `temperature`, `tools`,
                `extra_body`, ...

        Returns:
            The answer and what it cost.

        Raises:
            InvalidRequestError: If an argument is of the wrong kind.
            EngineError: If the engine did not answer; the client's own error is its cause.
        """
        call = self._call(prompt, cache_salt, session_id, params, on_first_token)
        with self._reporting(call):
            model = await self.model()
            async for attempt in self._attempts():
                with attempt:
                    async for _ in self._pieces(call, model):
                        pass
            return self._completed(call)

    def stream(
        self,
        prompt: Prompt,
        *,
        cache_salt: str | None = None,
        session_id: str | None = None,
        **params: Any,
    ) -> CompletionStream:
        """Send a prompt and get the answer piece by piece.

        Args:
            prompt: A plan, or chat messages.
            cache_salt: As in `complete`.
            session_id: As in `complete`.
            **params: As in `complete`.

        Returns:
            An async iterator of texts; use it with `async with`, so that a request whose answer is
            left early is cancelled at once.

        Raises:
            InvalidRequestError: If an argument is of the wrong kind.
        """
        return CompletionStream(self, self._call(prompt, cache_salt, session_id, params))

    async def model(self) -> str:
        """Return the model's name: the one given, or the engine's first one.

        Raises:
            EngineError: If the engine does not say.
        """
        async with self._model_lock:
            if self._model is None:
                self._model = _first_model(await self._ask("GET", "/v1/models"))
                if self._model is None:
                    raise EngineError(f"the engine at {self._host} names no model; pass model=...")
            return self._model

    async def metrics(self) -> EngineMetrics:
        """Return what the engine's `/metrics` say about its prefix cache.

        Raises:
            EngineError: If the engine does not answer.
        """
        return EngineMetrics.parse(await self._ask("GET", "/metrics"))

    async def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the tokens of a prompt as the engine sees them (vLLM's `/tokenize`).

        Raises:
            InvalidRequestError: If the prompt is of the wrong kind.
            EngineError: If the engine has no such route.
        """
        body = {"model": await self.model(), "messages": _messages(prompt)}
        try:
            return tuple(json.loads(await self._ask("POST", "/tokenize", body))["tokens"])
        except (ValueError, TypeError, KeyError) as error:
            raise EngineError(f"the engine at {self._host} returned no tokens") from error

    def forget(self, plan: Plan) -> None:
        """Tell the planner that a plan's prompt is not in the engine's cache."""
        if self._shadow is not None:
            self._shadow.forget(plan)
        if self._planner is not None:
            self._planner.evict([plan.request_id])

    async def aclose(self) -> None:
        """Close the connections, unless they are those of an `http_client` of yours."""
        if self._owns_http:
            await self._openai.close()

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    def _call(
        self,
        prompt: Prompt,
        cache_salt: str | None,
        session_id: str | None,
        params: Mapping[str, Any],
        on_first_token: Callable[[], object] | None = None,
    ) -> _Call:
        """Put together what is sent."""
        _check_params(params)
        messages = _messages(prompt)
        plan = prompt if isinstance(prompt, Plan) else None
        salt = checked_cache_salt(cache_salt)
        if plan is not None:
            request = plan.request
            if salt is None and self._salts_tenants:
                salt = tenant_salt(request.tenant, self._salt_key)
            if session_id is None and self._names_sessions and request.conversation_id is not None:
                session_id = conversation_session(
                    request.tenant, request.conversation_id, self._salt_key
                )
        body: dict[str, Any] = {} if salt is None else {"cache_salt": salt}
        if self._events is not None and plan is not None:
            body["return_token_ids"] = True
        headers = {} if session_id is None else {"X-Session-ID": session_id}
        arguments = {
            **params,
            "messages": messages,
            "stream": True,
            "stream_options": {**(params.get("stream_options") or {}), "include_usage": True},
            "extra_body": {**body, **(params.get("extra_body") or {})},
            "extra_headers": {**headers, **(params.get("extra_headers") or {})},
        }
        return _Call(plan, arguments, on_first_token)

    def _attempts(self) -> Any:
        from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt

        return AsyncRetrying(
            stop=stop_after_attempt(self._retries + 1),
            wait=waiting(self._backoff_s),
            retry=retry_if_exception(is_transient),
            reraise=True,
        )

    async def _pieces(self, call: _Call, model: str) -> AsyncGenerator[str]:
        """Send the request once; yield the answer's pieces."""
        call.begin(self._clock())
        chunks = await self._openai.chat.completions.create(**{"model": model, **call.arguments})
        async with chunks:
            async for chunk in chunks:
                content = call.reader.take(chunk)
                if content.has_token:
                    call.note_token(self._clock())
                if content.text:
                    yield content.text
        if call.reader.finish_reason is None:
            raise BrokenReplyError("the stream ended before the answer did")

    async def _stream(self, call: _Call) -> AsyncGenerator[str]:
        """Yield the answer's pieces; send the request again only until the first one is there."""
        with self._reporting(call):
            model = await self.model()
            async for attempt in self._attempts():
                with attempt:
                    pieces = self._pieces(call, model)
                    piece = await anext(pieces, None)
            async with aclosing(pieces):
                while piece is not None:
                    yield piece
                    piece = await anext(pieces, None)
            call.completion = self._completed(call)

    def _completed(self, call: _Call) -> Completion:
        reader, ended = call.reader, self._clock()
        first_token = ended if call.first_token_at is None else call.first_token_at
        completion = Completion(
            text=reader.text,
            request_id=reader.reply_id if call.plan is None else call.plan.request_id,
            finish_reason=reader.finish_reason or "",
            prompt_tokens=reader.prompt_tokens,
            cached_tokens=reader.cached_tokens,
            completion_tokens=reader.completion_tokens,
            time_to_first_token_s=first_token - call.attempt_began_at,
            total_s=ended - call.began_at,
            attempts=call.attempts,
            prompt_token_ids=reader.prompt_token_ids,
            tool_calls=reader.tool_calls,
        )
        self._bookkeeping.attempt(lambda: self._note(call, completion), lambda: None)
        return completion

    def _note(self, call: _Call, completion: Completion) -> None:
        """Tell the caches' observers what the engine has seen."""
        if completion.cached_tokens is None and not self._has_said_no_details:
            self._has_said_no_details = True
            _log.warning(_NO_DETAILS, self._host)
        if call.plan is None:
            return
        if self._shadow is not None and completion.prompt_tokens is not None:
            self._shadow.observe(
                call.plan,
                completion.prompt_tokens,
                completion.cached_tokens,
                completion.completion_tokens or 0,
            )
        if self._events is not None and completion.prompt_token_ids is not None:
            salt = call.arguments["extra_body"].get("cache_salt")
            self._events.record(call.plan, completion.prompt_token_ids, cache_salt=salt)

    @contextmanager
    def _reporting(self, call: _Call) -> Iterator[None]:
        """Map foreign errors to ours; whatever goes wrong, the planner hears of it."""
        try:
            yield
        except BaseException as error:
            if call.plan is not None:
                self.forget(call.plan)
            if isinstance(error, foreign_errors()):
                raise self._engine_error(error, call.attempts) from error
            raise

    async def _ask(self, method: str, path: str, body: object = None) -> str:
        """Return what a route outside the completions answers."""
        attempts = 0
        try:
            async for attempt in self._attempts():
                with attempt:
                    attempts += 1
                    url = self._root + path
                    if method == "GET":
                        return await self._openai.get(url, cast_to=str)
                    return await self._openai.post(url, cast_to=str, body=body)
        except foreign_errors() as error:
            raise self._engine_error(error, attempts) from error
        raise AssertionError("tenacity makes at least one attempt")

    def _engine_error(self, error: BaseException, attempts: int) -> EngineError:
        """Return our error for a foreign one, without its message, which may hold the prompt."""
        status = status_of(error)
        what = type(error).__name__ if status is None else f"status {status}"
        kind = getattr(error, "type", None) or getattr(error, "code", None)
        detail = f" ({kind})" if isinstance(kind, str) and kind.isidentifier() else ""
        return EngineError(
            f"the engine at {self._host} did not answer: {what}{detail}, attempts: {attempts}; "
            "the cause says more, and so does the engine's log",
            status,
            attempts,
        )


class CompletionStream:
    """An answer that is on its way: an async iterator of its pieces.

    Made by `EngineClient.stream`. `completion` is there once the iteration has ended.
    """

    def __init__(self, client: EngineClient, call: _Call) -> None:
        self._call = call
        self._pieces = client._stream(call)

    @property
    def completion(self) -> Completion:
        """The whole answer and what it cost.

        Raises:
            EngineError: If the answer has not ended.
        """
        if self._call.completion is None:
            raise EngineError("the answer has not ended; iterate over its pieces first")
        return self._call.completion

    def __aiter__(self) -> CompletionStream:
        return self

    async def __anext__(self) -> str:
        return await anext(self._pieces)

    async def aclose(self) -> None:
        """Cancel the request, unless it has ended; the planner hears of it."""
        await self._pieces.aclose()

    async def __aenter__(self) -> CompletionStream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()


@dataclass(slots=True)
class _Call:
    """One request on its way through its attempts."""

    plan: Plan | None
    arguments: dict[str, Any]
    on_first_token: Callable[[], object] | None = None
    reader: ChunkReader = field(default_factory=ChunkReader)
    attempts: int = 0
    began_at: float = 0.0
    attempt_began_at: float = 0.0
    first_token_at: float | None = None
    completion: Completion | None = None

    def begin(self, now: float) -> None:
        """Begin an attempt; what an earlier one has brought is dropped."""
        self.attempts += 1
        if self.attempts == 1:
            self.began_at = now
        self.attempt_began_at, self.first_token_at = now, None
        self.reader = ChunkReader()

    def note_token(self, now: float) -> None:
        """Note that a token has come."""
        if self.first_token_at is None:
            self.first_token_at = now
            if self.on_first_token is not None:
                self.on_first_token()


def _root_of(base_url: object) -> str:
    if not isinstance(base_url, str) or urlsplit(base_url).scheme not in ("http", "https"):
        raise InvalidRequestError(
            f"base_url must be the engine's address, such as 'http://127.0.0.1:8000/v1', not "
            f"{describe(base_url)}"
        )
    return base_url.rstrip("/").removesuffix("/v1")


def _openai_client(
    base_url: str, api_key: str, http_client: Any, timeout_s: float | None
) -> AsyncOpenAI:
    try:
        import tenacity  # noqa: F401 - used later, but better missed at construction
        from openai import AsyncOpenAI
    except ImportError as error:
        raise MissingExtraError("EngineClient", "openai") from error
    return AsyncOpenAI(
        api_key=api_key,
        base_url=base_url,
        http_client=http_client,
        timeout=timeout_s,
        max_retries=0,
    )


def _messages(prompt: object) -> list[dict[str, Any]]:
    if isinstance(prompt, Plan):
        return prompt.messages()
    if isinstance(prompt, (str, bytes, Mapping)) or not isinstance(prompt, Sequence):
        raise InvalidRequestError(
            f"a prompt must be a Plan or a list of chat messages, not {describe(prompt)}"
        )
    for message in prompt:
        if not isinstance(message, Mapping):
            raise InvalidRequestError(f"a chat message must be a dict, not {describe(message)}")
    return [copied_message(message) for message in prompt]


def _check_params(params: Mapping[str, Any]) -> None:
    for name in _RESERVED:
        if name in params:
            raise InvalidRequestError(f"{name} is set by the client; leave it out")
    if params.get("n") not in (None, 1):
        raise InvalidRequestError(f"n must be 1, not {describe(params['n'])}")


def _first_model(page: str) -> str | None:
    try:
        name = json.loads(page)["data"][0]["id"]
    except (ValueError, TypeError, LookupError):
        return None
    return name if isinstance(name, str) else None
