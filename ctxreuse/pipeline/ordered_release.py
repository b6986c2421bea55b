"""Ordered release: calls wait, are planned together, and go on in the planned order."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Hashable,
    Iterable,
    Sequence,
)
from contextvars import copy_context
from enum import Enum
from functools import partial
from heapq import heappop, heappush
from itertools import count
from threading import Event, get_ident
from typing import Any, Generic, TypeVar

from ctxreuse.context.fork_safety import ForkSafeLock, renew_after_fork
from ctxreuse.errors import InvalidRequestError, describe

PLANNED_ON_THE_LOOP = 64
"""More calls than these are planned in a thread, so that the event loop stays responsive."""

DEFAULT_WINDOW_S = 0.005
_LONGEST_WINDOW_S = 60

_STALL_TIMEOUT_S = 1.0
"""If no caller goes on for this time, all do: an answer is worth more than the order."""

_PASSES = 8
"""In so many passes of an event loop all come that were started together; frameworks start tasks
from queues, which takes some."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_Placed = TypeVar("_Placed", bound=Any)  # `position` says as which one its item arrived


class SlotState(Enum):
    """How far a call has come."""

    ARRIVED = "has no place in the order yet"
    WAITING = "has a place, and others are before it"
    RUNNING = "is released"
    LEFT = "has ended, or was given up"


class Slot(Generic[_Item, _Result]):
    """One call in an `OrderedQueue`: it arrives, is lined up, is released, and leaves."""

    def __init__(
        self, queue: OrderedQueue[_Item, _Result], item: _Item, result: _Result | None = None
    ) -> None:
        self.item = item
        self.state = SlotState.ARRIVED
        self.error: BaseException | None = None
        self.wake: Callable[[], object] = lambda: None  # `attach` puts the waiter's here
        self.loop: object = None
        self.queue = queue
        self.results = [] if result is None else [result]  # what was planned, until it is taken
        with queue.lock:
            queue.present += 1
            if result is None:
                queue.arrived[self] = None

    def attach(self, wake: Callable[[], object], loop: object = None) -> None:
        """Call `wake` when the slot is released or leaves, at once if it has, from any thread."""
        with self.queue.lock:
            self.wake, self.loop = wake, loop
            if self.state in (SlotState.RUNNING, SlotState.LEFT):
                wake()

    def take(self) -> _Result | None:
        """Return what was planned, once; None if nothing was, or if it was taken or given up."""
        if self.error is not None:
            raise self.error
        with self.queue.lock:
            return self.results.pop() if self.results else None

    def leave(self, release: bool = True) -> None:
        """End, or give up waiting, and free the place. May be repeated."""
        queue = self.queue
        with queue.lock:
            if self.state is not SlotState.LEFT:
                queue.present -= 1
                queue.running -= self.state is SlotState.RUNNING
                self.state = SlotState.LEFT
                queue.arrived.pop(self, None)
                queue.moved_at = time.monotonic()
            results, self.results = self.results, []
        for result in results:  # without the lock, because planners have locks, too
            queue.unused(result)
        if release:
            queue.release()


class TaskWaiter:
    """Waits in a task of the running event loop until a slot is released, or has left."""

    def __init__(self, slot: Slot[Any, Any]) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = get_ident()
        self._woken = asyncio.Event()
        slot.attach(self._wake, self._loop)

    def _wake(self) -> None:
        # not at once: those that were woken before are resumed before
        if get_ident() == self._thread:  # needs no system call to wake up the loop
            self._loop.call_soon(self._woken.set)
        else:
            self._loop.call_soon_threadsafe(self._woken.set)

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Return whether it was released, or has left, in time."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._woken.wait()
        except TimeoutError:
            return False


