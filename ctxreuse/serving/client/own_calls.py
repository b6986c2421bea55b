"""The calls beside those of users: primes, and what a wrapper asks its model's engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from uuid import uuid4
from weakref import finalize

from ctxreuse.cache.prompt_ends import ends_in_texts
from ctxreuse.cache.simulator import CacheUsage
from ctxreuse.context.fail_open import FailOpen
from ctxreuse.context.reported_usage import ReportedTokens, usage_of
from ctxreuse.errors import EngineError, InvalidRequestError, describe
from ctxreuse.pipeline.engine_options import engine_address
from ctxreuse.pipeline.prompt_turn import PlannedPrompt, Wire
from ctxreuse.rules.cache_rules import CacheRules
from ctxreuse.serving.aio import sync_bridge
from ctxreuse.serving.client.connection import EngineConnection, TokenIdCalls, without
from ctxreuse.serving.client.reply import field_of

_log = logging.getLogger("ctxreuse")
_TIMEOUT_S = 60.0
_MOST_BYTES = 2**26
_NO_ROUTE = frozenset({404, 405, 501})
_REFUSED = frozenset({400, 422})
_OPEN = {"add_generation_prompt": False, "continue_final_message": True}
_FAILED = "a prime was not answered, so what shares its beginning is computed without it: %s"

Messages = Sequence[Mapping[str, Any]]


class PrimeCall(NamedTuple):
    """A call before another one, up to where later prompts part, so that a state is kept there."""

    whole: Messages  # the prompt of the other one
    front: Messages  # its beginning: the last message ends at the fork
    rules: CacheRules  # it ends at a multiple of their block
    fields: Mapping[str, Any]  # what the other one has besides messages: model, tools, salt
    headers: Mapping[str, str]


class Primer:
    """Sends primes to one engine, in the way that it takes; a failed one costs itself only."""

    def __init__(self, connection: EngineConnection) -> None:
        self.connection = connection
        # token ids are exact; a chat call whose last message stays open nearly is
        self._ways = [self._by_ids, self._by_chat]
        self._has_worked = set[object]()
        self._has_failed = False

    async def send_all(self, primes: Iterable[PrimeCall]) -> list[CacheUsage]:
        """Send a prompt's primes, one after the other; return the tokens of those answered."""
        return [usage for prime in primes for usage in await self._send(prime)]

    async def _send(self, prime: PrimeCall) -> list[CacheUsage]:
        failure: EngineError | None = None
        for way in [*self._ways]:
            try:
                usage = await way(prime)
                self._has_worked.add(way)
                return usage
            except EngineError as error:
                failure = error
                is_refused = error.status in _REFUSED
                if error.status in _NO_ROUTE or (is_refused and way not in self._has_worked):
                    self._ways = [one for one in self._ways if one != way]  # not asked any more
                elif not is_refused:
                    break
        if failure is not None and not self._has_failed:
            self._has_failed = True
            _log.warning(_FAILED, failure)
        return []

    async def _by_ids(self, prime: PrimeCall) -> list[CacheUsage]:
        """Send a prime; return its tokens, none where the fork is in the engine's first block."""
        ids = await self._ids(prime, prime.whole)
        begun = await self._ids(prime, prime.front, **_OPEN)
        pairs = enumerate(zip(ids, begun, strict=False))
        fork = next((n for n, (one, other) in pairs if one != other), min(len(ids), len(begun)))
        end = prime.rules.readable(fork)
        if not end:
            return []
        # one token more: of a prompt, an engine keeps the state before its last token
        body = {**without(prime.fields, "tools"), "prompt": ids[: end + 1]}
        return await self._call(prime, "/v1/completions", body)

    async def _by_chat(self, prime: PrimeCall) -> list[CacheUsage]:
        body = {**prime.fields, **_OPEN, "messages": [*prime.front]}
        return await self._call(prime, "/v1/chat/completions", body)

    async def _call(self, prime: PrimeCall, route: str, body: dict[str, Any]) -> list[CacheUsage]:
        body |= {"max_tokens": 1, "request_id": f"prime-{uuid4().hex}"}
        reply = await self.connection.ask_json("POST", route, body, prime.headers)
        usage = usage_of(field_of(reply, "usage")) or ReportedTokens()
        return [CacheUsage(usage.prompt_tokens or 0, usage.cached_tokens or 0)]

    async def _ids(self, prime: PrimeCall, messages: Messages, **more: bool) -> list[int]:
        body = {**prime.fields, **more, "messages": [*messages]}
        return await self.connection.token_ids(body, prime.headers)


