"""Micro-batches: single calls that come at the same time are planned together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from contextvars import copy_context
from functools import partial
from threading import Event
from typing import Any, Generic, TypeVar

from ctxreuse.context.fork_safety import ForkSafeLock, renew_after_fork
from ctxreuse.pipeline.ordered_release import (
    DEFAULT_WINDOW_S,
    PLANNED_ON_THE_LOOP,
    OrderedQueue,
    Slot,
    TaskWaiter,
    checked_window,
    in_event_loop,
)

_STALL_TIMEOUT_S = 1.0
"""If no caller goes on for this time, all do: an answer is worth more than the order."""

_PASSES = 8
"""In so many passes of an event loop all come that were started together; frameworks start tasks
from queues, which takes some."""


_Item = TypeVar("_Item")
_Result = TypeVar("_Result", bound=Any)  # `position` says as which one its item arrived


class CallsToCome:
    """Which calls, by group, will come to a micro-batcher; lock-free: collectors may end them."""

    def __init__(self) -> None:
        self._start_anew()
        renew_after_fork(self._start_anew)

    def _start_anew(self) -> None:
        """Expect none: in a child, those that were under way in the parent never come."""
        self._groups: dict[Hashable, Hashable] = {}

    def begin(self, call: Hashable, group: Hashable) -> None:
        """Expect a call of a group."""
        self._groups[call] = group

    def end(self, call: Hashable) -> None:
        """Expect a call no more; unknown ones are passed over."""
        self._groups.pop(call, None)

    def any_of(self, group: Hashable) -> bool:
        """Return whether a call of a group is expected."""
        return group in list(self._groups.values())


class MicroBatcher(Generic[_Item, _Result]):
    """Collects concurrent calls, plans them together, and releases them in planned order.

    Tasks of any event loop and threads may be mixed. No caller depends on another one's thread or
    loop to run: the first one that notices that the window is over closes it, and all go on if
    nobody does for a second. A blocking call inside an event loop is planned on its own, at once:
    the tasks that it would wait for cannot run.
    """

    def __init__(
        self,
        schedule: Callable[[list[_Item]], Sequence[_Result]],
        window_s: float = DEFAULT_WINDOW_S,
        dropped: Callable[[_Result], object] = lambda result: None,
        group_of: Callable[[_Item], Hashable] = lambda item: None,
        others_come: Callable[[Hashable], bool] | None = None,
        is_large: Callable[[Sequence[_Item]], bool] = lambda items: (
            len(items) > PLANNED_ON_THE_LOOP
        ),
    ) -> None:
        self._made_with = schedule, window_s, dropped, group_of, others_come, is_large
        self._schedule = schedule
        self._window_s = checked_window(window_s)
        # gets the result of a caller that was cancelled
        self._dropped = dropped
        self._group_of = group_of
        self._others_come = others_come
        self._is_large = is_large
        self._lock = ForkSafeLock()
        self._start_anew()
        renew_after_fork(self._start_anew)

    def __reduce__(self) -> tuple[Any, ...]:
        return MicroBatcher, self._made_with

    def _start_anew(self) -> None:
        """Have no batch: in a child, those who wait in the parent's cannot go on."""
        self._open: dict[Hashable, OrderedQueue[_Item, _Result]] = {}

    def submit(self, item: _Item) -> _Result:
        """Wait in this thread until the item is released; return what was planned for it."""
        if not self._window_s or in_event_loop():
            return self._schedule([item])[0]
        batch, slot = self._join(item)
        woken, others_come = Event(), self._others_come
        slot.attach(woken.set)
        try:
            is_complete = others_come is not None and not others_come(batch.group)
            if is_complete or not woken.wait(self._window_s):
                self._close(batch)
            while not woken.wait(_STALL_TIMEOUT_S):
                batch.release_if_stalled(_STALL_TIMEOUT_S)
            return slot.take()  # type: ignore[return-value]  # it is released, so it is planned
        finally:
            self._leave(slot)

    async def asubmit(self, item: _Item) -> _Result:
        """Wait in this task until the item is released; return what was planned for it."""
        if not self._window_s:
            return self._schedule([item])[0]
        batch, slot = self._join(item)
        waiter, loop = TaskWaiter(slot), asyncio.get_running_loop()
        # a wait that ends for the window would resume its task out of turn
        closing = loop.call_later(self._window_s, self._close_aside, batch)
        if self._others_come is not None:
            self._close_unless_grown(batch, len(batch.arrived))
        try:
            while not await waiter.wait(self._window_s + _STALL_TIMEOUT_S):
                self._close(batch)  # all threads may be busy with other work
                batch.release_if_stalled(_STALL_TIMEOUT_S)
            return slot.take()  # type: ignore[return-value]  # it is released, so it is planned
        finally:
            closing.cancel()
            self._leave(slot)

    def _join(self, item: _Item) -> tuple[OrderedQueue[_Item, _Result], Slot[_Item, _Result]]:
        group = self._group_of(item)
        with self._lock:
            batch = self._open.get(group)
            if batch is None:
                batch = OrderedQueue(unused=self._dropped, by_loop=True, group=group)
                self._open[group] = batch
            return batch, Slot(batch, item)

    def _leave(self, slot: Slot[_Item, _Result]) -> None:
        batch = slot.queue
        slot.leave()
        with self._lock:
            if not batch.present and self._open.get(batch.group) is batch:  # all were cancelled
                del self._open[batch.group]

    def _close_unless_grown(
        self, batch: OrderedQueue[_Item, _Result], calls: int, passes: int = _PASSES
    ) -> None:
        """Close a batch of so many calls if no further one comes in some passes of the loop."""
        if len(batch.arrived) > calls:
            return
        if passes:
            again = partial(self._close_unless_grown, batch, calls, passes - 1)
            asyncio.get_running_loop().call_soon(again)
        elif self._others_come is not None and not self._others_come(batch.group):
            self._close_aside(batch)

    def _close_aside(self, batch: OrderedQueue[_Item, _Result]) -> None:
        """Close a batch; a large one in a thread."""
        # in a thread nobody waits for it: its caller goes on when released, as all do
        if not self._is_large([slot.item for slot in list(batch.arrived)]):
            self._close(batch)
            return
        loop = asyncio.get_running_loop()
        try:
            loop.run_in_executor(None, copy_context().run, self._close, batch)
        except RuntimeError:  # no thread can be started
            self._close(batch)

    def _close(self, batch: OrderedQueue[_Item, _Result]) -> None:
        """Plan the calls that have come together, unless that is done, and line them up."""
        with self._lock:
            if self._open.get(batch.group) is not batch:
                return
            del self._open[batch.group]
        slots = batch.take_arrived()
        if slots:
            batch.plan(slots, self._planned)

    def _planned(self, slots: list[Slot[_Item, _Result]]) -> list[Slot[_Item, _Result]]:
        results = self._schedule([slot.item for slot in slots])
        assert sorted(one.position for one in results) == list(range(len(slots)))
        for result in results:
            slots[result.position].results = [result]
        return [slots[one.position] for one in results]
