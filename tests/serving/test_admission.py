"""Requests wait for an engine, are planned together as they wait, and leave."""

import asyncio
import gc
import threading
from itertools import groupby

import pytest
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st
from planning_helpers import assistant, big_request, sent_ids
from pool_helpers import until
from virtual_time import now, virtual_time

from ctxreuse import ContextRequest, ReusePlanner
from ctxreuse.serving.pool.admission import AdmissionQueue, AdmissionSlot
from virtual_clock import run_in_virtual_time

WINDOW_S = 0.005
pytestmark = pytest.mark.usefixtures("paper_words")


def queue_of(concurrency=1, window_s=WINDOW_S, planner=None, **arguments):
    planner = ReusePlanner() if planner is None else planner
    return AdmissionQueue(planner, concurrency, window_s, **arguments), planner


class Visits:
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
    queue, planner = queue_of(*arguments, **options)
    return queue, planner, Visits(queue)


async def cancelled(*tasks):
    for task in tasks:
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(one, asyncio.CancelledError) for one in ended)


def assert_is_empty(queue):
    assert (queue.running, queue.waiting) == (0, 0)
    assert not queue._queue.arrived
    assert not queue._queue.has_waiting()


def assert_knows_only(planner, plans):
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


visitors = st.lists(
    st.tuples(
        st.integers(0, 8),  # comes
        st.integers(0, 4),  # stays
        st.lists(st.integers(0, 5), max_size=4, unique=True),  # documents
        st.none() | st.integers(0, 12),  # is cancelled
    ),
    max_size=12,
)


@examples(80)
@given(visitors, st.integers(1, 3), st.sampled_from((0, 0.5, 2.0)))
def test_everybody_who_stays_gets_a_place_and_exactly_the_own_plan(visitors, places, window_s):
    queue, planner, visits = visited(places, window_s)

    async def visit(number, comes, stays, documents, is_cancelled):
        request = big_request(documents, f"query {number}")
        task = asyncio.create_task(visits.go(request, stays, at=comes))
        if is_cancelled is not None:
            asyncio.get_running_loop().call_later(is_cancelled, task.cancel)
        await asyncio.wait([task])
        if task.cancelled():
            return
        plan = task.result()
        assert plan.request is request
        assert sorted(sent_ids(plan)) == sorted(documents)

    async def main():
        async with asyncio.TaskGroup() as group:
            for number, visitor in enumerate(visitors):
                group.create_task(visit(number, *visitor))
        assert now() < 100

    run_in_virtual_time(main())
    assert visits.most <= places
    assert len(set(visits.queries)) == len(visits.queries)
    stayed = {f"query {n}" for n, visitor in enumerate(visitors) if visitor[3] is None}
    assert stayed <= set(visits.queries)
    assert_is_empty(queue)
    assert_knows_only(planner, visits.plans)
    assert queue.faults == 0


@virtual_time
async def test_who_comes_waits_for_others_even_if_there_is_a_place(monkeypatch):
    _, planner, visits = visited(concurrency=10)
    sizes = counting(planner, monkeypatch)
    requests = [big_request([n], str(n)) for n in range(4)]
    times = (0.0, 0.001, 0.004, 0.006)
    await asyncio.gather(*(visits.go(one, at=at) for one, at in zip(requests, times, strict=True)))
    assert sizes == [3, 1]
    assert visits.queries == ["0", "1", "2", "3"]
    assert visits.times == pytest.approx([0.005, 0.005, 0.005, 0.011])


@virtual_time
async def test_who_goes_does_not_cut_short_the_wait_of_those_who_have_just_come(monkeypatch):
    _, planner, visits = visited(concurrency=10)
    sizes = counting(planner, monkeypatch)
    await asyncio.gather(
        visits.go(big_request([1]), hold_s=1.0),
        visits.go(big_request([2]), at=1.004),
        visits.go(big_request([3]), at=1.006),  # the first one has just gone
    )
    assert sizes == [1, 2]
    assert visits.times == pytest.approx([0.005, 1.009, 1.009])


