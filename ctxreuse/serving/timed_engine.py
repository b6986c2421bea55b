"""A batching engine in the time of an event loop: what it computes takes as long as it says.

In an event loop with a virtual clock (`ctxreuse.evaluation.virtual_time`) hours pass in a moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ctxreuse.cache.usage import CacheUsage
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.serving.batching_engine import BatchingEngine, EngineRequest


class TimedEngine:
    """Runs a batching engine whenever somebody waits for an answer. For one event loop.

    Args:
        engine: The engine.
        speed: How many times faster than its rates it runs.

    Raises:
        InvalidRequestError: If the speed is not more than 0.
    """

    def __init__(self, engine: BatchingEngine, speed: float = 1.0) -> None:
        if not isinstance(speed, (int, float)) or not 0 < speed < float("inf"):
            raise InvalidRequestError(f"speed must be a number above 0, not {describe(speed)}")
        self._engine = engine
        self._speed = speed
        self._waiting: dict[EngineRequest, asyncio.Future[None]] = {}
        self._running: asyncio.Task[None] | None = None

    async def serve(
        self, tokens: Sequence[int], answer: Sequence[int], salt: str = ""
    ) -> CacheUsage:
        """Wait until a prompt is computed and answered; who is cancelled aborts it.

        Args:
            tokens: The prompt's token ids.
            answer: The answer's.
            salt: vLLM's `cache_salt`.

        Returns:
            The prompt's tokens, and how many came from the cache.

        Raises:
            InvalidRequestError: If the cache cannot hold the prompt, or there is no answer.
        """
        request = EngineRequest(tokens, answer, salt)
        self._engine.submit(request)
        ended = self._waiting[request] = asyncio.get_running_loop().create_future()
        if self._running is None or self._running.done():
            self._running = asyncio.ensure_future(self._run())
        try:
            await ended
        except BaseException:
            self._engine.abort(request)
            raise
        finally:
            del self._waiting[request]
        assert request.usage is not None, "a finished request has begun"
        return request.usage

    async def _run(self) -> None:
        try:
            await self._run_steps()
        except Exception as error:  # token ids that are none; else everybody would wait for ever
            for ended in self._waiting.values():
                if not ended.done():
                    ended.set_exception(error)

    async def _run_steps(self) -> None:
        while self._engine.has_work:
            step = self._engine.step()
            await asyncio.sleep(step.duration_s / self._speed)
            for request in step.finished:
                ended = self._waiting.get(request)
                if ended is not None and not ended.done():
                    ended.set_result(None)
