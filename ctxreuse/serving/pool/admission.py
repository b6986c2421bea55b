"""Admission: requests wait for an engine, and those that wait together are planned together.

Prompts that share a prefix then run back to back. Planned requests go before all that come later,
so none starves. A plan's order stands, and a request without blocks has none: they wait for nobody
to be planned with, and have a lane of their own. The two lanes take turns.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from secrets import token_hex
from typing import TypeAlias

from ctxreuse.context.blocks import ContextRequest
from ctxreuse.context.checks import checked_integer
from ctxreuse.context.fail_open import FailOpen
from ctxreuse.context.fork_safety import renew_after_fork
from ctxreuse.pipeline.engine_options import planning_time
from ctxreuse.pipeline.ordered_release import (
    DEFAULT_WINDOW_S,
    PLANNED_ON_THE_LOOP,
    OrderedQueue,
    Slot,
    SlotState,
    TaskWaiter,
    checked_window,
    planned_aside,
)
from ctxreuse.planner import ReusePlanner, Strategy, check_strategy
from ctxreuse.planning.plan import Plan
from ctxreuse.sharing.environment import as_given

Plannable: TypeAlias = ContextRequest | Plan
"""A request to plan, or a plan whose order stands."""

_Slot: TypeAlias = Slot[ContextRequest, Plan]
_PLANNED_LANE, _PLAIN_LANE = 0, 1


class AdmissionQueue:
    """Lets some requests at a time go to an engine, planned as they wait; in any event loops."""

    def __init__(
        self,
        planner: ReusePlanner,
        concurrency: int = 256,
        window_s: float = DEFAULT_WINDOW_S,
        strategy: Strategy = "reuse",
    ) -> None:
        checked_integer("concurrency", concurrency, 1)
        check_strategy(strategy)
        self._planner = planner
        self._window_s = checked_window(window_s)
        self._strategy = strategy
        self._fail_open = FailOpen(
            "AdmissionQueue",
            "requests go on in the order in which they came",
            tell=planner.note_failure,
        )
        self._concurrency = concurrency
        self._start_anew()
        renew_after_fork(self._start_anew)

    def _start_anew(self) -> None:
        """Have no requests: in a child, those of the parent's threads never leave."""
        self._queue: OrderedQueue[ContextRequest, Plan] = OrderedQueue(
            self._concurrency, unused=self.forget, lanes=2
        )
        self._is_planning = False
        self._window_elapsed = False  # for a request that still waits to be planned

    @property
    def faults(self) -> int:
        """How often planning has failed and requests went on as they came."""
        return self._fail_open.faults

    @property
    def running(self) -> int:
        """How many requests are released and have not ended."""
        return self._queue.running

    @property
    def waiting(self) -> int:
        """How many requests wait, those that are being planned included."""
        with self._queue.lock:
            return self._queue.present - self._queue.running

    def forget(self, plan: Plan) -> None:
        """Make the planner forget a plan that is not sent, or was not answered."""
        self._fail_open.attempt(lambda: self._planner.forget(plan))

    def _admit(self) -> None:
        """Release requests as long as there are places; plan those that have come, if due."""
        while True:
            slots = self._due()
            if not slots:
                self._queue.release()
                slots = self._due()
            if not slots:
                return
            try:
                self._queue.plan(slots, self._planned)
            finally:
                self._is_planning = False

    def _due(self) -> list[_Slot]:
        """Take the requests to plan now; none if others go first, or are being planned."""
        queue = self._queue
        with queue.lock:
            is_next = queue.running < queue.places and not queue.has_waiting(_PLANNED_LANE)
            if not (is_next and self._window_elapsed) or self._is_planning:
                return []
            self._window_elapsed = False
            slots = list(queue.arrived)
            queue.arrived.clear()
            self._is_planning = bool(slots)
            return slots

    def _planned(self, slots: list[_Slot]) -> list[_Slot]:
        asked = [slot.item for slot in slots]
        planned = self._fail_open.attempt(
            lambda: self._planner.plan_batch(asked, self._strategy, **planning_time(self._planner)),
            lambda: None,
        )
        if planned is not None:
            line = [slots[position] for position in planned.order]
            for slot, plan in zip(line, planned.plans, strict=True):
                slot.results = [plan]
            return line
        for slot in slots:
            try:
                slot.results = [self._planned_as_it_came(slot.item)]
            except Exception as error:
                slot.error = error
        return slots

    def _planned_as_it_came(self, request: Plannable) -> Plan:
        return self._fail_open.attempt(
            lambda: (
                recorded(self._planner, request)
                if isinstance(request, Plan)
                else self._planner.plan(request, "none", **planning_time(self._planner))
            ),
            lambda: self._unrecorded(request),
        )

    def _unrecorded(self, request: Plannable) -> Plan:
        if isinstance(request, Plan):
            plan, given_id = request, request.request.request_id
        else:
            # with counts of its own
            spare = as_given(ReusePlanner, templates=self._planner.templates)
            plan, given_id = spare.plan(request, "none"), request.request_id
        if given_id is None:  # an id of another planner may be another request's here
            given_id = f"unplanned-{token_hex(8)}"  # a count would show other tenants' requests
        return replace(plan, request_id=given_id, expected_cached_tokens=0, logged=None)


class AdmissionSlot:
    """Waits for a place in a queue, gives what to send, and holds the place for its block, once."""

    # no generator: one that is left behind by a closed event loop never runs to its end

    def __init__(self, admission: AdmissionQueue, request: Plannable) -> None:
        self._admission = admission
        self._request = request
        self._slot: _Slot | None = None

    async def __aenter__(self) -> Plan:
        """Wait for others, then for a place; return what to send."""
        assert self._slot is None, "an admission slot is for one request"
        admission, queue, request = self._admission, self._admission._queue, self._request
        asked = request.request if isinstance(request, Plan) else request
        is_plain = asked is not request or (admission._strategy != "none" and not request.blocks)
        plan = admission._planned_as_it_came(request) if is_plain else None
        self._slot = slot = Slot(queue, asked, plan)
        try:
            waiter = TaskWaiter(slot)
            if is_plain:
                queue.line_up([slot], _PLAIN_LANE)
            else:
                await waiter.wait(admission._window_s)
            if slot.state is not SlotState.RUNNING:
                with queue.lock:
                    admission._window_elapsed |= slot in queue.arrived
                await planned_aside(admission._admit, len(queue.arrived))
            await waiter.wait()
            plan = slot.take()
            assert plan is not None, "a request that is released is planned"
        except BaseException:
            await self.__aexit__()
            raise
        return plan

    async def __aexit__(self, *error: object) -> None:
        """Give up the place, or waiting for one; release others."""
        assert self._slot is not None, "a slot that ends has begun"
        admission, queue = self._admission, self._admission._queue
        self._slot.leave(release=False)
        with queue.lock:
            admission._window_elapsed &= bool(queue.arrived)
        if len(queue.arrived) > PLANNED_ON_THE_LOOP:
            with suppress(RuntimeError):  # its loop is closing or closed; others wait in theirs
                asyncio.get_running_loop().run_in_executor(None, admission._admit)
                return
        admission._admit()


def recorded(planner: ReusePlanner, plan: Plan) -> Plan:
    """Return a plan as one that this planner has recorded as sent; the prompt stays the same."""
    again = replace(plan.request, blocks=plan.blocks, request_id=None, outdated=(), labels=None)
    noted = planner.plan(again, "none", deduplicate=False, **planning_time(planner))
    return replace(
        plan,
        request_id=noted.request_id,
        expected_cached_tokens=noted.expected_cached_tokens,
        logged=noted.logged,
    )
