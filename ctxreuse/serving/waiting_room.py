"""Where requests wait for an engine, so that those that wait together are planned together.

An engine that is given everything at once runs it in the order in which it came. Held back here
until the engine has a place for them, requests that wait at the same time are planned as one batch
on top of what the engine's cache holds: prompts that share a prefix then run back to back, whoever
sent them. Whoever has been planned goes before whoever comes later, so nobody waits for ever.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from threading import Lock
from typing import TypeAlias

from ctxreuse.blocks import ContextRequest
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.fail_open import FailOpen
from ctxreuse.planner import ReusePlanner, Strategy, check_strategy
from ctxreuse.plans import Plan
from ctxreuse.serving.window import DEFAULT_WINDOW_S, checked_window

Plannable: TypeAlias = ContextRequest | Plan
"""A request to plan, or a plan whose order stands."""

_PLANNED_ON_THE_LOOP = 64
"""More requests than these are planned in a thread, so that the event loop stays responsive."""


class WaitingRoom:
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
        self._fail_open = FailOpen("WaitingRoom", "requests go on in the order in which they came")
        self._lock = Lock()
        self._arrived: list[_Ticket] = []
        self._line: deque[_Ticket] = deque()
        self._inside = 0
        self._is_planning = False

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
        """How many requests wait."""
        return len(self._arrived) + len(self._line)

    @asynccontextmanager
    async def turn(self, request: Plannable) -> AsyncIterator[Plan]:
        """Wait until there is a place; hold it as long as the block runs.

        Args:
            request: A request, which is planned here; or a plan, which is sent as it is.

        Yields:
            What to send. The caller tells the planner if it was not sent after all.
        """
        ticket = _Ticket(request, asyncio.get_running_loop())
        with self._lock:
            self._arrived.append(ticket)
        try:
            await asyncio.wait([ticket.answer], timeout=self._window_s)
            if not ticket.answer.done():
                if len(self._arrived) > _PLANNED_ON_THE_LOOP:
                    await ticket.loop.run_in_executor(None, self._admit)
                else:
                    self._admit()
            plan = await ticket.answer
            ticket.was_taken = True
            yield plan
        finally:
            self._leave(ticket)

    def _admit(self) -> None:
        """Let requests through as long as there are places; plan those that have come together."""
        while True:
            with self._lock:
                while self._line and self._inside < self._concurrency:
                    ticket = self._line.popleft()
                    if ticket.let_through():
                        self._inside += 1
                    else:
                        self._forget(ticket)
                is_full = self._inside >= self._concurrency
                if is_full or self._is_planning or not self._arrived:
                    return
                batch = [ticket for ticket in self._arrived if not ticket.has_left]
                self._arrived = []
                self._is_planning = True
            try:
                line = self._planned(batch)
            finally:
                with self._lock:
                    self._is_planning = False
            with self._lock:
                self._line.extend(line)

    def _planned(self, batch: list[_Ticket]) -> list[_Ticket]:
        """Plan what waits; return it in the order in which to go."""
        line = self._fail_open.attempt(lambda: self._plan_together(batch), lambda: None)
        if line is not None:
            return line
        for ticket in batch:
            try:
                ticket.plan = self._plan_alone(ticket.request, "none")
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
                ticket.plan = self._plan_alone(ticket.request, "none")
                line.append(ticket)
        return line

    def _plan_alone(self, request: Plannable, strategy: Strategy) -> Plan:
        if isinstance(request, ContextRequest):
            return self._planner.plan(request, strategy)
        return recorded(self._planner, request)

    def _leave(self, ticket: _Ticket) -> None:
        """Give up a place, or waiting for one."""
        with self._lock:
            ticket.has_left = True
            if ticket.is_inside:
                self._inside -= 1
        self._forget(ticket)
        if len(self._arrived) > _PLANNED_ON_THE_LOOP:
            ticket.loop.run_in_executor(None, self._admit)
        else:
            self._admit()

    def _forget(self, ticket: _Ticket) -> None:
        """Tell the planner if what it has planned was never handed out."""
        if ticket.plan is not None and not ticket.was_taken:
            self._planner.evict([ticket.plan.request_id])


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

    def let_through(self) -> bool:
        """Give the request its place; return whether it takes it."""
        if self.has_left:
            return False
        try:
            self.loop.call_soon_threadsafe(self._tell)
        except RuntimeError:  # its event loop is closed
            self.has_left = True
            return False
        self.is_inside = True
        return True

    def _tell(self) -> None:
        if self.answer.done():
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
