"""Running coroutines side by side, all or none."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from ctxreuse.adapters.ordered_release import Slot, TaskWaiter

_AnySlot = TypeVar("_AnySlot", bound=Slot[Any, Any])
_Result = TypeVar("_Result")


async def all_of(works: Iterable[Coroutine[Any, Any, _Result]]) -> list[_Result]:
    """Return what coroutines return, in their order; they run side by side.

    A failure of one or a cancellation cancels the others and waits for their end.
    (`asyncio.gather` leaves them running, `asyncio.TaskGroup` raises a group of errors.)

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


async def all_in_order(
    slots: Iterable[_AnySlot], work: Callable[[_AnySlot], Awaitable[_Result]]
) -> list[_Result]:
    """Return what the work of each slot returns, in their order; each starts once it is released.

    If one fails or the caller is cancelled, those that run are cancelled and the others never
    start; all leave their queue.

    Raises:
        Exception: What the first to fail has raised.
    """

    async def run(slot: _AnySlot) -> _Result:
        await TaskWaiter(slot).wait()
        result = await work(slot)
        slot.leave()  # not if it fails: that would let another one start
        return result

    slots = list(slots)
    try:
        return await all_of(map(run, slots))
    finally:
        for slot in slots:
            slot.leave()
