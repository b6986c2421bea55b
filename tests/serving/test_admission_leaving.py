"""Requests that leave an admission queue, from any thread and event loop."""

import asyncio
import gc
import threading

import pytest
from admission_helpers import (
    assert_is_empty,
    assert_knows_only,
    cancelled,
    counting,
    queue_of,
    visited,
)
from planning_helpers import big_request, sent_ids
from virtual_time import virtual_time

from ctxreuse.serving.pool.admission import AdmissionSlot


def assert_nothing_is_left(queue, planner, visits):
    assert_is_empty(queue)
    assert_knows_only(planner, visits.plans)


@virtual_time
async def test_who_is_cancelled_while_others_are_waited_for_is_never_planned(monkeypatch):
    queue, planner, visits = visited()
    sizes = counting(planner, monkeypatch)
    left, stays = visits.task(big_request([1])), visits.task(big_request([2], "stays"))
    await asyncio.sleep(0.001)
    assert queue.waiting == 2
    await cancelled(left)
    assert queue.waiting == 1
    await stays
    assert (sizes, visits.queries) == ([1], ["stays"])
    assert_nothing_is_left(queue, planner, visits)


@virtual_time
async def test_who_is_cancelled_before_a_place_is_free_is_never_planned(monkeypatch):
    queue, planner, visits = visited()
    sizes = counting(planner, monkeypatch)
    first = visits.task(big_request([1]))
    await asyncio.sleep(0.5)
    left = visits.task(big_request([2]))
    await asyncio.sleep(0.1)
    await cancelled(left)
    assert (queue.running, queue.waiting) == (1, 0)
    await first
    assert sizes == [1]
    assert_nothing_is_left(queue, planner, visits)


@virtual_time
async def test_who_is_cancelled_in_the_line_is_passed_over_and_forgotten_by_the_planner():
    queue, planner, visits = visited()
    tasks = [visits.task(big_request([n], str(n))) for n in range(3)]
    await asyncio.sleep(0.5)
    assert (queue.running, queue.waiting, planner.statistics().requests) == (1, 2, 3)
    await cancelled(tasks[1])
    assert (queue.running, queue.waiting, planner.statistics().requests) == (1, 1, 2)
    await asyncio.gather(tasks[0], tasks[2])
    assert visits.queries == ["0", "2"]
    assert_nothing_is_left(queue, planner, visits)


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
    sent = sent
    assert visits.queries == ["3"]
    assert_is_empty(queue)
    assert_knows_only(planner, [sent, *visits.plans])


@virtual_time
async def test_a_request_that_is_sent_again_under_its_id_stays_known_though_it_was_cancelled():
    _, planner, visits = visited()
    first = visits.task(big_request([1]))
    left = visits.task(big_request([2], request_id="again"))
    await asyncio.sleep(0.5)
    await cancelled(left)
    again = visits.task(big_request([2], request_id="again"))
    await asyncio.gather(first, again)
    assert visits.plans[1].request_id == "again"
    assert_knows_only(planner, visits.plans)


@virtual_time
async def test_a_slot_is_for_one_request():
    queue, _ = queue_of()
    slot = AdmissionSlot(queue, big_request([1]))
    async with slot:
        pass
    with pytest.raises(AssertionError, match="an admission slot is for one request"):
        await slot.__aenter__()
    assert_is_empty(queue)


def in_threads(*mains):
    """Run each coroutine function in an event loop of its own, each in a thread of its own."""
    errors = []

    def run(main):
        try:
            asyncio.run(main())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(main,)) for main in mains]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert errors == []


def test_event_loops_in_several_threads_share_one_queue():
    queue, planner, visits = visited(concurrency=3, window_s=0.001)

    def visitors(thread):
        async def main():
            asked = [big_request([n % 4, 10 + n], f"{thread} {n}") for n in range(15)]
            plans = await asyncio.gather(*(visits.go(one, hold_s=0.0005) for one in asked))
            assert [plan.request for plan in plans] == asked
            assert [sorted(sent_ids(plan)) for plan in plans] == [
                [block.id for block in one.blocks] for one in asked
            ]

        return main

    in_threads(*(visitors(thread) for thread in range(4)))
    assert len(set(visits.queries)) == len(visits.queries) == 60
    assert visits.most <= 3
    assert_nothing_is_left(queue, planner, visits)


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


def abandon(loop, tasks):
    """Close an event loop under tasks that wait, as a program that does not clean up."""
    for task in tasks:
        task._log_destroy_pending = False
    loop.close()


def started(loop, visits, *requests, run_for_s=0.02):
    tasks = [loop.create_task(visits.go(one, hold_s=1_000)) for one in requests]
    loop.run_until_complete(asyncio.sleep(run_for_s))
    return tasks


def test_requests_that_wait_in_a_closed_event_loop_are_passed_over():
    queue, planner, visits = visited()
    here, gone = asyncio.new_event_loop(), asyncio.new_event_loop()
    (inside,) = started(here, visits, big_request([1]))
    waiting = started(gone, visits, big_request([2]), big_request([3]))
    other = here.create_task(visits.go(big_request([4], "other"), hold_s=0))
    here.run_until_complete(asyncio.sleep(0.02))
    assert (queue.running, queue.waiting) == (1, 3)
    abandon(gone, waiting)
    inside.cancel()
    here.run_until_complete(asyncio.wait([inside, other]))
    here.close()
    assert visits.queries == ["", "other"]
    assert_nothing_is_left(queue, planner, visits)


def test_places_that_a_closed_event_loop_held_come_back_with_its_tasks():
    queue, planner, visits = visited(concurrency=2)
    here, gone, also_gone = (asyncio.new_event_loop() for _ in range(3))
    (first,) = started(here, visits, big_request([1]))
    inside = started(gone, visits, big_request([2]))
    let_through = started(also_gone, visits, big_request([3]))
    first.cancel()
    here.run_until_complete(asyncio.wait([first]))
    other = here.create_task(visits.go(big_request([4], "other"), hold_s=0))
    here.run_until_complete(asyncio.sleep(0.02))
    assert (queue.running, queue.waiting) == (2, 1)
    abandon(gone, inside)
    abandon(also_gone, let_through)
    del inside, let_through
    gc.collect()
    here.run_until_complete(other)
    here.close()
    assert visits.queries == ["", "", "other"]
    assert_nothing_is_left(queue, planner, visits)
