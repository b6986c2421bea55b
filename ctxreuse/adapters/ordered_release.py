"""Ordered release: calls wait, are planned together, and go on in the planned order.

The one mechanism under the micro-batcher, the admission queue, the batches of the frameworks, and
dispatch. These say when to plan and how; here is who goes on next.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable
from enum import Enum
from heapq import heappop, heappush
from itertools import count
from threading import Event, RLock
from typing import Generic, Protocol, TypeVar

PLANNED_ON_THE_LOOP = 64
"""More calls than these are planned in a thread, so that the event loop stays responsive."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class SlotState(Enum):
    """How far a call has come."""

    ARRIVED = "arrived"
    """It has no place in the order yet."""
    WAITING = "waiting"
    """It has one, and others are before it."""
    RUNNING = "running"
    """It was released."""
    LEFT = "left"
    """It has ended, or was given up."""


class Waiter(Protocol):
    """Waits in a thread or a task until a slot is released."""

    def wake(self) -> object:
        """End the waiting; raise RuntimeError if nobody can wait any more."""


class ThreadWaiter:
    """Waits in a thread."""

    def __init__(self) -> None:
        self._woken = Event()
        self.wake = self._woken.set

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return whether the slot was released in time."""
        return self._woken.wait(timeout_s)


class TaskWaiter:
    """Waits in a task of the running event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()

    def wake(self) -> None:
        """End the waiting, from any thread; RuntimeError says that the event loop is closed."""
        self._loop.call_soon_threadsafe(self._woken.set)

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Return whether the slot was released in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._woken.wait()
        except TimeoutError:
            return False
        return True


class Slot(Generic[_Item, _Result]):
    """One call in an `OrderedQueue`; made by `OrderedQueue.arrive`.

    Attributes:
        item: What is planned.
        state: How far it has come.
        error: What its caller gets instead of a result.
    """

    def __init__(self, queue: OrderedQueue[_Item, _Result], item: _Item) -> None:
        self.item = item
        self.state = SlotState.ARRIVED
        self.error: BaseException | None = None
        self._queue = queue
        self._results: list[_Result] = []
        self._waiter: Waiter | None = None

    @property
    def is_planned(self) -> bool:
        """Whether it has a result that nobody has taken."""
        return bool(self._results)

    def set_result(self, result: _Result) -> None:
        """Keep what was planned for it."""
        self._results = [result]

    def attach(self, waiter: Waiter) -> None:
        """Wake the waiter when the slot is released, at once if it is or has left."""
        with self._queue.lock:
            self._waiter = waiter
            if self.state in (SlotState.RUNNING, SlotState.LEFT):
                waiter.wake()

    def take(self) -> _Result | None:
        """Return what was planned, once; None if nothing was, or if it was taken or given up.

        Raises:
            BaseException: What the planning has raised.
        """
        if self.error is not None:
            raise self.error
        with self._queue.lock:
            return self._results.pop() if self._results else None

    def leave(self) -> None:
        """End, or give up waiting, and release the next waiters. May be repeated."""
        self._queue.remove(self)
        self._queue.release()

    def is_woken(self) -> bool:
        """Wake the waiter of the slot, which is released; return whether it can go on."""
        try:
            if self._waiter is not None:  # else it goes on when it comes
                self._waiter.wake()
        except RuntimeError:  # its event loop is closed
            return False
        return True


