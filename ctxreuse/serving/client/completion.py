"""An engine's answer to one request, and what it says of the cache."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from ctxreuse.context.reported_usage import ReportedMiss
from ctxreuse.pipeline.engine_options import REQUEST_HEADER


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A model's tool call: `arguments` is its JSON text, and the tool's result refers to `id`."""

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
        cached_tokens: Those that came from the prefix cache; None is unknown, not 0.
        completion_tokens: Tokens of the answer; None if the server reports no usage.
        time_to_first_token_s: Seconds from sending the attempt that succeeded to its first token.
        total_s: Seconds from sending the first attempt to the end of the answer.
        attempts: How often the request was sent.
        prompt_token_ids: The prompt's tokens, if they were asked for and came.
        tool_calls: The tools that the model wants to be called.
        written_tokens: Prompt tokens written into the cache, by time to live ("5m", "1h", ""); None
            is unknown.
        miss: Why the prompt was not read from the cache, as the provider says; None if not asked.
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
    written_tokens: Mapping[str, int] | None = None
    miss: ReportedMiss | None = None


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
    """What an engine's prefix cache must hold of a request that is about to be sent."""

    beginning: bytes | None = None  # a hash; None: too short a prompt to tell
    must_hit: bool = False  # whether a prompt that begins so was answered before


def without(fields: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return fields or headers that have a value, but for some."""
    return {name: one for name, one in fields.items() if one is not None and name not in names}


class CachedTokenReports:
    """Reads the cached tokens that one engine reports."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._has_reported = False
        self._has_warned = False
        self._answered: deque[bytes] = deque(maxlen=_LATEST)

    def expect(self, arguments: Mapping[str, Any]) -> Expectation:
        """Return what must be cached of all that is sent, judged by what was answered so far."""
        is_known = self._has_reported or self._has_warned
        if is_known or len(messages := repr(arguments["messages"])) < _BEGINNING:
            return Expectation()
        # all else counts, too: tools come before the messages, a salt keeps prompts apart
        others = sorted(
            (name, repr(without(one, REQUEST_HEADER, "rid") if isinstance(one, Mapping) else one))
            for name, one in arguments.items()
            if name != "messages"
        )
        text = f"{others!r}{messages[:_BEGINNING]}"
        beginning = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        return Expectation(beginning, beginning in self._answered)

    def read(
        self, expectation: Expectation, prompt_tokens: int | None, cached_tokens: int | None
    ) -> int | None:
        """Return how many tokens of an answered request were cached; None if that is unknown."""
        if cached_tokens is not None:
            self._has_reported = True
            return cached_tokens
        if prompt_tokens is None:
            return None
        # Many versions of vLLM leave the count out where no token was cached. So what is missing is
        # 0 once the engine has reported any, and unknown before.
        if self._has_reported:
            return 0
        if expectation.must_hit and not self._has_warned:
            self._has_warned = True
            _log.warning(_NO_DETAILS, self._host)
        if expectation.beginning is not None:
            self._answered.append(expectation.beginning)
        return None
