"""The connection to one engine: its address, its errors, and which of them are worth a retry."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import sys
import time
from base64 import b64encode
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from functools import partial
from http.cookiejar import DefaultCookiePolicy
from socket import gaierror
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit
from weakref import WeakKeyDictionary

from ctxreuse.context.checks import checked_header, checked_integer, checked_number, reported_count
from ctxreuse.context.fail_open import FailOpen
from ctxreuse.context.fork_safety import importing_late, leave_to_parent, renew_after_fork
from ctxreuse.context.tokens import well_formed
from ctxreuse.errors import EngineError, InvalidRequestError, MissingExtraError, describe, shown_url
from ctxreuse.rules.answers import streams_token_ids
from ctxreuse.rules.cache_rules import DEFAULT_CACHE, CacheRules
from ctxreuse.serving.aio.concurrency import TimeLimit
from ctxreuse.serving.client.reply import BrokenReplyError, field_of, parsed_json

if TYPE_CHECKING:
    from openai import AsyncOpenAI


class EngineConnection:
    """Sends requests to one engine, and sends again what may succeed then."""

    def __init__(
        self,
        base_url: str,
        api_key: str,
        http_client: Any,
        retries: int,
        backoff_s: float,
        timeout_s: float | None,
        max_reply_bytes: int,
    ) -> None:
        parts = _checked_address(base_url)
        if not callable(api_key):  # newer versions of openai take a function
            checked_header("api_key", api_key)
        self.host = parts.netloc.rpartition("@")[2]
        # without user and password: HTTP libraries write addresses into logs and errors
        self.root = f"{parts.scheme}://{self.host}{parts.path.rstrip('/').removesuffix('/v1')}"
        self._api_key = api_key
        self.basic = _basic(parts)
        self._max_reply_bytes = checked_integer("max_reply_bytes", max_reply_bytes, 1)
        self._timeout_s = timeout_s if timeout_s is None else checked_number("timeout_s", timeout_s)
        self._users_http = http_client
        self._openai: AsyncOpenAI | None = self._connected()
        if http_client is None:
            renew_after_fork(self._start_anew)
        self._retries = checked_integer("retries", retries)
        self._backoff_s = backoff_s

    def _start_anew(self) -> None:
        """Have no connections, as a child: on a shared one, bytes of two processes would mix."""
        leave_to_parent(self._openai)
        self._openai = None

    @property
    def openai(self) -> AsyncOpenAI:
        """The client of the `openai` package; it makes one attempt."""
        http, here = self._users_http, os.getpid()
        if http is not None and (first := _processes.setdefault(http, here)) != here:
            raise InvalidRequestError(  # forks could get each other's replies
                f"process {first} has sent with this http_client before it forked process {here}, "
                "and the two would get each other's replies; make the http_client in each process, "
                "or leave it out: EngineClient renews its own"
            )
        if self._openai is None:
            self._openai = self._connected()
        return self._openai

    def _connected(self) -> AsyncOpenAI:
        """Return a client; raise MissingExtraError or InvalidRequestError if none can be made."""
        try:
            with importing_late:
                import tenacity  # noqa: F401 - used later, but better missed at construction
                from openai import AsyncOpenAI, DefaultAsyncHttpxClient, OpenAIError
        except ImportError as error:
            raise MissingExtraError("EngineClient", "openai") from error
        wrong_address = (UnicodeError, *(library.InvalidURL for library in http_libraries()))
        http, base_url = self._users_http, f"{self.root}/v1"
        if http is None:
            http = DefaultAsyncHttpxClient(timeout=self._timeout_s)
            # an engine could set cookies without end, and tell by them whose requests it gets
            http.cookies.jar.set_policy(DefaultCookiePolicy(allowed_domains=()))
        try:
            with importing_late:
                client = AsyncOpenAI(
                    api_key=self._api_key,
                    base_url=base_url,
                    http_client=guarded(http, self._max_reply_bytes),
                    timeout=self._timeout_s,
                    max_retries=0,
                    default_headers=self.basic,
                )
                # imports more, and in Python 3.11 under a lock that no fork may meet
                _ = client.chat.completions
            _ = client.base_url.host  # decoded now, or by each request
            return client
        except wrong_address as error:
            raise InvalidRequestError(
                f"base_url {shown_url(base_url)!r} is none that can be asked: "
                f"{describe(str(error))}; give one such as 'http://127.0.0.1:8000/v1'"
            ) from error
        except (OpenAIError, TypeError) as error:
            raise InvalidRequestError(
                f"openai makes no client of the http_client {describe(self._users_http)} and an "
                f"api_key that is a {type(self._api_key).__name__}; pass an httpx.AsyncClient or "
                "None, and a string"
            ) from error

    def time_limit(self) -> TimeLimit:
        """Return the time for one request, all attempts and waits included."""
        return TimeLimit(self._timeout_s, f"the engine at {self.host}", "timeout_s")

    def attempts(self, limit: TimeLimit) -> Any:
        """Return tenacity's attempts at one request."""
        from tenacity import AsyncRetrying, retry_if_exception, wait_random_exponential

        grow = wait_random_exponential(multiplier=self._backoff_s, max=_LONGEST_BACKOFF_S)

        def wait(state: Any) -> float:
            asked_s = retry_after_s(state.outcome.exception())
            return grow(state) if asked_s is None else asked_s

        def stop(state: Any) -> Any:
            left_s = _LONGEST_WAIT_S if limit.left_s is None else limit.left_s
            return state.attempt_number > self._retries or state.upcoming_sleep > left_s

        def is_transient(error: BaseException) -> bool:
            known = isinstance(error, client_library_errors())
            return known and status_rule(status_of(error)).again

        again = retry_if_exception(is_transient)
        return AsyncRetrying(stop=stop, wait=wait, retry=again, reraise=True)

    async def ask(
        self, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
    ) -> str:
        """Return what a route outside the completions answers."""
        limit = self.time_limit()
        attempts, url, options = self.attempts(limit), self.root + path, {"headers": headers or {}}
        send: Any = partial(self.openai.post, body=body, options=options)
        if method == "GET":
            send = self.openai.get
        try:
            page: str = await limit.wait_for(attempts(send, url, cast_to=str))
            return page
        except client_library_errors() as error:
            raise self.error(error, attempts.statistics["attempt_number"]) from error

    async def ask_json(
        self, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
    ) -> Any:
        """Return what a route answers, parsed; None where that is no JSON."""
        page = await self.ask(method, path, body, headers)
        try:
            return parsed_json(page)
        except BrokenReplyError:
            return None

    async def token_ids(
        self,
        body: Mapping[str, Any],
        headers: Mapping[str, str] | None = None,
        rules: CacheRules = DEFAULT_CACHE,
    ) -> list[int]:
        """Return the tokens of a prompt as the engine sees it: vLLM's `/tokenize`.

        Of an SGLang, which tokenizes no chats, those of a call with one token for an answer.
        """
        asked = without(body, "cache_salt")
        if streams_token_ids(rules):
            reply = await self.ask_json("POST", "/tokenize", asked, headers)
            ids = field_of(reply, "tokens")
        else:
            asked |= {"max_tokens": 1, "stream": False, "return_prompt_token_ids": True}
            reply = await self.ask_json("POST", "/v1/chat/completions", asked, headers)
            ids = field_of(reply, "choices", 0, "prompt_token_ids")
        if not isinstance(ids, list) or any(reported_count(one) is None for one in ids):
            raise EngineError(f"the engine at {self.host} returned no tokens", 404)
        return ids

    async def reply(self, protocol: str, arguments: dict[str, Any]) -> AsyncGenerator[bytes]:
        """Yield the reply to one attempt at a completion or a message, as it comes."""
        headers = {**arguments["extra_headers"], "X-Stainless-Raw-Response": "stream"}
        send: Any = self.openai.chat.completions.create
        if protocol == "anthropic":
            send = self._message
        try:  # what happens on the way to the engine is a library's error
            response = await send(**{**arguments, "extra_headers": headers})
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequestError(
                f"the request cannot be made of these arguments: {describe(str(error))}; pass what "
                f"{_TAKEN[protocol]}, as JSON"
            ) from error
        try:
            async for received in response.iter_bytes():
                yield received
        finally:
            await response.close()

    async def _message(
        self, *, extra_body: dict[str, Any], extra_headers: dict[str, str], **fields: Any
    ) -> Any:
        own = {"anthropic-version": _ANTHROPIC_VERSION}
        if isinstance(self._api_key, str):
            own["x-api-key"] = self._api_key
        options: Any = {"headers": {**own, **extra_headers}}
        body = {**fields, **extra_body}
        return await self.openai.post("/messages", cast_to=object, body=body, options=options)

    async def first_model(self) -> str:
        """Return the name of the engine's first model."""
        name = field_of(await self.ask_json("GET", "/v1/models"), "data", 0, "id")
        if not isinstance(name, str) or well_formed(name) != name:  # no request could name it
            raise EngineError(f"the engine at {self.host} names no model; pass model=...")
        return name

    async def salt_field(self) -> str:
        """Return the field by which `/v1/messages` takes a salt, as the engine's docs name it."""
        try:
            page = await self.ask_json("GET", "/openapi.json")
        except EngineError as error:
            if error.status != 404:
                raise
            page = None
        if field_of(page, *_SALT_FIELD) is None:
            raise EngineError(
                f"the engine at {self.host} does not say in /openapi.json that /v1/messages reads "
                "cache_salt, so tenants would share its cache; use protocol='openai', or vLLM 0.32 "
                "with its docs enabled"
            )
        return _SALT_FIELD[-1]

    def error(self, error: BaseException, attempts: int) -> EngineError:
        """Return an EngineError without the message of the cause, which may hold the prompt."""
        status = status_of(error)
        asked_s = retry_after_s(error)
        if status is not None and 300 <= status < 400:
            response: Any = getattr(error, "response", None)
            onward = shown_url(response.headers.get("location", ""))
            return EngineError(
                f"the engine at {self.host} redirects to {onward!r}, and prompts go nowhere unless "
                "you say so: if you trust that address, set base_url to it",
                status,
                attempts,
            )
        what = type(error).__name__ if status is None else f"status {status}"
        kind = getattr(error, "type", None) or getattr(error, "code", None)
        if isinstance(kind, str) and kind.isidentifier() and len(kind) <= _LONGEST_NAME:
            what += f" ({kind})"
        if fault := connection_fault(error):
            what += f", {fault}"
        broken = error if isinstance(error, BrokenReplyError) else error.__cause__
        if isinstance(broken, BrokenReplyError):
            what += f", {broken}"
        if asked_s is not None:
            what += f", it asks to be left alone for {asked_s:.0f} s"
        return EngineError(
            f"the engine at {self.host} did not answer: {what}{SEE_CAUSE}",
            status,
            attempts,
            asked_s,
        )

    async def aclose(self) -> None:
        """Close the connections, unless an `http_client` of the user's has them."""
        if self._users_http is None and self._openai is not None:
            await self._openai.close()


