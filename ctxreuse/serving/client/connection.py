"""The way to one engine: its address, retries, and errors in our words."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ctxreuse.errors import EngineError, InvalidRequestError, MissingExtraError, describe
from ctxreuse.serving.client.transient_errors import (
    client_library_errors,
    is_transient,
    status_of,
    waiting,
)

if TYPE_CHECKING:
    from openai import AsyncOpenAI


class EngineConnection:
    """Asks one engine, and asks again what failed for the moment.

    Args:
        base_url: The engine's address, with or without `/v1`.
        api_key: Its key.
        http_client: An `httpx.AsyncClient`, which its owner closes; None makes one.
        retries: How often a request is sent again.
        backoff_s: Longest wait before the first retry, in seconds; it doubles with each.
        timeout_s: Seconds without a sign of the engine after which an attempt has failed.

    Attributes:
        host: The engine's host and port, for messages: without a password.
        openai: The client of the `openai` package; it makes one attempt.

    Raises:
        InvalidRequestError: If an argument is of the wrong kind.
        MissingExtraError: If `openai` or `tenacity` is not installed.
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
        if not isinstance(retries, int) or retries < 0:
            raise InvalidRequestError(f"retries must be an integer from 0, not {describe(retries)}")
        self._root = _root_of(base_url)
        self.host = urlsplit(self._root).netloc.rpartition("@")[2]
        self.openai = _openai_client(f"{self._root}/v1", api_key, http_client, timeout_s)
        self._owns_http = http_client is None
        self._retries = retries
        self._backoff_s = backoff_s

    def attempts(self) -> Any:
        """Return tenacity's attempts at one request."""
        from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt

        return AsyncRetrying(
            stop=stop_after_attempt(self._retries + 1),
            wait=waiting(self._backoff_s),
            retry=retry_if_exception(is_transient),
            reraise=True,
        )

    async def ask(self, method: str, path: str, body: object = None) -> str:
        """Return what a route outside the completions answers.

        Raises:
            EngineError: If it does not.
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
            EngineError: If the engine does not say.
        """
        page = await self.ask("GET", "/v1/models")
        try:
            name = json.loads(page)["data"][0]["id"]
        except (ValueError, TypeError, LookupError):
            name = None
        if not isinstance(name, str):
            raise EngineError(f"the engine at {self.host} names no model; pass model=...")
        return name

    async def max_model_len(self) -> int | None:
        """Return what the engine's first model holds; None if the engine does not say.

        Raises:
            EngineError: If the engine does not answer.
        """
        page = await self.ask("GET", "/v1/models")
        try:
            length = json.loads(page)["data"][0]["max_model_len"]
        except (ValueError, TypeError, LookupError):
            return None
        return length if isinstance(length, int) and length > 0 else None

    def error(self, error: BaseException, attempts: int) -> EngineError:
        """Return our error for a foreign one, without its message, which may hold the prompt.

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
        """Close the connections, unless they are those of somebody's `http_client`."""
        if self._owns_http:
            await self.openai.close()


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
