"""The calls that a wrapper makes of its own to the engine of the model that it wraps."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from weakref import finalize

from ctxreuse.cache.prompt_ends import ends_in_texts
from ctxreuse.cache.simulator import CacheUsage
from ctxreuse.context.fail_open import FailOpen
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.pipeline.engine_options import engine_address
from ctxreuse.pipeline.prompt_turn import PlannedPrompt, Wire
from ctxreuse.rules.cache_rules import CacheRules
from ctxreuse.serving.aio import sync_bridge
from ctxreuse.serving.client.connection import EngineConnection, TokenIdCalls
from ctxreuse.serving.client.priming import PrimeCall, Primer

_TIMEOUT_S = 60.0
_MOST_BYTES = 2**26


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