class EngineFact:
    """A text such as a model's name: given, or looked up once for all; after a failure anew."""

    def __init__(self, given: str | None, look_up: Callable[[], Coroutine[Any, Any, str]]) -> None:
        self._known, self._look_up = given, look_up
        self._task: asyncio.Task[str] | None = None

    async def get(self) -> str:
        """Return the text, or raise what the look-up raises."""
        if self._known is None:
            task = self._task
            # a task of an event loop that is gone never ends
            if task is None or task.done() or task.get_loop() is not asyncio.get_running_loop():
                task = self._task = asyncio.create_task(self._look_up())
            self._known = await asyncio.shield(task)  # also if the one who began it is cancelled
        return self._known


class TokenIdCalls:
    """Asks behind answers which tokens prompts had; logs once where an engine tells none."""

    def __init__(self, fail_open: FailOpen) -> None:
        self._fail_open = fail_open
        self._tells_none = False
        self.running = set[Any]()  # futures or tasks

    def start(self, ask: Callable[[], Awaitable[None]], begin: Callable[..., Any]) -> None:
        """Begin to ask, unless the engine tells none, or many questions are open."""
        if not self._tells_none and len(self.running) < _MOST_ASKED:
            running = begin(lambda: self._asked(ask))
            self.running.add(running)
            running.add_done_callback(self.running.discard)

    async def _asked(self, ask: Callable[[], Awaitable[None]]) -> None:
        try:
            await ask()
        except EngineError as error:
            self.note_none(error)
        except Exception as error:
            self._fail_open.note(error)

    def note_none(self, why: object) -> None:
        """Ask no more, because no tokens are told."""
        if not self._tells_none:
            self._tells_none = True
            _log.warning(_NO_IDS, why)


