"""Micro-batches: single calls that come at the same time are planned together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from threading import Event
from typing import Any, Generic, NamedTuple, TypeVar

from ctxreuse.adapters.ordered_release import (
    DEFAULT_WINDOW_S,
    PLANNED_ON_THE_LOOP,
    OrderedQueue,
    Slot,
    TaskWaiter,
    checked_window,
    in_event_loop,
)
from ctxreuse.context.fork_safety import ForkSafeLock, renew_after_fork

_STALL_TIMEOUT_S = 1.0
"""If no caller goes on for this time, all do: an answer is worth more than the order."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Scheduled(NamedTuple, Generic[_Result]):
    """What came out of planning for the item that arrived as the `position`-th."""

    position: int
    result: _Result


class MicroBatcher(Generic[_Item, _Result]):
    """Collects single concurrent calls, plans them together, and lets them go in the planned order.

    Applications that serve many users call the model once a user, from tasks or threads. Planned
    one by one, their order is that of arrival; planned together, prompts that share a prefix run
    back to back.

    The first caller waits for the window to close and plans for all. Then each passes a release
    token to the next waiter as it goes on, so that they reach the engine in the planned order.
    Tasks of one event loop that follow each other go on together: it resumes them in their order.
    Tasks of any event loop and threads may be mixed. A caller that is cancelled is passed over.

    No caller depends on another one's thread or event loop to run: the first one that notices that
    the window is over closes it, and all go on if the token does not come. A blocking call inside
    an event loop is planned on its own, at once: the tasks that it would wait for cannot run.

    Args:
        schedule: Plans the items, given in the order of arrival; returns each once, in the order in
            which to go. If it raises, every caller gets the exception.
        window_s: Seconds for which the first caller waits for others; 0 plans each call on its own,
            at once.
        dropped: Called with what was planned for a caller that was cancelled while it waited.

    Raises:
        InvalidRequestError: the window is not a number of seconds from 0 to 60.
    """

    def __init__(
        self,
        schedule: Callable[[list[_Item]], Sequence[Scheduled[_Result]]],
        window_s: float = DEFAULT_WINDOW_S,
        dropped: Callable[[_Result], object] = lambda result: None,
    ) -> None:
        self._schedule = schedule
        self._window_s = checked_window(window_s)
        self._dropped = dropped
        self._lock = ForkSafeLock()
        self._start_anew()
        renew_after_fork(self._start_anew)

    def _start_anew(self) -> None:
        """Have no batch: in a child, those who wait in the parent's cannot go on."""
        self._open: OrderedQueue[_Item, _Result] | None = None

    def submit(self, item: _Item) -> _Result:
        """Wait in this thread until the item is released; return what was planned for it."""
        if not self._window_s or in_event_loop():
            return self._schedule([item])[0].result
        slot = self._join(item)
        woken = Event()
        slot.attach(woken.set)
        try:
            if not woken.wait(self._window_s):
                self._close(slot.queue)
            while not woken.wait(_STALL_TIMEOUT_S):
                slot.queue.release_if_stalled(_STALL_TIMEOUT_S)
            return _taken(slot)
        finally:
            slot.leave()

    async def asubmit(self, item: _Item) -> _Result:
        """Wait in this task until the item is released; return what was planned for it."""
        if not self._window_s:
            return self._schedule([item])[0].result
        slot = self._join(item)
        waiter = TaskWaiter(slot)
        # a wait that ends for the window would resume its task out of turn
        close, go_on = (partial(one, slot.queue) for one in (self._close_aside, self._go_on))
        timer = _Timer(self._window_s, close, go_on)
        try:
            await waiter.wait()
            return _taken(slot)
        finally:
            timer.cancel()
            slot.leave()

    def _join(self, item: _Item) -> Slot[_Item, _Result]:
        with self._lock:
            if self._open is None:
                self._open = OrderedQueue(unused=self._dropped, by_loop=True)
            return Slot(self._open, item)

    def _go_on(self, batch: OrderedQueue[_Item, _Result]) -> None:
        """Close a batch that is still open, and release all of it if it stalls."""
        self._close(batch)  # all threads may be busy with other work
        batch.release_if_stalled(_STALL_TIMEOUT_S)

    def _close_aside(self, batch: OrderedQueue[_Item, _Result]) -> None:
        """Close a batch; a large one in a thread.

        Nobody waits for the thread: its caller goes on when it is released, as all others do.
        """
        if len(batch.arrived) <= PLANNED_ON_THE_LOOP:
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
            if self._open is not batch:
                return
            self._open = None
        slots = batch.take_arrived()
        if slots:
            batch.plan(slots, self._planned)

    def _planned(self, slots: list[Slot[_Item, _Result]]) -> list[Slot[_Item, _Result]]:
        scheduled = self._schedule([slot.item for slot in slots])
        assert sorted(position for position, _ in scheduled) == list(range(len(slots)))
        for position, result in scheduled:
            slots[position].set_result(result)
        return [slots[position] for position, _ in scheduled]


class _Timer:
    """Calls functions in the running event loop until it is cancelled.

    Args:
        window_s: When to call `close`, in seconds.
        close: Called once.
        go_on: Called after that, each time when the stall timeout has passed.
    """

    def __init__(
        self, window_s: float, close: Callable[[], object], go_on: Callable[[], object]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._go_on = go_on
        self._next = self._loop.call_later(window_s, self._call, close)

    def _call(self, work: Callable[[], object]) -> None:
        self._next = self._loop.call_later(_STALL_TIMEOUT_S, self._call, self._go_on)
        work()

    def cancel(self) -> None:
        """Call nothing any more."""
        self._next.cancel()


def _taken(slot: Slot[_Item, _Result]) -> _Result:
    result = slot.take()
    assert result is not None, "a call that is released is planned"
    return result
