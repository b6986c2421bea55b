"""Work that nobody waits for, but that does not outlive its run."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from ctxreuse.context.fail_open import FailOpen


class BackgroundTasks:
    """Tasks that end before their owner does.

    Args:
        failing: Is told what goes wrong in them; nothing else comes of it.
    """

    def __init__(self, failing: FailOpen) -> None:
        self._failing = failing
        self._tasks: set[asyncio.Task[None]] = set()

    def do(self, work: Coroutine[Any, Any, None]) -> None:
        """Start some work."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def wait(self) -> None:
        """Wait until all of it has ended, even if the caller is cancelled meanwhile."""
        cancelled: asyncio.CancelledError | None = None
        while self._tasks:
            try:
                await asyncio.wait(self._tasks)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self._failing.note(error)