def _checked_address(base_url: object) -> SplitResult:
    parts = None
    with suppress(ValueError):  # a broken IPv6 address
        if isinstance(base_url, str) and well_formed(base_url) == base_url:
            parts = urlsplit(base_url)
    if parts is not None and parts.scheme in ("http", "https") and parts.hostname:
        if parts.query or parts.fragment:
            raise InvalidRequestError(
                f"base_url {shown_url(base_url)!r} must have no query and no fragment, which end "
                "up in logs; give a key as api_key=..., other parameters as http_client="
                "httpx.AsyncClient(params=...)"
            )
        return parts
    raise InvalidRequestError(
        f"base_url must be the engine's address, such as 'http://127.0.0.1:8000/v1', not "
        f"{shown_url(base_url)!r}"
    )


def _basic(parts: SplitResult) -> dict[str, str]:
    user, _, password = parts.netloc.rpartition("@")[0].partition(":")
    if not (user or password):
        return {}
    secret = f"{unquote(user)}:{unquote(password)}".encode()
    return {"authorization": f"Basic {b64encode(secret).decode()}"}


_processes: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # that send with users' clients
_log = logging.getLogger("ctxreuse")
_MOST_ASKED = 1_000
_NO_IDS = (
    "KVEventSync follows none of the requests of this model, because %s: tell it yourself with "
    "KVEventSync.record(plan, token_ids)"
)
_LONGEST_BACKOFF_S = 60.0
_SALT_FIELD = ("components", "schemas", "AnthropicMessagesRequest", "properties", "cache_salt")
_ANTHROPIC_VERSION = "2023-06-01"
_TAKEN = {"openai": "chat.completions.create takes", "anthropic": "Anthropic's messages take"}
_LONGEST_WAIT_S = 600.0
"""What a request without a time limit waits at most, when a server asks for it."""
_LONGEST_NAME = _LONGEST_HEADER = 64
_MOST_CAUSES = 16
SEE_CAUSE: Final = "; the cause says more, and so does the engine's log"
"""How the message of an `EngineError` ends."""


