"""Where requests wait for an engine, so that those that wait together are planned together.

An engine that is given everything at once runs it in the order in which it came. Held back here
until the engine has a place for them, requests that wait at the same time are planned as one batch
on top of what the engine's cache holds: prompts that share a prefix then run back to back, whoever
sent them. Whoever has been planned goes before whoever comes later, so nobody waits for ever.

A request without blocks has nothing to be planned for, so it does not wait for a batch to end: such
requests stand in a line of their own, and the two lines take turns.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import replace
from itertools import count
from threading import RLock
from types import TracebackType
from typing import TypeAlias

from ctxreuse.adapters.micro_batch import DEFAULT_WINDOW_S, checked_window
from ctxreuse.context.blocks import ContextRequest
from ctxreuse.context.fail_open import FailOpen
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.planner import ReusePlanner, Strategy, check_strategy
from ctxreuse.planning.plan import Plan

Plannable: TypeAlias = ContextRequest | Plan
"""A request to plan, or a plan whose order stands."""

_PLANNED_ON_THE_LOOP = 64
"""More requests than these are planned in a thread, so that the event loop stays responsive."""


class AdmissionQueue:
    """Lets so many requests at a time go to an engine, planned together as they wait.

    Tasks of several event loops may wait in one room, each loop in a thread of its own.

    Args:
        planner: Plans them, on top of what the engine has been sent.
        concurrency: How many are let through at a time.
        window_s: Seconds for which a request waits for others even if there is a place.
        strategy: "reuse", "paper" or "none" (in the order in which they come).

    Raises:
        InvalidRequestError: If an argument is of the wrong kind.
        UnknownStrategyError: If there is no such strategy.
    """

    def __init__(
        self,
        planner: ReusePlanner,
        concurrency: int = 256,
        window_s: float = DEFAULT_WINDOW_S,
        strategy: Strategy = "reuse",
    ) -> None:
        if not isinstance(planner, ReusePlanner):
            raise InvalidRequestError(f"planner must be a ReusePlanner, not {describe(planner)}")
        if not isinstance(concurrency, int) or concurrency < 1:
            raise InvalidRequestError(
                f"concurrency must be an integer from 1, not {describe(concurrency)}"
            )
        check_strategy(strategy)
        self._planner = planner
        self._concurrency = concurrency
        self._window_s = checked_window(window_s)
        self._strategy = strategy
        self._fail_open = FailOpen(
            "AdmissionQueue", "requests go on in the order in which they came"
        )
        # a collected task may leave while this very thread holds the lock
        self._lock = RLock()
        self._arrived: OrderedDict[_Ticket, None] = OrderedDict()
        self._line: OrderedDict[_Ticket, None] = OrderedDict()
        self._plain: OrderedDict[_Ticket, None] = OrderedDict()  # those without blocks
        self._is_plains_turn = False
        self._present = 0
        self._inside = 0
        self._is_planning = False
        self._is_due = False  # whether somebody has waited for others long enough
        self._unplanned_number = count()

    @property
    def faults(self) -> int:
        """How often planning has failed and requests went on as they came."""
        return self._fail_open.faults

    @property
    def inside(self) -> int:
        """How many requests are let through and have not ended."""
        return self._inside

    @property
    def waiting(self) -> int:
        """How many requests wait; those that are being planned do, too."""
        with self._lock:
            return self._present - self._inside

    def turn(self, request: Plannable) -> Turn:
        """Wait until there is a place; hold it as long as the `async with` block runs.

        Args:
            request: A request, which is planned here; or a plan, which is sent as it is.

        Returns:
            A context manager that gives what to send. The caller tells the planner if it was not
            sent after all.
        """
        return Turn(self, request)

    def _arrive(self, request: Plannable) -> _Ticket:
        ticket = _Ticket(request, asyncio.get_running_loop())
        is_plain = self._strategy != "none" and not request.blocks
        if is_plain:
            ticket.plan = self._planned_as_it_came(request)
        with self._lock:
            (self._plain if is_plain else self._arrived)[ticket] = None
            self._present += 1
        return ticket

    async def _wait(self, ticket: _Ticket) -> Plan:
        """Wait for others, then for a place; return what to send."""
        if ticket not in self._plain:
            await asyncio.wait([ticket.answer], timeout=self._window_s)
        if not ticket.answer.done():
            with self._lock:
                self._is_due = self._is_due or ticket in self._arrived
            if len(self._arrived) > _PLANNED_ON_THE_LOOP:
                await ticket.loop.run_in_executor(None, self._admit)
            else:
                self._admit()
        plan = await ticket.answer
        ticket.was_taken = True
        return plan

    def _admit(self) -> None:
        """Let requests through as long as there are places; plan those that have come, if due."""
        while True:
            with self._lock:
                if not self._should_plan():
                    while (self._line or self._plain) and self._inside < self._concurrency:
                        self._let_through(self._next())
                    if not self._should_plan():
                        return
                batch = list(self._arrived)
                self._arrived.clear()
                self._is_due = False
                self._is_planning = True
            line = batch
            try:
                line = self._planned(batch)
            except BaseException:  # an interrupt, which is for this caller alone
                for ticket in batch:
                    ticket.error = RuntimeError("planning was interrupted")
                raise
            finally:
                with self._lock:
                    self._is_planning = False
                    for ticket in line:
                        if ticket.has_left:
                            self._forget(ticket)
                        else:
                            self._line[ticket] = None

    def _should_plan(self) -> bool:
        """Return whether those who have come are next, and nobody plans them yet."""
        is_free = self._inside < self._concurrency and not self._line
        return is_free and self._is_due and not self._is_planning

    def _let_through(self, ticket: _Ticket) -> None:
        self._inside += 1
        ticket.is_inside = True
        if not ticket.is_told():
            self._drop(ticket)

    def _next(self) -> _Ticket:
        """Take the first one out of a line: the two lines take turns. The caller has the lock."""
        line = (
            self._plain if self._plain and (self._is_plains_turn or not self._line) else self._line
        )
        self._is_plains_turn = line is self._line
        ticket, _ = line.popitem(last=False)
        return ticket

    def _planned(self, batch: list[_Ticket]) -> list[_Ticket]:
        """Plan what waits; return it in the order in which to go."""
        line = self._fail_open.attempt(lambda: self._plan_together(batch), lambda: None)
        if line is not None:
            return line
        for ticket in batch:
            if ticket.plan is None:
                try:
                    ticket.plan = self._planned_as_it_came(ticket.request)
                except Exception as error:
                    ticket.error = error
        return batch

    def _plan_together(self, batch: list[_Ticket]) -> list[_Ticket]:
        requests = [ticket for ticket in batch if isinstance(ticket.request, ContextRequest)]
        planned = self._planner.plan_batch(
            [ticket.request for ticket in requests if isinstance(ticket.request, ContextRequest)],
            self._strategy,
        )
        line = []
        for position, plan in zip(planned.order, planned.plans, strict=True):
            requests[position].plan = plan
            line.append(requests[position])
        for ticket in batch:
            if isinstance(ticket.request, Plan):
                ticket.plan = recorded(self._planner, ticket.request)
                line.append(ticket)
        return line

    def _planned_as_it_came(self, request: Plannable) -> Plan:
        return self._fail_open.attempt(
            lambda: (
                recorded(self._planner, request)
                if isinstance(request, Plan)
                else self._planner.plan(request, "none")
            ),
            lambda: self._unrecorded(request),
        )

    def _unrecorded(self, request: Plannable) -> Plan:
        """Return a plan that the planner, which cannot, has not recorded."""
        if isinstance(request, Plan):
            plan, given_id = request, request.request.request_id
        else:
            spare = ReusePlanner(templates=self._planner.templates)  # counts nothing with ours
            plan, given_id = spare.plan(request, "none"), request.request_id
        if given_id is None:  # an id of another planner may be another request's here
            given_id = f"unplanned-{next(self._unplanned_number)}"
        return replace(plan, request_id=given_id, expected_cached_tokens=0, logged=None)

    def _leave(self, ticket: _Ticket) -> None:
        """Give up a place, or waiting for one; let others in."""
        with self._lock:
            self._drop(ticket)
        if len(self._arrived) > _PLANNED_ON_THE_LOOP:
            try:
                ticket.loop.run_in_executor(None, self._admit)
            except RuntimeError:  # its event loop is closing or closed; others wait in theirs
                self._admit()
        else:
            self._admit()

    def _drop(self, ticket: _Ticket) -> None:
        """Take a request out, wherever it is. The caller holds the lock."""
        if ticket.has_left:
            return
        ticket.has_left = True
        self._present -= 1
        self._inside -= ticket.is_inside
        self._arrived.pop(ticket, None)
        self._line.pop(ticket, None)
        self._plain.pop(ticket, None)
        self._is_due = self._is_due and bool(self._arrived)
        self._forget(ticket)

    def _forget(self, ticket: _Ticket) -> None:
        """Tell the planner, once, if what it has planned was never handed out."""
        plan, ticket.plan = ticket.plan, None
        if plan is not None and not ticket.was_taken:
            self._planner.evict([plan.request_id])


class Turn:
    """A request's turn in a waiting room, for one `async with`; made by `AdmissionQueue.turn`."""

    # no generator: one that is left behind by a closed event loop never runs to its end

    def __init__(self, room: AdmissionQueue, request: Plannable) -> None:
        self._room = room
        self._request = request
        self._ticket: _Ticket | None = None

    async def __aenter__(self) -> Plan:
        """Wait for a place; return what to send."""
        assert self._ticket is None, "a turn is for one request"
        ticket = self._ticket = self._room._arrive(self._request)
        try:
            return await self._room._wait(ticket)
        except BaseException:
            self._room._leave(ticket)
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give the place back."""
        assert self._ticket is not None, "a turn that ends has begun"
        self._room._leave(self._ticket)


class _Ticket:
    """A request that waits, and what was planned for it."""

    def __init__(self, request: Plannable, loop: asyncio.AbstractEventLoop) -> None:
        self.request = request
        self.loop = loop
        self.answer: asyncio.Future[Plan] = loop.create_future()
        self.plan: Plan | None = None
        self.error: Exception | None = None
        self.is_inside = False
        self.has_left = False
        self.was_taken = False

    def is_told(self) -> bool:
        """Send the request its answer; return whether its event loop takes it."""
        try:
            self.loop.call_soon_threadsafe(self._tell)
        except RuntimeError:  # its event loop is closed
            return False
        return True

    def _tell(self) -> None:
        if self.has_left or self.answer.done():
            return
        if self.error is not None:
            self.answer.set_exception(self.error)
        else:
            assert self.plan is not None
            self.answer.set_result(self.plan)


def recorded(planner: ReusePlanner, plan: Plan) -> Plan:
    """Return a plan that some planner made, as one that this planner has recorded as sent.

    What is sent stays the same; request id and expected cached tokens are this planner's.
    """
    request = plan.request
    again = ContextRequest(
        plan.blocks,
        request.query,
        system=request.system,
        history=request.history,
        conversation_id=request.conversation_id,
        tenant=request.tenant,
    )
    noted = planner.plan(again, "none", deduplicate=False)
    return replace(
        plan,
        request_id=noted.request_id,
        expected_cached_tokens=noted.expected_cached_tokens,
        logged=noted.logged,
    )