class OrderedQueue(Generic[_Item, _Result]):
    """Releases calls in their order, some at a time; passes over those that have left.

    Threads and tasks of any event loop may wait in one queue; hold `lock` to look and act in one
    step. With one place, calls that leave as soon as they are released go strictly one after the
    other.
    """

    def __init__(
        self,
        places: int = 1,
        unused: Callable[[_Result], object] = lambda result: None,
        lanes: int = 1,
        by_loop: bool = False,  # whether neighbours of one event loop take one place together
        group: Hashable = None,  # what the calls have in common
    ) -> None:
        # re-entrant: a collected task may leave while this very thread holds it
        self.lock = ForkSafeLock()
        self.arrived: dict[Slot[_Item, _Result], None] = {}
        self.present = 0
        self.running = 0
        self.moved_at = time.monotonic()  # in seconds of the monotonic clock
        self.unused = unused
        self.places: float = places
        self.group = group
        # heaps of place, order of lining up, and slot
        self._lanes: list[list[tuple[int, int, Slot[_Item, _Result]]]] = [[] for _ in range(lanes)]
        self._next_lane = 0
        self._by_loop = by_loop
        self._numbers = count()

    def has_waiting(self, lane: int = 0) -> bool:
        """Return whether a call waits in a lane."""
        with self.lock:
            return any(slot.state is SlotState.WAITING for *_, slot in self._lanes[lane])

    def plan(
        self,
        slots: list[Slot[_Item, _Result]],
        schedule: Callable[[list[Slot[_Item, _Result]]], list[Slot[_Item, _Result]]],
    ) -> None:
        """Plan calls together, and line them up; an error reaches each caller."""
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
        """Give calls their places in the order, and release those that may run."""
        left = []
        with self.lock:
            self.moved_at = time.monotonic()
            for offset, slot in enumerate(slots):
                self.arrived.pop(slot, None)
                if slot.state is SlotState.ARRIVED:
                    slot.state = SlotState.WAITING
                    number = next(self._numbers)
                    place = number if first is None else first + offset
                    heappush(self._lanes[lane], (place, number, slot))
                elif slot.state is SlotState.LEFT:  # while it was being planned
                    left.append(slot)
        for slot in left:
            slot.leave(release=False)  # gives up its result
        self.release()

    def release(self) -> None:
        """Let calls go on as long as there are places."""
        loop = None
        while True:
            with self.lock:
                slot = self._first(loop)
                if slot is None:
                    return
                loop = slot.loop if self._by_loop else None
                slot.state = SlotState.RUNNING
                self.running += 1
                try:
                    slot.wake()
                    continue
                except RuntimeError:  # its event loop is closed
                    pass
            slot.leave(release=False)

    def release_if_stalled(self, timeout_s: float) -> None:
        """Release all calls if some wait, and none has gone on for the timeout."""
        with self.lock:
            if self.has_waiting() and time.monotonic() - self.moved_at >= timeout_s:
                self.places = math.inf
        self.release()

    def _first(self, loop: object) -> Slot[_Item, _Result] | None:
        """Take the next call that may run out of its lane; `loop` is that of the one before it."""
        for step in range(len(self._lanes)):  # the lanes take turns
            number = (self._next_lane + step) % len(self._lanes)
            lane = self._lanes[number]
            while lane and lane[0][2].state is not SlotState.WAITING:
                heappop(lane)  # it was given up
            follows = lane and loop is not None and lane[0][2].loop is loop
            if lane and (follows or self.running < self.places):
                self._next_lane = number + 1
                return heappop(lane)[2]
        return None


class CallsToCome(dict[Hashable, Hashable]):
    """Calls that will come to a micro-batcher, and their groups; lock-free: collectors end some."""

    def __init__(self) -> None:
        super().__init__()
        renew_after_fork(self._start_anew)

    def _start_anew(self) -> None:
        """Expect none: in a child, those that were under way in the parent never come."""
        self.clear()

    def any_of(self, group: Hashable) -> bool:
        """Return whether a call of a group is expected."""
        return group in list(self.values())