def connection_fault(error: BaseException | None) -> str:
    """Return why no connection came about, as the system names it; "" if it does not say."""
    for _ in range(_MOST_CAUSES):
        if isinstance(error, gaierror):
            return "host not found"
        if isinstance(error, OSError) and error.errno is not None:
            return os.strerror(error.errno).lower()
        if error is None:
            break
        error = error.__cause__ or error.__context__
    return ""


def client_library_errors() -> tuple[type[BaseException], ...]:
    """Return the errors that `openai`, its HTTP library and the reader of a stream raise."""
    import openai

    libraries = http_libraries()
    return (
        openai.OpenAIError,
        BrokenReplyError,
        OSError,  # a connection or TLS fault that no library has mapped
        *(library.HTTPError for library in libraries),
        *(library.StreamError for library in libraries),
    )


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status that an error stands for; None if no answer came."""
    status = getattr(error, "status_code", None)
    return status if isinstance(status, int) else None


def retry_after_s(error: BaseException | None) -> float | None:
    """Return the seconds from 0 that a Retry-After header asks for; None without a usable one."""
    response = getattr(error, "response", None)
    headers = {} if response is None else response.headers
    header = headers.get("retry-after", "")
    if len(header) > _LONGEST_HEADER:
        return None
    try:
        seconds = float(header)
    except ValueError:
        if (until := _timestamp(header)) is None:
            return None
        now = _timestamp(headers.get("date", ""))  # the clock of this machine may be off
        seconds = max(0.0, until - (time.time() if now is None else now))
    return seconds if 0 <= seconds < math.inf else None


def _timestamp(date: str) -> float | None:
    with suppress(ValueError, TypeError, OverflowError, IndexError):
        return parsedate_to_datetime(date[:_LONGEST_HEADER]).timestamp()
    return None


def without(fields: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return fields or headers that have a value, but for some."""
    return {name: one for name, one in fields.items() if one is not None and name not in names}