class OwnCalls:
    """Asks one engine, outside of callbacks and response caches; a fault costs only itself."""

    def __init__(self, address: str, key: str, rules: CacheRules) -> None:
        self._made_with = address, key, rules
        self._rules = rules
        self._fail_open = FailOpen("calls beside a model", "the model is called all the same")
        self._primer: Primer | None = None
        self._token_ids = TokenIdCalls(self._fail_open)

    def __reduce__(self) -> tuple[Any, ...]:
        return OwnCalls, self._made_with

    @classmethod
    def beside(cls, model: object, rules: CacheRules, *, primes: bool) -> OwnCalls | None:
        """Return what asks the engine of a framework's model; None if it names none."""
        if primes and (rules.lives or not rules.takes_primes):
            raise InvalidRequestError(
                "prime=True is for engines of your own that keep states at junctions, and "
                f"{rules.name!r} is no rule of one; pass planner="
                'ReusePlanner(cache="vllm(states=junctions, block_tokens=...)")'
            )
        address, key = engine_address(model)
        if primes and not address:
            raise InvalidRequestError(
                f"prime=True sends calls of its own, and {describe(model)} names no engine; wrap "
                "one with an address, such as ChatOpenAI(base_url=...) or OpenAILike(api_base=...)"
            )
        return cls(address, key, rules) if address else None

    async def prime(
        self, planned: PlannedPrompt, wire: Wire, *, blocks: bool
    ) -> Sequence[CacheUsage]:
        """Send a prompt's primes; return the tokens of those that were answered."""
        if blocks:
            return sync_bridge.run(lambda: self._prime(planned, wire), lasting=True)
        return await asyncio.wrap_future(sync_bridge.started(lambda: self._prime(planned, wire)))

    async def _prime(self, planned: PlannedPrompt, wire: Wire) -> Sequence[CacheUsage]:
        try:
            sent, calls = wire(planned), list[PrimeCall]()
            for fork in planned.forks:
                place, text = sent.places[fork.part], planned.texts[fork.part]
                content = None if place is None else sent.messages[place].get("content")
                if place is not None and isinstance(content, str) and text in content:
                    begun = content[: content.index(text) + fork.characters]
                    front = [*sent.messages[:place], {**sent.messages[place], "content": begun}]
                    beside = self._rules, sent.fields, sent.headers
                    calls.append(PrimeCall(sent.messages, front, *beside))
            return await self._connected().send_all(calls)
        except Exception as error:
            self._fail_open.note(error)
            return ()

    def _connected(self) -> Primer:
        if self._primer is None:
            address, key, _ = self._made_with
            connection = EngineConnection(address, key, None, 0, 0.5, _TIMEOUT_S, _MOST_BYTES)
            self._primer = Primer(connection)
            # nobody closes a wrapper
            finalize(self, sync_bridge.started, connection.aclose).atexit = False
        return self._primer

    def follow(self, planned: PlannedPrompt, follower: Any) -> None:
        """Find out in the background which tokens a prompt had, and tell a follower."""
        self._token_ids.start(lambda: self._follow(planned, follower), sync_bridge.started)

    async def _follow(self, planned: PlannedPrompt, follower: Any) -> None:
        assert planned.wire is not None
        sent = planned.wire(planned)
        body = {**sent.fields, "messages": [*sent.messages]}
        ids = await self._connected().connection.token_ids(body, sent.headers, self._rules)
        for plan in planned.plans:
            texts = [block.text for block in plan.blocks]
            ends = ends_in_texts(texts, planned.texts, len(ids))
            follower.record(plan, ids, ends, cache_salt=sent.fields.get("cache_salt"))