class MicroBatcher(Generic[_Item, _Placed]):
    """Collects concurrent calls, plans them together, and releases them in planned order.

    Tasks of any event loop and threads may be mixed. No caller depends on another one's thread or
    loop to run: the first one that notices that the window is over closes it, and all go on if
    nobody does for a second. A blocking call inside an event loop is planned on its own, at once:
    the tasks that it would wait for cannot run.
    """

    def __init__(
        self,
        schedule: Callable[[list[_Item]], Sequence[_Placed]],
        window_s: float = DEFAULT_WINDOW_S,
        dropped: Callable[[_Placed], object] = lambda result: None,
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
        self._open: dict[Hashable, OrderedQueue[_Item, _Placed]] = {}

    def submit(self, item: _Item) -> _Placed:
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

    async def asubmit(self, item: _Item) -> _Placed:
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

    def _join(self, item: _Item) -> tuple[OrderedQueue[_Item, _Placed], Slot[_Item, _Placed]]:
        group = self._group_of(item)
        with self._lock:
            batch = self._open.get(group)
            if batch is None:
                batch = OrderedQueue(unused=self._dropped, by_loop=True, group=group)
                self._open[group] = batch
            return batch, Slot(batch, item)

    def _leave(self, slot: Slot[_Item, _Placed]) -> None:
        batch = slot.queue
        slot.leave()
        with self._lock:
            if not batch.present and self._open.get(batch.group) is batch:  # all were cancelled
                del self._open[batch.group]

    def _close_unless_grown(
        self, batch: OrderedQueue[_Item, _Placed], calls: int, passes: int = _PASSES
    ) -> None:
        """Close a batch of so many calls if no further one comes in some passes of the loop."""
        if len(batch.arrived) > calls:
            return
        if passes:
            again = partial(self._close_unless_grown, batch, calls, passes - 1)
            asyncio.get_running_loop().call_soon(again)
        elif self._others_come is not None and not self._others_come(batch.group):
            self._close_aside(batch)

    def _close_aside(self, batch: OrderedQueue[_Item, _Placed]) -> None:
        """Close a batch; a large one in a thread."""
        if self._open.get(batch.group) is not batch:
            return  # it is closed: without a look at all of its calls for each
        # in a thread nobody waits for it: its caller goes on when released, as all do
        if not self._is_large([slot.item for slot in list(batch.arrived)]):
            self._close(batch)
            return
        loop = asyncio.get_running_loop()
        try:
            loop.run_in_executor(None, copy_context().run, self._close, batch)
        except RuntimeError:  # no thread can be started
            self._close(batch)

    def _close(self, batch: OrderedQueue[_Item, _Placed]) -> None:
        """Plan the calls that have come together, unless that is done, and line them up."""
        with self._lock:
            if self._open.get(batch.group) is not batch:
                return
            del self._open[batch.group]
        if slots := list(batch.arrived):
            batch.plan(slots, self._planned)

    def _planned(self, slots: list[Slot[_Item, _Placed]]) -> list[Slot[_Item, _Placed]]:
        results = self._schedule([slot.item for slot in slots])
        assert sorted(one.position for one in results) == list(range(len(slots)))
        for result in results:
            slots[result.position].results = [result]
        return [slots[one.position] for one in results]


async def planned_aside(work: Callable[[], _Result], calls: int) -> _Result:
    """Return what planning returns; a large batch is planned in a thread."""
    if calls > PLANNED_ON_THE_LOOP:
        return await asyncio.to_thread(work)
    return work()


async def as_they_end(
    works: Sequence[Callable[[], Awaitable[_Result]]], at_a_time: int | None = None
) -> AsyncGenerator[_Result, None]:
    """Yield what works return; they start in order, none after an error or without a reader."""
    places = asyncio.Semaphore(at_a_time or max(1, len(works)))

    async def run(work: Callable[[], Awaitable[_Result]]) -> _Result:
        await places.acquire()
        result = await work()
        places.release()  # not if it fails: that would let another one start
        return result

    tasks = [asyncio.create_task(run(work)) for work in works]
    try:
        for task in asyncio.as_completed(tasks):
            yield await task
    finally:
        for one in tasks:
            one.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def run_here(work: Coroutine[Any, Any, _Result]) -> _Result:
    """Return what a coroutine returns that awaits nothing: it blocks this thread instead."""
    try:
        work.send(None)
    except StopIteration as end:
        result: _Result = end.value
        return result
    except RuntimeError as error:
        if isinstance(error.__cause__, StopIteration):  # which a coroutine cannot raise itself
            raise error.__cause__ from None
        raise
    raise AssertionError("it has awaited something")


def in_event_loop() -> bool:
    """Return whether an event loop runs in this thread, so that waiting here would stop it."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def checked_window(window_s: object) -> float:
    """Return the window if it is valid."""
    is_number = isinstance(window_s, (int, float)) and not isinstance(window_s, bool)
    if not is_number or not 0 <= window_s <= _LONGEST_WINDOW_S:  # type: ignore[operator]
        raise InvalidRequestError(
            f"the micro-batch window is {describe(window_s)}; give seconds from 0 (off) to "
            f"{_LONGEST_WINDOW_S}, such as {DEFAULT_WINDOW_S}"
        )
    return float(window_s)  # type: ignore[arg-type]
