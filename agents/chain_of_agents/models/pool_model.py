"""Engines behind OpenAI-compatible addresses, as whoever answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any

from chain_of_agents.models.agent_model import AgentRequest, Reply, ReplyStream
from ctxreuse.errors import InvalidRequestError
from ctxreuse.serving.client.request import check_params
from ctxreuse.serving.pool.engine_pool import EnginePool
from ctxreuse.serving.pool.pool_result import PoolResult


class PoolModel:
    """Engines behind OpenAI-compatible addresses.

    Args:
        pool: The engines.
        params: What each call sends besides: `temperature`, `extra_body`, ...
        owned: Whether the chain has made the pool, and so closes it.
    """

    keeps_connections = False

    def __init__(self, pool: EnginePool, params: Mapping[str, Any], owned: bool) -> None:
        if "max_tokens" in params:
            raise InvalidRequestError(
                "params must not have max_tokens; give note_tokens and answer_tokens"
            )
        check_params(params)
        self._pool = pool
        self._params = dict(params)
        self._owned = owned

    def all_engines(self) -> tuple[str, ...]:
        """Return the names of all replicas."""
        return self._pool.names

    def engines(self) -> tuple[str, ...]:
        """Return the names of the replicas that may be sent something."""
        return self._pool.available()

    def generation(self, engine: str) -> int:
        """Return how often a replica has been found with an empty cache."""
        return self._pool.generation(engine)

    async def context_window(self) -> int | None:
        """Return what the engines say."""
        return await self._pool.context_window()

    async def ask(self, ask: AgentRequest) -> Reply:
        """Send a call to the agent's replica, or where the pool sends it."""
        return _reply(await self._pool.complete(ask.request, **self._arguments(ask)))

    async def stream(self, ask: AgentRequest, into: ReplyStream) -> AsyncGenerator[str]:
        """Yield the answer's pieces."""
        async with self._pool.stream(ask.request, **self._arguments(ask)) as pieces:
            async for piece in pieces:
                yield piece
            into.reply = _reply(pieces.served)

    async def disconnect(self) -> None:
        """Close the connections of the running event loop."""
        await self._pool.disconnect()

    async def aclose(self) -> None:
        """Close the pool, if it is the chain's own."""
        if self._owned:
            await self._pool.aclose()

    def _arguments(self, ask: AgentRequest) -> dict[str, Any]:
        return {
            "replica": ask.replica,
            "session_id": ask.session_id,
            "limit_s": ask.limit_s,
            "max_tokens": ask.max_tokens,
            **self._params,
        }


def _reply(served: PoolResult) -> Reply:
    completion = served.completion
    return Reply(
        text=completion.text,
        plan=served.plan,
        replica=served.replica,
        prompt_tokens=completion.prompt_tokens,
        cached_tokens=completion.cached_tokens,
        completion_tokens=completion.completion_tokens,
    )
