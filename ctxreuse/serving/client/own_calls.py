"""The calls that a wrapper makes of its own to the engine of the model that it wraps."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from ctxreuse.cache.simulator import CacheUsage
from ctxreuse.context.fail_open import FailOpen
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.pipeline.environment import engine_address
from ctxreuse.rules.cache_rules import CacheRules
from ctxreuse.serving.aio import sync_bridge
from ctxreuse.serving.client.connection import EngineConnection
from ctxreuse.serving.client.priming import PrimeCall, Primer

_TIMEOUT_S = 60.0
_MOST_BYTES = 2**26


class OwnCalls:
    """Sends primes to one engine, outside of callbacks and response caches; faults cost themselves.

    Args:
        address: The engine's.
        key: Its key.
    """

    def __init__(self, address: str, key: str) -> None:
        self._made_with = address, key
        self._fail_open = FailOpen("primes", "prompts are sent without them", work="sending")
        connection = EngineConnection(address, key, None, 0, 0.5, _TIMEOUT_S, _MOST_BYTES)
        self._primer = Primer(connection)

    def __reduce__(self) -> tuple[Any, ...]:
        return OwnCalls, self._made_with

    @classmethod
    def beside(cls, model: object, rules: CacheRules) -> OwnCalls:
        """Return what sends primes to the engine of a framework's model.

        Raises:
            InvalidRequestError: the model has no address, or the rules take no primes.
        """
        if not rules.takes_primes:
            raise InvalidRequestError(
                f"prime=True is for engines that keep states at junctions, and {rules.name!r} is "
                'none; pass planner=ReusePlanner(cache=vllm(states="junctions", block_tokens=...))'
            )
        address, key = engine_address(model)
        if not address:
            raise InvalidRequestError(
                f"prime=True sends calls of its own, and {describe(model)} names no engine; wrap "
                "one with an address, such as ChatOpenAI(base_url=...) or OpenAILike(api_base=...)"
            )
        return cls(address, key)

    def prime(self, primes: Sequence[PrimeCall]) -> list[CacheUsage]:
        """Send a prompt's primes; return the tokens of those that were answered."""
        return sync_bridge.run(lambda: self._prime(primes), lasting=True)

    async def aprime(self, primes: Sequence[PrimeCall]) -> list[CacheUsage]:
        """`prime`, awaited in any event loop."""
        return await asyncio.wrap_future(sync_bridge.started(lambda: self._prime(primes)))

    async def _prime(self, primes: Sequence[PrimeCall]) -> list[CacheUsage]:
        try:
            return await self._primer.send_all(primes)
        except Exception as error:
            self._fail_open.note(error)
            return []
