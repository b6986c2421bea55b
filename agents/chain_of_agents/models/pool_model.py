"""AgentModel backed by engines behind OpenAI-compatible addresses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from langchain_core.runnables import RunnableConfig

from chain_of_agents.models.agent_model import AgentReply, AgentRequest, OnPiece
from ctxreuse.errors import InvalidRequestError
from ctxreuse.serving.client.request import check_params
from ctxreuse.serving.pool.engine_pool import EnginePool


class PoolModel:
    """AgentModel backed by an `EnginePool`.

    Args:
        pool: The engines.
        params: Sent with each request: `temperature`, `extra_body`, ...
        owned: Whether the chain has made the pool, and so closes it.
    """

    keeps_connections = False

    def __init__(self, pool: EnginePool, params: Mapping[str, Any], owned: bool) -> None:
        if "max_tokens" in params:
            raise InvalidRequestError(
                "params must not have max_tokens; give note_tokens and answer_tokens"
            )
        check_params(params)
        self.engines = pool
        self._params = dict(params)
        self._owned = owned

    async def context_window(self) -> int | None:
        """Return what the engines say."""
        return await self.engines.context_window()

    async def ask(
        self, request: AgentRequest, config: RunnableConfig, on_piece: OnPiece | None = None
    ) -> AgentReply:
        """Send a request to the agent's replica, or to the one that the pool chooses."""
        options: dict[str, Any] = {
            "replica": request.replica,
            "session_id": request.session_id,
            "limit_s": request.limit_s,
            "max_tokens": request.max_tokens,
            **self._params,
        }
        if on_piece is None:
            result = await self.engines.complete(request.context, **options)
        else:
            async with self.engines.stream(request.context, **options) as pieces:
                async for piece in pieces:
                    on_piece(piece)
            result = pieces.served
        completion = result.completion
        return AgentReply(
            text=completion.text,
            plan=result.plan,
            replica=result.replica,
            prompt_tokens=completion.prompt_tokens,
            cached_tokens=completion.cached_tokens,
            completion_tokens=completion.completion_tokens,
        )

    async def disconnect(self) -> None:
        """Close the connections of the running event loop."""
        await self.engines.disconnect()

    async def aclose(self) -> None:
        """Close the pool, if the chain has made it."""
        if self._owned:
            await self.engines.aclose()