@virtual_time
async def test_without_a_window_those_who_come_at_the_same_moment_are_planned_together(monkeypatch):
    _, planner, visits = visited(concurrency=10, window_s=0)
    sizes = counting(planner, monkeypatch)
    await asyncio.gather(*(visits.go(big_request([n])) for n in range(5)))
    assert sizes == [5]
    assert visits.times == [0.0] * 5


@virtual_time
async def test_those_who_wait_together_go_grouped_by_what_they_share(monkeypatch):
    _, planner, visits = visited()
    sizes = counting(planner, monkeypatch)

    def texts(ids, query):
        return ContextRequest([f"{one} " * 100 for one in ids], query)

    first = visits.task(texts(["x"], "first"))
    await asyncio.sleep(0.5)
    asked = [texts([f"{one}1", f"{one}2", n], one) for n in range(3) for one in "abc"]
    assert [one.query for one in asked] == list("abcabcabc")
    await asyncio.gather(first, *(visits.go(one) for one in asked))
    assert sizes == [1, 9]
    runs = [query for query, _ in groupby(visits.queries)]
    assert runs[0] == "first"
    assert sorted(runs[1:]) == ["a", "b", "c"]
    assert sum(plan.expected_cached_tokens > 0 for plan in visits.plans) == 6


@virtual_time
async def test_requests_are_planned_on_top_of_what_was_sent_unless_the_strategy_is_none():
    _, _, visits = visited()
    await visits.go(big_request([1, 2, 3]))
    plan = await visits.go(big_request([9, 3, 2, 1]))
    assert sent_ids(plan) == [1, 2, 3, 9]
    assert plan.expected_cached_tokens == 300

    _, _, visits = visited(strategy="none")
    asked = [big_request(ids, str(n)) for n, ids in enumerate(([1, 2], [3], [2, 1], [3]))]
    await asyncio.gather(*(visits.go(one) for one in asked))
    assert visits.queries == ["0", "1", "2", "3"]
    assert [sent_ids(plan) for plan in visits.plans] == [[1, 2], [3], [2, 1], [3]]


@virtual_time
async def test_nobody_who_was_planned_is_overtaken_by_those_who_come_later():
    _, _, visits = visited()
    tasks = [visits.task(big_request([1, 2], "a")), visits.task(big_request([3, 4], "b"))]
    for late in range(5):
        await asyncio.sleep(0.5)
        tasks.append(visits.task(big_request([1, 2], f"late {late}")))
    await asyncio.gather(*tasks)
    assert sorted(visits.queries[:2]) == ["a", "b"]
    assert visits.queries[2:] == [f"late {late}" for late in range(5)]


@virtual_time
async def test_requests_without_blocks_take_turns_with_those_that_wait_to_be_planned():
    queue, _, visits = visited()
    first = visits.task(big_request(["a"], "first"))
    await asyncio.sleep(0.1)
    planned = [visits.task(big_request(["a"], f"line {n}")) for n in range(3)]
    await asyncio.sleep(0.1)
    plain = [visits.task(ContextRequest([], f"plain {n}")) for n in range(2)]
    await asyncio.gather(first, *planned, *plain)
    assert visits.queries == ["first", "plain 0", "line 0", "plain 1", "line 1", "line 2"]
    assert_is_empty(queue)


@pytest.mark.parametrize("asked", [ContextRequest([]), ReusePlanner().plan(big_request([1]))])
@virtual_time
async def test_what_is_not_to_be_planned_waits_for_nobody_if_there_is_a_place(asked):
    _, _, visits = visited(window_s=5)
    await visits.go(asked)
    assert visits.times == [0]


