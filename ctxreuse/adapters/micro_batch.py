"""A micro-batch window: calls that come within some milliseconds are planned together.

Applications that serve many users call the model once a user, from tasks or threads. Planned one by
one, their order is that of arrival; planned together, prompts that share a prefix run back to back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from threading import Event, Lock
from typing import Generic, NamedTuple, TypeVar

from ctxreuse.errors import InvalidRequestError, describe

DEFAULT_WINDOW_S = 0.005
_LONGEST_WINDOW_S = 60
_PLANNED_ON_THE_LOOP = 64
"""More calls than these are planned in a thread, so that the event loop stays responsive."""
_STANDSTILL_S = 1.0
"""Who waits while nobody goes on for so long goes on: an answer is worth more than the order."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Scheduled(NamedTuple, Generic[_Result]):
    """What came out of planning for the item that arrived as the `position`-th."""

    position: int
    result: _Result


class MicroBatcher(Generic[_Item, _Result]):
    """Collects single concurrent calls, plans them together, and lets them go in the planned order.

    The first caller waits for the window to close and plans for all; then each passes the baton to
    the next as it goes on, so that they reach the engine in the planned order. Tasks of any event
    loop and threads may be mixed. A caller that is cancelled while it waits is passed over.

    Nobody depends on another one's thread or event loop to run: whoever notices that the window is
    over closes it, and goes on if the baton does not come. A blocking call inside an event loop is
    planned on its own, at once, for the tasks that it would wait for cannot run.

    Args:
        schedule: Plans the items, given in the order of arrival; returns each once, in the order in
            which to go. If it raises, every caller gets the exception.
        window_s: Seconds for which the first caller waits for others; 0 plans each call on its own,
            at once.
        dropped: Called with what was planned for a caller that was cancelled before its turn.

    Raises:
        InvalidRequestError: If the window is no number of seconds from 0 to 60.
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
        self._open: _Batch[_Item, _Result] | None = None

    def submit(self, item: _Item) -> _Result:
        """Wait in this thread until it is the item's turn; return what was planned for it."""
        if not self._window_s or in_event_loop():
            return self._alone(item)
        woken = Event()
        ticket = _Ticket(item, woken.set, self._dropped)
        batch = self._join(ticket)
        try:
            if not woken.wait(self._window_s):
                self._close(batch)
            while not woken.wait(_STANDSTILL_S) and not batch.stands_still():
                pass
        except BaseException:
            ticket.leave()
            raise
        return batch.go_on(ticket)

    async def asubmit(self, item: _Item) -> _Result:
        """Wait in this task until it is the item's turn; return what was planned for it."""
        if not self._window_s:
            return self._alone(item)
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()
        ticket = _Ticket(item, lambda: loop.call_soon_threadsafe(woken.set), self._dropped)
        batch = self._join(ticket)
        try:
            if not await _set_within(self._window_s, woken):
                if batch is self._open and len(batch.tickets) > _PLANNED_ON_THE_LOOP:
                    await asyncio.to_thread(self._close, batch)
                else:
                    self._close(batch)
            while not await _set_within(_STANDSTILL_S, woken) and not batch.stands_still():
                pass
        except BaseException:
            ticket.leave()
            raise
        return batch.go_on(ticket)

    def _alone(self, item: _Item) -> _Result:
        return self._schedule([item])[0].result

    def _join(self, ticket: _Ticket[_Item, _Result]) -> _Batch[_Item, _Result]:
        with self._lock:
            if self._open is None:
                self._open = _Batch()
            self._open.tickets.append(ticket)
            return self._open

    def _close(self, batch: _Batch[_Item, _Result]) -> None:
        """Plan what has come together, unless that is done, and let the first one go."""
        with self._lock:
            if self._open is not batch:
                return
            self._open = None
        waiting = [ticket for ticket in batch.tickets if not ticket.has_left]
        if not waiting:
            return
        line = waiting
        try:
            scheduled = self._schedule([ticket.item for ticket in waiting])
            assert sorted(position for position, _ in scheduled) == list(range(len(waiting)))
            for position, result in scheduled:
                waiting[position].results.append(result)
            line = [waiting[position] for position, _ in scheduled]
        except BaseException as error:
            failure = error
            if not isinstance(error, Exception):
                failure = RuntimeError("planning was interrupted")
            for ticket in waiting:
                ticket.error = failure
            if failure is not error:  # the interrupt is this caller's alone
                raise
        finally:
            for ticket, follower in pairwise(line):
                ticket.follower = follower
            batch.note_move()
            line[0].wake()


class _Batch(Generic[_Item, _Result]):
    """Callers that are planned together, in the order of arrival."""

    def __init__(self) -> None:
        self.tickets: list[_Ticket[_Item, _Result]] = []
        self._last_move: float | None = None  # none before all are planned

    def note_move(self) -> None:
        self._last_move = time.monotonic()

    def stands_still(self) -> bool:
        """Return whether all are planned, and nobody has gone on for long."""
        return self._last_move is not None and time.monotonic() - self._last_move >= _STANDSTILL_S

    def go_on(self, ticket: _Ticket[_Item, _Result]) -> _Result:
        """Return the ticket's result, or raise, with the baton passed on."""
        self.note_move()
        return ticket.go_on()


class _Ticket(Generic[_Item, _Result]):
    """A caller that waits; when it goes on, it passes the baton to its follower."""

    def __init__(
        self, item: _Item, wake: Callable[[], object], dropped: Callable[[_Result], object]
    ) -> None:
        self.item = item
        self.results: list[_Result] = []  # one, once it is planned
        self.error: BaseException | None = None
        self.follower: _Ticket[_Item, _Result] | None = None
        self.has_left = False
        self._has_gone = False
        self._has_baton = False
        self._wake = wake
        self._dropped = dropped
        self._lock = Lock()

    def wake(self) -> None:
        """Hand over the baton; one who is not there any more passes it on."""
        ticket: _Ticket[_Item, _Result] | None = self
        while ticket is not None and not ticket._takes_baton():
            ticket = ticket.follower

    def go_on(self) -> _Result:
        """Return the result, or raise, with the baton passed on."""
        with self._lock:
            self._has_gone = True
        if self.follower is not None:
            self.follower.wake()
        if self.error is not None:
            raise self.error
        return self.results[0]

    def leave(self) -> None:
        """Give up waiting; pass on the baton if it has come already."""
        with self._lock:
            self.has_left = True
            has_baton = self._has_baton
        if has_baton:
            self._drop_results()
            if self.follower is not None:
                self.follower.wake()

    def _takes_baton(self) -> bool:
        with self._lock:
            if self._has_gone:
                return False
            self._has_baton = not self.has_left
        if self._has_baton:
            try:
                self._wake()
            except RuntimeError:  # its event loop is closed
                self.has_left = True
            else:
                return True
        self._drop_results()
        return False

    def _drop_results(self) -> None:
        with self._lock:
            results, self.results = self.results, []
        for result in results:
            self._dropped(result)


def in_event_loop() -> bool:
    """Return whether an event loop runs in this thread, so that waiting here would stop it."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def _set_within(seconds: float, event: asyncio.Event) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


def checked_window(window_s: object) -> float:
    """Return the window if it is one.

    Raises:
        InvalidRequestError: If it is no number of seconds from 0 to 60.
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
