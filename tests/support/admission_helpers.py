"""What the tests of the admission queue share: visitors that come, run and leave."""

import asyncio
import threading

from ctxreuse import ReusePlanner
from ctxreuse.serving.pool.admission import AdmissionQueue, AdmissionSlot

WINDOW_S = 0.005


def now():
    return asyncio.get_running_loop().time()


def queue_of(concurrency=1, window_s=WINDOW_S, planner=None, **arguments):
    planner = ReusePlanner() if planner is None else planner
    return AdmissionQueue(planner, concurrency, window_s, **arguments), planner


class Visits:
    """Sends requests through a queue, and notes which ran when."""

    def __init__(self, queue):
        self.queue = queue
        self.plans = []  # of all that were released, in that order
        self.times = []
        self.most = 0
        self._running = 0
        self._lock = threading.Lock()

    async def go(self, request, hold_s=1.0, at=None):
        """Come at a time, hold a place for a while; return the plan."""
        if at is not None:
            await asyncio.sleep(at - now())
        async with AdmissionSlot(self.queue, request) as plan:
            with self._lock:
                self._running += 1
                self.most = max(self.most, self._running)
                self.plans.append(plan)
                self.times.append(now())
            try:
                await asyncio.sleep(hold_s)
            finally:
                with self._lock:
                    self._running -= 1
            return plan

    def task(self, request, hold_s=1.0):
        return asyncio.create_task(self.go(request, hold_s))

    @property
    def queries(self):
        return [plan.request.query for plan in self.plans]


def visited(*arguments, **options):
    """Return a queue, its planner, and visits to it."""
    queue, planner = queue_of(*arguments, **options)
    return queue, planner, Visits(queue)


async def cancelled(*tasks):
    """Cancel tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(one, asyncio.CancelledError) for one in ended)


def assert_is_empty(queue):
    assert (queue.running, queue.waiting) == (0, 0)
    assert not queue._queue.arrived
    assert not queue._queue.has_waiting()


def assert_knows_only(planner, plans):
    """Check that the planner has recorded these plans, and no others, as sent."""
    assert planner.statistics().requests == len(plans)
    assert planner.evict([plan.request_id for plan in plans]).unknown == ()
    assert planner.statistics().tokens == 0


def counting(planner, monkeypatch):
    """Return a list that gets the size of each batch as it is planned."""
    sizes, plan_batch = [], planner.plan_batch

    def counted(requests, *arguments):
        sizes.append(len(requests))
        return plan_batch(requests, *arguments)

    monkeypatch.setattr(planner, "plan_batch", counted)
    return sizes
