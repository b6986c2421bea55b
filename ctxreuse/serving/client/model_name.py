"""The name of an engine's model, asked for once by all who wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


class ModelName:
    """A model's name: one that is given, or what a look-up finds.

    Those who wait at the same time share one look-up and its outcome, a failure included: at an
    engine that is down nobody waits for the retries of others. After a failure the next one who
    asks looks it up again.

    Args:
        name: The name; None looks it up.
        look_up: Asks for it.
    """

    def __init__(self, name: str | None, look_up: Callable[[], Awaitable[str]]) -> None:
        self._name = name
        self._look_up = look_up
        self._task: asyncio.Task[None] | None = None

    async def get(self) -> str:
        """Return the name, or raise what the look-up raises."""
        while self._name is None:
            task = self._task
            # a task of an event loop that is gone never ends
            if task is None or task.done() or task.get_loop() is not asyncio.get_running_loop():
                task = self._task = asyncio.create_task(self._find())
            await asyncio.shield(task)  # who is cancelled does not cancel it for the others
        return self._name

    async def _find(self) -> None:
        self._name = await self._look_up()
