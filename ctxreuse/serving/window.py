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

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Scheduled(NamedTuple, Generic[_Result]):
    """What came out of planning for the item that arrived as the `position`-th."""

    position: int
    result: _Result


class MicroBatchWindow(Generic[_Item, _Result]):
    """Collects single concurrent calls, plans them together, and lets them go in the planned order.

    The first caller waits for the window to close and plans for all; then each passes the baton to
    the next as it goes on, so that they reach the engine in the planned order. Tasks of any event
    loop and threads may be mixed. A caller that is cancelled while it waits is passed over.

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
        self._open: list[_Ticket[_Item, _Result]] | None = None

    def submit(self, item: _Item) -> _Result:
        """Wait in this thread until it is the item's turn; return what was planned for it."""
        if not self._window_s:
            return self._alone(item)
        woken = Event()
        ticket = _Ticket(item, woken.set, self._dropped)
        batch = self._join(ticket)
        try:
            if batch is not None:
                time.sleep(self._window_s)
                self._close(batch)
            woken.wait()
        except BaseException:
            self._leave(ticket, batch)
            raise
        return ticket.go_on()

    async def asubmit(self, item: _Item) -> _Result:
        """Wait in this task until it is the item's turn; return what was planned for it."""
        if not self._window_s:
            return self._alone(item)
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()
        ticket = _Ticket(item, lambda: loop.call_soon_threadsafe(woken.set), self._dropped)
        batch = self._join(ticket)
        try:
            if batch is not None:
                await asyncio.sleep(self._window_s)
                if len(batch) > _PLANNED_ON_THE_LOOP:
                    await asyncio.to_thread(self._close, batch)
                else:
                    self._close(batch)
            await woken.wait()
        except BaseException:
            self._leave(ticket, batch)
            raise
        return ticket.go_on()

    def _alone(self, item: _Item) -> _Result:
        return self._schedule([item])[0].result

    def _join(self, ticket: _Ticket[_Item, _Result]) -> list[_Ticket[_Item, _Result]] | None:
        """Return the batch if the caller is its first one, who has to close it."""
        with self._lock:
            if self._open is not None:
                self._open.append(ticket)
                return None
            self._open = [ticket]
            return self._open

    def _leave(
        self, ticket: _Ticket[_Item, _Result], batch: list[_Ticket[_Item, _Result]] | None
    ) -> None:
        """Give up waiting; the others go on, even if this was the one who had to plan."""
        ticket.leave()
        if batch is not None:
            self._close(batch)

    def _close(self, batch: list[_Ticket[_Item, _Result]]) -> None:
        """Plan what has come together, unless that is done, and let the first one go."""
        with self._lock:
            if self._open is not batch:
                return
            self._open = None
        waiting = [ticket for ticket in batch if not ticket.has_left]
        if not waiting:
            return
        line = waiting
        try:
            scheduled = self._schedule([ticket.item for ticket in waiting])
            assert sorted(position for position, _ in scheduled) == list(range(len(waiting)))
            for position, result in scheduled:
                waiting[position].results.append(result)
            line = [waiting[position] for position, _ in scheduled]
        except Exception as error:
            for ticket in waiting:
                ticket.error = error
        for ticket, follower in pairwise(line):
            ticket.follower = follower
        line[0].wake()


class _Ticket(Generic[_Item, _Result]):
    """A caller that waits; when it goes on, it passes the baton to its follower."""

    def __init__(
        self, item: _Item, wake: Callable[[], object], dropped: Callable[[_Result], object]
    ) -> None:
        self.item = item
        self.results: list[_Result] = []  # one, once it is planned
        self.error: Exception | None = None
        self.follower: _Ticket[_Item, _Result] | None = None
        self.has_left = False
        self._has_baton = False
        self._wake = wake
        self._dropped = dropped
        self._lock = Lock()

    def wake(self) -> None:
        """Hand over the baton; one who has left passes it on."""
        ticket: _Ticket[_Item, _Result] | None = self
        while ticket is not None and not ticket._takes_baton():
            ticket._drop_results()
            ticket = ticket.follower

    def go_on(self) -> _Result:
        """Return the result, or raise, with the baton passed on."""
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
            if self.has_left:
                return False
            self._has_baton = True
        try:
            self._wake()
        except RuntimeError:  # its event loop is closed
            return False
        return True

    def _drop_results(self) -> None:
        for result in self.results:
            self._dropped(result)


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
