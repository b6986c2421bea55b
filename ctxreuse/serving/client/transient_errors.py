"""Which errors are transient, so that sending the request again may help; how long to wait."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from typing import Any

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