@virtual_time
async def test_a_plan_of_a_later_turn_keeps_its_references():
    _, planner, visits = visited()
    other = ReusePlanner()
    first = other.plan(big_request([1], history=[], conversation_id="c"))
    history = [*first.messages(), assistant("Yes.")]
    second = other.plan(big_request([2, 1], history=history, conversation_id="c"))
    assert second.references == (1,)
    sent = [await visits.go(first), await visits.go(second)]
    assert [one.messages() for one in sent] == [first.messages(), second.messages()]
    assert_knows_only(planner, sent)


@virtual_time
async def test_a_plan_that_is_cancelled_is_forgotten():
    _, planner, visits = visited()
    plan = ReusePlanner().plan(big_request([2, 1]))
    first = visits.task(big_request([3]))
    await asyncio.sleep(0.1)
    second = visits.task(plan)
    await asyncio.sleep(0.1)
    assert planner.statistics().requests == 2
    await cancelled(second)
    assert planner.statistics().requests == 1
    await first
    assert_knows_only(planner, visits.plans)


def broken(*arguments, **more):
    raise ZeroDivisionError


@virtual_time
async def test_where_planning_a_batch_fails_all_go_as_they_came(monkeypatch):
    queue, planner, visits = visited()
    planner.plan(big_request([1, 2]))
    monkeypatch.setattr(planner, "plan_batch", broken)
    asked = [big_request(ids, str(n)) for n, ids in enumerate(([2, 1], [3], [2, 1]))]
    await asyncio.gather(*(visits.go(one) for one in asked))
    assert visits.queries == ["0", "1", "2"]
    assert [sent_ids(plan) for plan in visits.plans] == [[2, 1], [3], [2, 1]]
    assert [plan.expected_cached_tokens for plan in visits.plans] == [0, 0, 200]
    assert queue.faults == 1
    assert_is_empty(queue)


@virtual_time
async def test_what_cannot_be_planned_even_alone_fails_alone(monkeypatch):
    queue, planner, visits = visited()
    alone = queue._planned_as_it_came
    monkeypatch.setattr(planner, "plan_batch", broken)
    monkeypatch.setattr(
        queue, "_planned_as_it_came", lambda one: alone(one) if one.query else broken()
    )
    asked = [big_request([n], query) for n, query in enumerate(["0", "", "2"])]
    results = await asyncio.gather(*map(visits.go, asked), return_exceptions=True)
    assert [isinstance(one, Exception) for one in results] == [False, True, False]
    assert visits.queries == ["0", "2"]
    assert_is_empty(queue)


@virtual_time
async def test_where_the_planner_fails_altogether_all_go_as_they_came_and_nothing_is_recorded(
    monkeypatch,
):
    queue, planner, visits = visited()
    plan = ReusePlanner().plan(big_request([8, 7], "plan"))
    monkeypatch.setattr(planner, "plan_batch", broken)
    monkeypatch.setattr(planner, "plan", broken)
    asked = [big_request([2, 1], "0"), plan, big_request([3], "2", request_id="mine")]
    await asyncio.gather(*(visits.go(one) for one in asked))
    assert visits.queries == ["plan", "0", "2"]
    assert visits.plans[0].messages() == plan.messages()
    assert visits.plans[1].content == "[Doc_2] text of 2\n\n[Doc_1] text of 1\n\n0"
    ids = [one.request_id for one in visits.plans]
    assert ids[2] == "mine"
    assert [one.startswith("unplanned-") for one in ids] == [True, True, False]
    assert ids[0] != ids[1], "no other request's by accident"
    assert planner.evict(ids).unknown == tuple(ids)
    assert queue.faults == 4  # the batch, then each of the three
    assert_is_empty(queue)


