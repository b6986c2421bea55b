"""What a missing number of cached tokens means: none were cached, or the engine does not tell."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

_log = logging.getLogger("ctxreuse")
_BEGINNING = 4_096  # characters of messages: longer than an engine's cache block is, in any text
_LATEST = 16
_NO_DETAILS = (
    "%s reports no cached tokens even for a prompt that begins like one that it has just answered, "
    "so they are unknown, not 0: start vLLM with --enable-prompt-tokens-details, and with prefix "
    "caching"
)


@dataclass(frozen=True, slots=True)
class Expectation:
    """What an engine's prefix cache must hold of a request that is about to be sent.

    Attributes:
        beginning: A hash of what it begins with; None for a prompt that is too short to tell.
        must_hit: Whether a request that begins so was answered just before.
    """

    beginning: bytes | None = None
    must_hit: bool = False


class CachedTokenReports:
    """Reads the cached tokens that one engine reports.

    Many versions of vLLM leave `prompt_tokens_details` out where no token was cached (`if
    self.enable_prompt_tokens_details and num_cached_tokens`), so the first, cold prompts look as if
    the option were off. Once the engine has reported any, what is missing is 0. Before that it is
    unknown. The option is certainly off only when a prompt that must have hit comes back without:
    this is logged, once.

    Args:
        host: What the log line calls the engine.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._has_reported = False
        self._has_warned = False
        self._answered: deque[bytes] = deque(maxlen=_LATEST)

    def expect(self, arguments: Mapping[str, Any]) -> Expectation:
        """Return what must be cached of a request, judged by those answered so far.

        Args:
            arguments: All that is sent.
        """
        if self._has_reported or self._has_warned:
            return Expectation()
        messages = repr(arguments["messages"])
        if len(messages) < _BEGINNING:
            return Expectation()
        # all else counts, too: tools come before the messages, a salt keeps prompts apart
        others = sorted((name, repr(arguments[name])) for name in arguments if name != "messages")
        text = f"{others!r}{messages[:_BEGINNING]}"
        beginning = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        return Expectation(beginning, beginning in self._answered)

    def read(
        self, expectation: Expectation, prompt_tokens: int | None, cached_tokens: int | None
    ) -> int | None:
        """Return how many tokens of an answered request were cached; None if that is unknown.

        Args:
            expectation: What was expected when it was sent.
            prompt_tokens: The reported length of its prompt; None without usage.
            cached_tokens: What was reported.
        """
        if cached_tokens is not None:
            self._has_reported = True
            return cached_tokens
        if prompt_tokens is None:
            return None
        if self._has_reported:
            return 0
        if expectation.must_hit and not self._has_warned:
            self._has_warned = True
            _log.warning(_NO_DETAILS, self._host)
        if expectation.beginning is not None:
            self._answered.append(expectation.beginning)
        return None
