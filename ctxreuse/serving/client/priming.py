"""Primes: calls that end at a fork, so that an engine that keeps states there can read it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from ctxreuse.cache.simulator import CacheUsage
from ctxreuse.context.checks import reported_count
from ctxreuse.context.reported_usage import usage_of
from ctxreuse.errors import EngineError
from ctxreuse.rules.cache_rules import CacheRules
from ctxreuse.serving.client.connection import EngineConnection
from ctxreuse.serving.client.reply import field_of

_log = logging.getLogger("ctxreuse")
_NOT_TAKEN = frozenset({400, 404, 405, 422, 501})
_OPEN = {"add_generation_prompt": False, "continue_final_message": True}

Messages = Sequence[Mapping[str, Any]]


class Primer:
    """Sends primes to one engine, in the way that it takes; a failed one costs itself only."""

    def __init__(self, connection: EngineConnection) -> None:
        self._connection = connection
        # token ids are exact; a chat call whose last message stays open nearly is
        self._ways = [self._by_ids, self._by_chat]
        self.faults = 0

    async def send(
        self, whole: Messages, front: Messages, rules: CacheRules, fields: Mapping[str, Any]
    ) -> CacheUsage | None:
        """Send a prompt's front, whose last message ends at the fork; None if that failed.

        A prime ends at a multiple of the rules' block. `fields` are model, tools and salt.
        """
        while self._ways:
            way = self._ways[0]
            try:
                return await way(whole, front, rules, fields)
            except EngineError as error:
                self.faults += 1
                if error.status not in _NOT_TAKEN:
                    return None
                if way not in self._ways:  # another call has found that out
                    continue
                self._ways.remove(way)
                if not self._ways:
                    _log.warning(
                        "primes are not sent to %s any more: %s", self._connection.host, error
                    )
        return None

    async def _by_ids(
        self, whole: Messages, front: Messages, rules: CacheRules, fields: Mapping[str, Any]
    ) -> CacheUsage | None:
        ids = await self._ids(whole, fields)
        begun = await self._ids(front, {**fields, **_OPEN})
        pairs = enumerate(zip(ids, begun, strict=False))
        fork = next((n for n, (one, other) in pairs if one != other), min(len(ids), len(begun)))
        end = rules.readable(fork)
        if not end:
            return None
        # one token more: of a prompt, an engine keeps the state before its last token
        body = {name: one for name, one in fields.items() if name != "tools"}
        return await self._prime("/v1/completions", {**body, "prompt": ids[: end + 1]})

    async def _ids(self, messages: Messages, fields: Mapping[str, Any]) -> list[int]:
        asked = {name: one for name, one in fields.items() if name != "cache_salt"}
        reply = await self._connection.ask_json(
            "POST", "/tokenize", {**asked, "messages": [*messages]}
        )
        ids = field_of(reply, "tokens")
        if not isinstance(ids, list) or any(reported_count(one) is None for one in ids):
            raise EngineError(f"the engine at {self._connection.host} returned no tokens", 404)
        return ids

    async def _by_chat(
        self, whole: Messages, front: Messages, rules: CacheRules, fields: Mapping[str, Any]
    ) -> CacheUsage | None:
        body = {**fields, **_OPEN, "messages": [*front]}
        return await self._prime("/v1/chat/completions", body)

    async def _prime(self, route: str, body: dict[str, Any]) -> CacheUsage:
        own = {"max_tokens": 1, "request_id": f"prime-{uuid4().hex}"}
        reply = await self._connection.ask_json("POST", route, {**body, **own})
        usage = usage_of(field_of(reply, "usage"))
        tokens = 0 if usage is None else usage.prompt_tokens or 0
        return CacheUsage(tokens, 0 if usage is None else usage.cached_tokens or 0)
