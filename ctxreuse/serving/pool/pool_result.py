"""Answers of a pool, and which replica gave them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass

from ctxreuse.errors import EngineError
from ctxreuse.planning.plan import Plan
from ctxreuse.serving.aio.concurrency import AsyncClosing
from ctxreuse.serving.client.completion import Completion


@dataclass(frozen=True, slots=True)
class PoolResult:
    """An answer of a pool.

    Attributes:
        completion: The answer and what it cost.
        plan: What was sent.
        replica: The name of the replica that answered.
        tried: The names of the replicas that failed before, in order.
    """

    completion: Completion
    plan: Plan
    replica: str
    tried: tuple[str, ...] = ()


class PoolStream(AsyncClosing):
    """An answer of a pool in progress: an async iterator of its pieces."""

    def __init__(self) -> None:
        self.pieces: AsyncGenerator[str]
        self.result: PoolResult | None = None

    @property
    def served(self) -> PoolResult:
        """The whole answer; EngineError before it has ended."""
        if self.result is None:
            raise EngineError("the answer has not ended; iterate over its pieces first")
        return self.result

    def __aiter__(self) -> PoolStream:
        return self

    async def __anext__(self) -> str:
        return await anext(self.pieces)

    async def aclose(self) -> None:
        """Cancel the request, unless it has ended."""
        await self.pieces.aclose()
