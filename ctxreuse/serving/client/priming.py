"""Primes: calls that end at a fork, so that an engine that keeps states there can read it."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias
from uuid import uuid4

from ctxreuse.cache.simulator import CacheUsage
from ctxreuse.context.reported_usage import usage_of
from ctxreuse.errors import EngineError
from ctxreuse.rules.cache_rules import CacheRules
from ctxreuse.serving.client.connection import EngineConnection
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


_Way: TypeAlias = Callable[[PrimeCall], Awaitable[CacheUsage | None]]


class Primer:
    """Sends primes to one engine, in the way that it takes; a failed one costs itself only."""

    def __init__(self, connection: EngineConnection) -> None:
        self.connection = connection
        # token ids are exact; a chat call whose last message stays open nearly is
        self._ways: list[_Way] = [self._by_ids, self._by_chat]
        self._works: set[_Way] = set()
        self._has_failed = False

    async def send_all(self, primes: Iterable[PrimeCall]) -> list[CacheUsage]:
        """Send a prompt's primes, one after the other; return the tokens of those answered."""
        answers = [await self._send(prime) for prime in primes]
        return [usage for usage in answers if usage is not None]

    async def _send(self, prime: PrimeCall) -> CacheUsage | None:
        """Send a prime; None if that failed, or where the fork is in the engine's first block."""
        failure: EngineError | None = None
        for way in list(self._ways):
            try:
                usage = await way(prime)
            except EngineError as error:
                failure = error
                is_refused, has_no_route = error.status in _REFUSED, error.status in _NO_ROUTE
                if (has_no_route or (is_refused and way not in self._works)) and way in self._ways:
                    self._ways.remove(way)  # it is not asked so any more
                if not (is_refused or has_no_route):
                    break
            else:
                self._works.add(way)
                return usage
        if failure is not None and not self._has_failed:
            self._has_failed = True
            _log.warning(_FAILED, failure)
        return None

    async def _by_ids(self, prime: PrimeCall) -> CacheUsage | None:
        ids = await self._ids(prime, prime.whole)
        begun = await self._ids(prime, prime.front, **_OPEN)
        pairs = enumerate(zip(ids, begun, strict=False))
        fork = next((n for n, (one, other) in pairs if one != other), min(len(ids), len(begun)))
        end = prime.rules.readable(fork)
        if not end:
            return None
        # one token more: of a prompt, an engine keeps the state before its last token
        body = {name: one for name, one in prime.fields.items() if name != "tools"}
        return await self._call(prime, "/v1/completions", {**body, "prompt": ids[: end + 1]})

    async def _ids(self, prime: PrimeCall, messages: Messages, **more: bool) -> list[int]:
        body = {**prime.fields, **more, "messages": [*messages]}
        return await self.connection.token_ids(body, prime.headers)

    async def _by_chat(self, prime: PrimeCall) -> CacheUsage | None:
        body = {**prime.fields, **_OPEN, "messages": [*prime.front]}
        return await self._call(prime, "/v1/chat/completions", body)

    async def _call(self, prime: PrimeCall, route: str, body: dict[str, Any]) -> CacheUsage:
        own = {"max_tokens": 1, "request_id": f"prime-{uuid4().hex}"}
        reply = await self.connection.ask_json("POST", route, {**body, **own}, prime.headers)
        usage = usage_of(field_of(reply, "usage"))
        tokens = 0 if usage is None else usage.prompt_tokens or 0
        return CacheUsage(tokens, 0 if usage is None else usage.cached_tokens or 0)