class OrderedQueue(Generic[_Item, _Result]):
    """Releases calls in their order, some at a time; passes over those that have left.

    Threads and tasks of any event loop may wait in one queue. Each call arrives, is lined up, is
    released when it is its turn and a place is free, and leaves, which frees its place. A call
    may leave at any time.

    Args:
        places: How many calls run at a time. With one, a call that leaves as soon as it has gone
            on hands on a release token.
        unused: Called with the result of a call that left without having taken it.
        lanes: How many orders there are; their calls are released by turns.

    Attributes:
        lock: Guards the queue; hold it to look and act in one step.
        arrived: The calls that are not lined up, in the order of arrival.
        present: How many calls have come and not left.
        running: How many of these are released.
    """

    def __init__(
        self,
        places: int = 1,
        unused: Callable[[_Result], object] = lambda result: None,
        lanes: int = 1,
    ) -> None:
        # a collected task may leave while this very thread holds the lock
        self.lock = RLock()
        self.arrived: dict[Slot[_Item, _Result], None] = {}
        self.present = 0
        self.running = 0
        self._places: float = places
        self._unused = unused
        self._lanes: list[list[tuple[int, Slot[_Item, _Result]]]] = [[] for _ in range(lanes)]
        self._last_lane = lanes - 1
        self._numbers = count()
        self._moved_at = time.monotonic()

    @property
    def has_free_place(self) -> bool:
        """Whether one more call may run."""
        return self.running < self._places

    def has_waiting(self, lane: int = 0) -> bool:
        """Return whether a call waits in a lane."""
        with self.lock:
            waiting = self._lanes[lane]
            while waiting and waiting[0][1].state is SlotState.LEFT:
                heappop(waiting)
            return bool(waiting)

    def arrive(self, item: _Item, waiter: Waiter | None = None) -> Slot[_Item, _Result]:
        """Add a call that is to be lined up; return its slot.

        Args:
            item: What is to be planned.
            waiter: Who waits; None if it is attached later.
        """
        slot = Slot(self, item)
        with self.lock:
            if waiter is not None:
                slot.attach(waiter)
            self.arrived[slot] = None
            self.present += 1
        return slot

    def take_arrived(self) -> list[Slot[_Item, _Result]]:
        """Return the calls that have arrived, for one `plan`; others may arrive meanwhile."""
        with self.lock:
            slots = list(self.arrived)
            self.arrived.clear()
        return slots

    def plan(
        self,
        slots: list[Slot[_Item, _Result]],
        schedule: Callable[[list[Slot[_Item, _Result]]], list[Slot[_Item, _Result]]],
    ) -> None:
        """Plan calls together, and line them up.

        Args:
            slots: The calls.
            schedule: Gives each its result; returns them in the order in which to go. What it
                raises reaches each caller; an interrupt reaches this one, the others hear of it.
        """
        line = slots
        try:
            line = schedule(slots)
        except Exception as error:
            for slot in slots:
                slot.error = error
        except BaseException:
            for slot in slots:
                slot.error = RuntimeError("planning was interrupted")
            raise
        finally:
            self.line_up(line)

    def line_up(
        self, slots: Iterable[Slot[_Item, _Result]], lane: int = 0, first: int | None = None
    ) -> None:
        """Give calls their places in the order, but release nobody yet.

        Args:
            slots: The calls, in their order.
            lane: Which order.
            first: The place of the first of them; None is behind all others.
        """
        numbers = self._numbers if first is None else count(first)
        left = []
        with self.lock:
            self._moved_at = time.monotonic()
            for slot in slots:
                self.arrived.pop(slot, None)
                if slot.state is SlotState.ARRIVED:
                    slot.state = SlotState.WAITING
                    heappush(self._lanes[lane], (next(numbers), slot))
                else:
                    left.append(slot)
        for slot in left:
            self._give_up(slot)

    def release(self) -> None:
        """Let calls go on as long as there are places."""
        gone = []
        with self.lock:
            while self.has_free_place and (slot := self._next()) is not None:
                slot.state = SlotState.RUNNING
                self.running += 1
                if not slot.is_woken():
                    gone.append(slot)
                    self._take_out(slot)
        for slot in gone:
            self._give_up(slot)

    def release_if_stalled(self, timeout_s: float) -> None:
        """Let all go on if some wait, and nobody has gone on for the timeout."""
        with self.lock:
            if self.has_waiting() and time.monotonic() - self._moved_at >= timeout_s:
                self._places = math.inf
        self.release()

    def remove(self, slot: Slot[_Item, _Result]) -> None:
        """Take a call out, wherever it is, and free its place, but release nobody yet."""
        with self.lock:
            self._take_out(slot)
        self._give_up(slot)

    def _next(self) -> Slot[_Item, _Result] | None:
        """Take the first waiting call out of its lane; the lanes take turns."""
        for step in range(1, len(self._lanes) + 1):
            lane = (self._last_lane + step) % len(self._lanes)
            if self.has_waiting(lane):
                self._last_lane = lane
                return heappop(self._lanes[lane])[1]
        return None

    def _take_out(self, slot: Slot[_Item, _Result]) -> None:
        if slot.state is SlotState.LEFT:
            return
        self.present -= 1
        self.running -= slot.state is SlotState.RUNNING
        slot.state = SlotState.LEFT
        self.arrived.pop(slot, None)
        self._moved_at = time.monotonic()

    def _give_up(self, slot: Slot[_Item, _Result]) -> None:
        # without the lock: what is told may wait for a lock of its own
        with self.lock:
            results, slot._results = slot._results, []
        for result in results:
            self._unused(result)


async def planned_aside(work: Callable[[], _Result], calls: int) -> _Result:
    """Return what planning returns; a large batch is planned in a thread.

    Args:
        work: Plans.
        calls: How many calls it plans.
    """
    if calls > PLANNED_ON_THE_LOOP:
        return await asyncio.to_thread(work)
    return work()


def in_event_loop() -> bool:
    """Return whether an event loop runs in this thread, so that waiting here would stop it."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
