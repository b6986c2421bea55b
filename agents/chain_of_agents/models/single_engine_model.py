"""What model objects of frameworks have in common."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from chain_of_agents.models.agent_model import AgentRequest
from ctxreuse.planner import ReusePlanner
from ctxreuse.planning.plan import Plan
from ctxreuse.serving.pool.admission import AdmissionQueue


class SingleEngineModel:
    """A model object of a framework: one engine, as far as anybody can tell."""

    keeps_connections = True

    def __init__(self, planner: ReusePlanner, concurrency: int) -> None:
        self._planner = planner
        self._room = AdmissionQueue(planner, concurrency)

    def all_engines(self) -> tuple[str, ...]:
        """Return the one engine, without a name."""
        return ("",)

    def engines(self) -> tuple[str, ...]:
        """Return the one engine, without a name."""
        return ("",)

    def generation(self, engine: str) -> int:
        """Return 0: nobody can tell when its cache was emptied."""
        return 0

    async def disconnect(self) -> None:
        """Nothing: the connections are the model's own."""

    async def aclose(self) -> None:
        """Nothing: the connections are the model's own."""

    @asynccontextmanager
    async def _sending(self, ask: AgentRequest) -> AsyncIterator[Plan]:
        """Wait for a place and hold it; the planner hears of a call that was not answered."""
        async with self._room.slot(ask.request) as plan:
            try:
                async with asyncio.timeout(ask.limit_s):
                    yield plan
            except BaseException:
                self._planner.evict([plan.request_id])
                raise
