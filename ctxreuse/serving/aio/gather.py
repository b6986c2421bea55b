"""Doing many things at once, all or none."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

_Result = TypeVar("_Result")


async def all_of(works: Iterable[Coroutine[Any, Any, _Result]]) -> list[_Result]:
    """Return what coroutines return, in their order; they run side by side.

    Whatever ends this early, a failure of one or a cancellation, cancels the others and waits for
    their end. (`asyncio.gather` leaves them running, `asyncio.TaskGroup` raises a group of errors.)

    Raises:
        Exception: What the first to fail has raised.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