def test_an_interrupt_while_planning_is_for_one_and_the_others_hear_of_it(monkeypatch):
    queue, planner, visits = visited()

    def interrupted(*arguments):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(planner, "plan_batch", interrupted)
    loop = asyncio.new_event_loop()
    tasks = [loop.create_task(visits.go(big_request([n]), hold_s=0)) for n in range(3)]
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(asyncio.wait(tasks))
    loop.run_until_complete(asyncio.wait(tasks))
    errors = [task.exception() for task in tasks]
    assert sorted(type(error).__name__ for error in errors) == [
        "KeyboardInterrupt",
        "RuntimeError",
        "RuntimeError",
    ]
    plan = loop.run_until_complete(visits.go(big_request([7]), hold_s=0))
    loop.close()
    assert_is_empty(queue)
    assert_knows_only(planner, [plan])


def assert_nothing_is_left(queue, planner, visits):
    assert_is_empty(queue)
    assert_knows_only(planner, visits.plans)


@pytest.mark.parametrize("turns_of_the_loop", [0, 1])
@virtual_time
async def test_who_is_cancelled_between_release_and_going_on_gives_the_place_back(
    turns_of_the_loop,
):
    queue, planner, visits = visited()
    first = AdmissionSlot(queue, big_request([1]))
    sent = await first.__aenter__()
    second, third = visits.task(big_request([2], "2")), visits.task(big_request([3], "3"))
    await asyncio.sleep(0.5)
    assert (queue.running, queue.waiting) == (1, 2)
    await first.__aexit__(None, None, None)
    assert (queue.running, queue.waiting) == (1, 1)  # the second was released
    for _ in range(turns_of_the_loop):
        await asyncio.sleep(0)
    assert visits.plans == []
    await cancelled(second)
    await third
    assert visits.queries == ["3"]
    assert_is_empty(queue)
    assert_knows_only(planner, [sent, *visits.plans])


async def test_many_are_planned_in_a_thread_and_count_as_waiting_meanwhile(monkeypatch):
    queue, planner, visits = visited(concurrency=200, window_s=0)
    planning, go_on, threads = threading.Event(), threading.Event(), []
    plan_batch = planner.plan_batch

    def slow(*arguments):
        threads.append(threading.get_ident())
        planning.set()
        assert go_on.wait(10)
        return plan_batch(*arguments)

    monkeypatch.setattr(planner, "plan_batch", slow)
    tasks = [visits.task(big_request([n]), 0) for n in range(100)]
    while not planning.is_set():
        await asyncio.sleep(0.001)
    assert (queue.running, queue.waiting) == (0, 100)
    await cancelled(*tasks[:40])
    assert (queue.running, queue.waiting) == (0, 60)
    go_on.set()
    await asyncio.gather(*tasks[40:])
    assert threading.get_ident() not in threads
    assert sorted(sent_ids(plan)[0] for plan in visits.plans) == list(range(40, 100))
    assert_nothing_is_left(queue, planner, visits)


def started(loop, visits, request, holds, hold_s=1_000):
    task = loop.create_task(visits.go(request, hold_s))
    loop.run_until_complete(until(holds))
    return task


def abandon(loop, task):
    """Close an event loop under a task that waits, as a program that does not clean up."""
    task._log_destroy_pending = False
    loop.close()


def test_places_that_a_closed_event_loop_held_come_back_with_its_tasks():
    queue, planner, visits = visited(concurrency=2)
    here, gone, also_gone = (asyncio.new_event_loop() for _ in range(3))
    first = started(here, visits, big_request([1]), lambda: len(visits.plans) == 1)
    inside = started(gone, visits, big_request([2]), lambda: len(visits.plans) == 2)
    let_through = started(also_gone, visits, big_request([3]), lambda: queue._window_elapsed)
    first.cancel()
    here.run_until_complete(asyncio.wait([first]))
    other = started(here, visits, big_request([4], "other"), lambda: queue._window_elapsed, 0)
    assert (queue.running, queue.waiting) == (2, 1)
    abandon(gone, inside)
    abandon(also_gone, let_through)
    del inside, let_through
    gc.collect()
    here.run_until_complete(other)
    here.close()
    assert visits.queries == ["", "", "other"]
    assert_nothing_is_left(queue, planner, visits)
