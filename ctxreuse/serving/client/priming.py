"""Primes: calls that end at a fork, so that an engine that keeps states there can read it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from uuid import uuid4

from ctxreuse.cache.simulator import CacheUsage
from ctxreuse.context.reported_usage import ReportedTokens, usage_of
from ctxreuse.errors import EngineError
from ctxreuse.rules.cache_rules import CacheRules
from ctxreuse.serving.client.connection import EngineConnection, without
from ctxreuse.serving.client.reply import field_of

_log = logging.getLogger("ctxreuse")
_NO_ROUTE = frozenset({404, 405, 501})
_REFUSED = frozenset({400, 422})
_OPEN = {"add_generation_prompt": False, "continue_final_message": True}
_FAILED = "a prime was not answered, so what shares its beginning is computed without it: %s"

Messages = Sequence[Mapping[str, Any]]


class PrimeCall(NamedTuple):
    """A call to be sent before another one, up to where later prompts part from that."""

    whole: Messages  # the prompt of the other one
    front: Messages  # its beginning: the last message ends at the fork
    rules: CacheRules  # it ends at a multiple of their block
    fields: Mapping[str, Any]  # what the other one has besides messages: model, tools, salt
    headers: Mapping[str, str]


class Primer:
    """Sends primes to one engine, by token ids; a failed one costs itself only."""

    def __init__(self, connection: EngineConnection) -> None:
        self.connection = connection
        self._has_worked = self._is_refused = self._has_failed = False

    async def send_all(self, primes: Iterable[PrimeCall]) -> list[CacheUsage]:
        """Send a prompt's primes, one after the other; return the tokens of those answered."""
        answers = list[CacheUsage]()
        for prime in primes:
            if self._is_refused:  # the engine is not asked any more
                break
            try:
                answers += await self._send(prime)
                self._has_worked = True
            except EngineError as error:
                is_refused = error.status in _REFUSED and not self._has_worked
                self._is_refused |= is_refused or error.status in _NO_ROUTE
                if not self._has_failed:
                    self._has_failed = True
                    _log.warning(_FAILED, error)
        return answers

    async def _send(self, prime: PrimeCall) -> list[CacheUsage]:
        """Send a prime; return its tokens, none where the fork is in the engine's first block."""
        ids = await self._ids(prime, prime.whole)
        begun = await self._ids(prime, prime.front, **_OPEN)
        pairs = enumerate(zip(ids, begun, strict=False))
        fork = next((n for n, (one, other) in pairs if one != other), min(len(ids), len(begun)))
        end = prime.rules.readable(fork)
        if not end:
            return []
        # one token more: of a prompt, an engine keeps the state before its last token
        own = {"prompt": ids[: end + 1], "max_tokens": 1, "request_id": f"prime-{uuid4().hex}"}
        body = {**without(prime.fields, "tools"), **own}
        reply = await self.connection.ask_json("POST", "/v1/completions", body, prime.headers)
        usage = usage_of(field_of(reply, "usage")) or ReportedTokens()
        return [CacheUsage(usage.prompt_tokens or 0, usage.cached_tokens or 0)]

    async def _ids(self, prime: PrimeCall, messages: Messages, **more: bool) -> list[int]:
        body = {**prime.fields, **more, "messages": [*messages]}
        return await self.connection.token_ids(body, prime.headers)
