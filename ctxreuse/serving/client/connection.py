"""The connection to one engine: its address, its errors, and which of them are worth a retry."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ctxreuse.context.checks import checked_integer
from ctxreuse.errors import EngineError, InvalidRequestError, MissingExtraError, describe

if TYPE_CHECKING:
    from openai import AsyncOpenAI


class EngineConnection:
    """Sends requests to one engine, and sends again what may succeed then.

    The arguments are those of `EngineClient`.

    Attributes:
        host: The engine's host and port, for messages: without a password.
        openai: The client of the `openai` package; it makes one attempt.

    Raises:
        InvalidRequestError: wrong type or out of range.
        MissingExtraError: `openai` or `tenacity` is not installed.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str,
        http_client: Any,
        retries: int,
        backoff_s: float,
        timeout_s: float | None,
    ) -> None:
        if not isinstance(base_url, str) or urlsplit(base_url).scheme not in ("http", "https"):
            raise InvalidRequestError(
                f"base_url must be the engine's address, such as 'http://127.0.0.1:8000/v1', not "
                f"{describe(base_url)}"
            )
        self._root = base_url.rstrip("/").removesuffix("/v1")
        self.host = urlsplit(self._root).netloc.rpartition("@")[2]
        self.openai = _openai_client(f"{self._root}/v1", api_key, http_client, timeout_s)
        self._owns_http = http_client is None
        self._retries = checked_integer("retries", retries)
        self._wait = waiting(backoff_s)

    def attempts(self) -> Any:
        """Return tenacity's attempts at one request."""
        from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt

        return AsyncRetrying(
            stop=stop_after_attempt(self._retries + 1),
            wait=self._wait,
            retry=retry_if_exception(is_transient),
            reraise=True,
        )

    async def ask(self, method: str, path: str, body: object = None) -> str:
        """Return what a route outside the completions answers.

        Raises:
            EngineError: the engine does not answer.
        """
        attempts = 0
        try:
            async for attempt in self.attempts():
                with attempt:
                    attempts += 1
                    url = self._root + path
                    if method == "GET":
                        return await self.openai.get(url, cast_to=str)
                    return await self.openai.post(url, cast_to=str, body=body)
        except client_library_errors() as error:
            raise self.error(error, attempts) from error
        raise AssertionError("tenacity makes at least one attempt")

    async def first_model(self) -> str:
        """Return the name of the engine's first model.

        Raises:
            EngineError: the engine does not tell.
        """
        name = await self._of_first_model("id")
        if not isinstance(name, str):
            raise EngineError(f"the engine at {self.host} names no model; pass model=...")
        return name

    async def max_model_len(self) -> int | None:
        """Return what the engine's first model holds; None if the engine does not tell.

        Raises:
            EngineError: the engine does not answer.
        """
        length = await self._of_first_model("max_model_len")
        return length if isinstance(length, int) and length > 0 else None

    async def _of_first_model(self, field: str) -> object:
        page = await self.ask("GET", "/v1/models")
        try:
            return json.loads(page)["data"][0][field]
        except (ValueError, TypeError, LookupError):
            return None

    def error(self, error: BaseException, attempts: int) -> EngineError:
        """Return an EngineError without the message of the cause, which may hold the prompt.

        Args:
            error: One of `client_library_errors()`.
            attempts: How often the request was sent.
        """
        status = status_of(error)
        what = type(error).__name__ if status is None else f"status {status}"
        kind = getattr(error, "type", None) or getattr(error, "code", None)
        detail = f" ({kind})" if isinstance(kind, str) and kind.isidentifier() else ""
        return EngineError(
            f"the engine at {self.host} did not answer: {what}{detail}, attempts: {attempts}; "
            "the cause says more, and so does the engine's log",
            status,
            attempts,
        )

    async def aclose(self) -> None:
        """Close the connections, unless an `http_client` of the user's has them."""
        if self._owns_http:
            await self.openai.close()


class ModelName:
    """A model's name: one that is given, or what a look-up finds.

    Callers that wait at the same time share one look-up and its outcome, a failure included: at an
    engine that is down no caller waits for the retries of others. After a failure the next caller
    looks it up again.

    Args:
        name: The name; None looks it up.
        look_up: Asks for it.
    """

    def __init__(self, name: str | None, look_up: Callable[[], Awaitable[str]]) -> None:
        self._name = name
        self._look_up = look_up
        self._task: asyncio.Task[None] | None = None

    async def get(self) -> str:
        """Return the name, or raise what the look-up raises."""
        while self._name is None:
            task = self._task
            # a task of an event loop that is gone never ends
            if task is None or task.done() or task.get_loop() is not asyncio.get_running_loop():
                task = self._task = asyncio.create_task(self._find())
            await asyncio.shield(task)  # a cancelled caller does not cancel it for the others
        return self._name

    async def _find(self) -> None:
        self._name = await self._look_up()


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


_TRANSIENT_STATUS = frozenset({408, 409, 425, 429})
_LONGEST_WAIT_S = 60.0
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


class BrokenReplyError(Exception):
    """A stream ended before the answer did, or does not hold what the protocol says."""


def client_library_errors() -> tuple[type[BaseException], ...]:
    """Return the errors that `openai`, its HTTP library and the reader of a stream raise."""
    import openai

    libraries = [sys.modules[name] for name in ("httpx", "httpx2") if name in sys.modules]
    return (
        openai.OpenAIError,
        BrokenReplyError,
        OSError,  # a connection or TLS fault that no library has mapped
        json.JSONDecodeError,
        UnicodeDecodeError,
        *(library.HTTPError for library in libraries),
        *(library.StreamError for library in libraries),
    )


def is_transient(error: BaseException) -> bool:
    """Return whether a request that failed so may succeed when it is sent again.

    Broken connections, timeouts, 408, 409, 425, 429 and 5xx are transient; other statuses are not.
    """
    status = status_of(error)
    return isinstance(error, client_library_errors()) if status is None else is_retryable(status)


def is_retryable(status: int | None) -> bool:
    """Return whether a request with this outcome may succeed when it is sent again.

    Args:
        status: The HTTP status; None if no answer came at all.
    """
    return status is None or status in _TRANSIENT_STATUS or status >= 500


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status that an error stands for; None if no answer came."""
    status = getattr(error, "status_code", None)
    return status if isinstance(status, int) else None


def waiting(backoff_s: float) -> Callable[[Any], float]:
    """Return how long tenacity waits: exponentially with jitter, or what the server asks for.

    Args:
        backoff_s: Longest wait after the first attempt; it doubles with each.
    """
    from tenacity import wait_random_exponential

    grow = wait_random_exponential(multiplier=backoff_s, max=_LONGEST_WAIT_S)

    def wait(state: Any) -> float:
        asked = _retry_after(state.outcome.exception())
        return grow(state) if asked is None else asked

    return wait


def _retry_after(error: BaseException | None) -> float | None:
    """Return the seconds in a Retry-After header; a date counts as none."""
    response = getattr(error, "response", None)
    header = "" if response is None else response.headers.get("retry-after", "")
    return min(float(header), _LONGEST_WAIT_S) if _SECONDS.fullmatch(header) else None