class StatusRule(NamedTuple):
    """What follows from the status of an answer."""

    again: bool  # the same engine may answer it when it is sent again
    elsewhere: bool  # another engine may answer it


FAILS: Final = StatusRule(True, True)  # after several in a row
BUSY: Final = StatusRule(True, True)  # and left alone for as long as it says
REFUSES: Final = StatusRule(False, True)  # once another engine has answered
WORKS: Final = StatusRule(False, False)  # the request is at fault

_OF_STATUS: Final = {
    **dict.fromkeys((408, 409, 425), FAILS),
    **dict.fromkeys((429, 529), BUSY),
    # the key, or the account; the model, or the path
    **dict.fromkeys((401, 402, 403, 407, 404, 405, 410, 421), REFUSES),
}
_OF_HUNDRED: Final = {3: REFUSES, 4: WORKS}


def status_rule(status: int | None, retry_after_s: float | None = None) -> StatusRule:
    """Return what an HTTP status means; None is no answer, or a broken one."""
    if status == 503 and retry_after_s is not None:
        return BUSY
    known = status or 0
    return _OF_STATUS.get(known) or _OF_HUNDRED.get(known // 100, FAILS)


def http_libraries() -> list[Any]:
    """Return the HTTP libraries that are loaded; `openai` takes clients of either."""
    return [sys.modules[name] for name in ("httpx", "httpx2") if name in sys.modules]


def guarded(http: Any, max_reply_bytes: int) -> Any:
    """Return an HTTP client that sends as another one does, on the same connections.

    What the engine's host answers is not trusted. A redirect would take the prompt and the key
    elsewhere; a reply without an end would take the memory. So redirects are not followed, and a
    reply that is too long, or compressed unasked, breaks.
    """
    library: Any = next(
        (one for one in http_libraries() if isinstance(http, one.AsyncClient)), None
    )
    if library is None:
        return http

    class Bounded(library.AsyncByteStream):  # type: ignore[misc]
        def __init__(self, stream: Any) -> None:
            self._stream = stream

        async def __aiter__(self) -> AsyncIterator[bytes]:
            left = max_reply_bytes
            async for part in self._stream:
                left -= len(part)
                if left < 0:
                    raise BrokenReplyError(f"the reply has more than {max_reply_bytes:,} bytes")
                yield part

        async def aclose(self) -> None:
            await self._stream.aclose()

    class Guarded(library.AsyncClient):  # type: ignore[misc]
        def __init__(self) -> None:
            """Own nothing: settings, cookies and connections are those of the other client."""

        def __getattr__(self, name: str) -> Any:
            return getattr(http, name)

        async def send(self, request: Any, *, stream: bool = False, **options: Any) -> Any:
            request.headers["accept-encoding"] = "identity"
            options["follow_redirects"] = False
            response = await http.send(request, stream=True, **options)
            response.stream = Bounded(response.stream)
            response.encoding = "utf-8"  # Python has codecs that decompress, or decode to bytes
            try:
                if response.headers.get("content-encoding", "identity") != "identity":
                    raise BrokenReplyError(
                        "the reply is compressed although that was not asked for"
                    )
                if not stream:
                    await response.aread()
            except BaseException:
                await response.aclose()
                raise
            return response

        async def aclose(self) -> None:
            await http.aclose()

    return Guarded()
