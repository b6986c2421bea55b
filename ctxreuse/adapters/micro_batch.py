"""A micro-batch window: calls that come within some milliseconds are planned together.

Applications that serve many users call the model once a user, from tasks or threads. Planned one by
one, their order is that of arrival; planned together, prompts that share a prefix run back to back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Event, Lock
from typing import Generic, NamedTuple, TypeVar

from ctxreuse.adapters.ordered_release import (
    OrderedQueue,
    Slot,
    TaskWaiter,
    in_event_loop,
    planned_aside,
)
from ctxreuse.errors import InvalidRequestError, describe

DEFAULT_WINDOW_S = 0.005
_LONGEST_WINDOW_S = 60
_STALL_TIMEOUT_S = 1.0
"""After this time without anybody going on all go on: an answer is worth more than the order."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Scheduled(NamedTuple, Generic[_Result]):
    """What came out of planning for the item that arrived as the `position`-th."""

    position: int
    result: _Result


class MicroBatcher(Generic[_Item, _Result]):
    """Collects single concurrent calls, plans them together, and lets them go in the planned order.

    The first caller waits for the window to close and plans for all. Then each passes a release
    token to the next waiter as it goes on, so that they reach the engine in the planned order.
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
        self._lock = Lock()
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
        try:
            if not await waiter.wait(self._window_s):
                await planned_aside(lambda: self._close(slot.queue), len(slot.queue.arrived))
            while not await waiter.wait(_STALL_TIMEOUT_S):
                slot.queue.release_if_stalled(_STALL_TIMEOUT_S)
            return _taken(slot)
        finally:
            slot.leave()

    def _join(self, item: _Item) -> Slot[_Item, _Result]:
        with self._lock:
            if self._open is None:
                self._open = OrderedQueue(unused=self._dropped)
            return Slot(self._open, item)

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


def _taken(slot: Slot[_Item, _Result]) -> _Result:
    result = slot.take()
    assert result is not None, "a call that is released is planned"
    return result


def checked_window(window_s: object) -> float:
    """Return the window if it is valid.

    Raises:
        InvalidRequestError: wrong type or out of range.
    """
    if isinstance(window_s, bool) or not isinstance(window_s, (int, float)):
        raise InvalidRequestError(
            f"the micro-batch window must be a number of seconds, not {describe(window_s)}"
        )
    if not 0 <= window_s <= _LONGEST_WINDOW_S:
        raise InvalidRequestError(
            f"the micro-batch window is {describe(window_s)}; give seconds from 0 (off) to "
            f"{_LONGEST_WINDOW_S}, such as {DEFAULT_WINDOW_S}"
        )
    return float(window_s)
