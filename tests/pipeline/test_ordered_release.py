"""Calls that wait, are planned together, and go on in the planned order."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.pipeline.ordered_release import (
    PLANNED_ON_THE_LOOP,
    OrderedQueue,
    Slot,
    SlotState,
    TaskWaiter,
    in_event_loop,
    planned_aside,
    run_here,
)
from virtual_clock import run_in_virtual_time


def note(slot, name, woken, is_gone=False):
    """Note when a slot is woken; one whose event loop is closed cannot be."""

    def wake():
        if is_gone:
            raise RuntimeError("Event loop is closed")
        woken.append(name)

    slot.attach(wake)


def lined_up(queue, names, woken, gone=(), **where):
    slots = [Slot(queue, name, f"plan of {name}") for name in names]
    for slot in slots:
        note(slot, slot.item, woken, slot.item in gone)
    queue.line_up(slots, **where)
    return slots


def test_calls_that_left_or_whose_event_loop_is_closed_are_passed_over_and_told_once():
    unused, woken = [], []
    queue = OrderedQueue(unused=unused.append)
    first, a, b, *slots = lined_up(queue, "xabcd", woken, gone="a")
    b.leave()
    assert first.take() == "plan of x"
    first.leave()
    assert woken == ["x", "c"]
    assert unused == ["plan of b", "plan of a"]
    assert [a.state, b.state] == [SlotState.LEFT] * 2
    assert slots[0].take() == "plan of c"
    assert slots[0].take() is None, "a result is taken once"
    slots[0].leave()
    slots[1].leave()
    assert woken == ["x", "c", "d"]
    assert unused == ["plan of b", "plan of a", "plan of d"], "released, and not taken"
    assert (queue.running, queue.present) == (0, 0)


def test_calls_may_be_lined_up_before_others():
    queue, woken = OrderedQueue(), []
    slots = lined_up(queue, "a", woken)
    slots += lined_up(queue, "d", woken, first=4)
    slots += lined_up(queue, "bc", woken, first=2)
    for _ in range(4):
        next(slot for slot in slots if slot.state is SlotState.RUNNING).leave()
    assert woken == ["a", "b", "c", "d"]


def test_where_nobody_goes_on_all_are_released_after_the_timeout():
    queue, woken = OrderedQueue(), []
    queue.release_if_stalled(0)  # nobody waits
    lined_up(queue, "abc", woken)
    queue.release_if_stalled(1_000)
    assert woken == ["a"]
    queue.release_if_stalled(0)
    assert woken == ["a", "b", "c"]


async def test_waiting_tasks_say_whether_they_were_woken_in_time_and_large_batches_leave_the_loop():
    slot = Slot(OrderedQueue(), "a")
    waiter = TaskWaiter(slot)
    assert not await waiter.wait(0)
    threading.Timer(0.01, slot.wake).start()
    assert await waiter.wait(10)
    assert await waiter.wait()
    assert in_event_loop()
    assert await planned_aside(in_event_loop, PLANNED_ON_THE_LOOP)
    assert not await planned_aside(in_event_loop, PLANNED_ON_THE_LOOP + 1)


def test_what_awaits_nothing_runs_here_and_raises_what_it_would_without_us():
    async def answer(error=None):
        if error is not None:
            raise error
        return "So."

    assert run_here(answer()) == "So."
    for error in (StopIteration("no more"), ValueError("no"), RuntimeError("broken")):
        with pytest.raises(type(error), match=str(error)):
            run_here(answer(error))
    with pytest.raises(AssertionError, match="awaited"):
        run_here(asyncio.sleep(0))


async def test_who_is_released_while_it_comes_does_not_overtake_who_was_released_before():
    queue, resumed = OrderedQueue(), []
    [running] = lined_up(queue, ["running"], [])

    async def call(name):
        slot = Slot(queue, name, name)
        waiter = TaskWaiter(slot)
        queue.line_up([slot])
        await waiter.wait()
        resumed.append(name)

    earlier = asyncio.create_task(call("earlier"))
    await asyncio.sleep(0)
    queue.places = 2
    running.leave()
    await call("later")
    await earlier
    assert resumed == ["earlier", "later"]


calls = st.lists(
    st.tuples(
        st.integers(0, 6),  # arrives
        st.integers(0, 3),  # runs for
        st.none() | st.integers(0, 10),  # is cancelled
        st.integers(0, 5),  # its place among those planned with it
    ),
    max_size=10,
)


@examples(100)
@given(calls, st.integers(1, 3), st.sets(st.integers(0, 8), min_size=1))
def test_each_call_is_released_once_in_the_planned_order_or_told(arrivals, places, plannings):
    """Random arrivals, cancellations and moments of planning, in virtual time."""
    unused, planned, went = [], [], []
    queue = OrderedQueue(places, unused=unused.append)

    async def call(number, arrives, lasts, rank):
        await asyncio.sleep(arrives)
        slot = Slot(queue, (rank, number))
        waiter = TaskWaiter(slot)
        try:
            await waiter.wait()
            assert queue.running <= places
            went.append(slot.take())
            await asyncio.sleep(lasts)
        finally:
            slot.leave()

    def by_rank(slots):
        line = sorted(slots, key=lambda slot: slot.item)
        for slot in line:
            slot.results = [slot.item]
        planned.extend(slot.item for slot in line)
        return line

    def plan():
        queue.plan(list(queue.arrived), by_rank)

    async def main():
        loop = asyncio.get_running_loop()
        tasks = []
        for number, (arrives, lasts, cancelled, rank) in enumerate(arrivals):
            tasks.append(asyncio.create_task(call(number, arrives, lasts, rank)))
            if cancelled is not None:
                loop.call_later(cancelled + 0.5, tasks[-1].cancel)
        for moment in plannings | {9}:
            loop.call_later(moment + 0.25, plan)
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert loop.time() < 100
        return ended

    ended = run_in_virtual_time(main())
    for (_, _, cancelled, _), end in zip(arrivals, ended, strict=True):
        assert end is None or (cancelled is not None and isinstance(end, asyncio.CancelledError))
    assert sorted([*went, *unused]) == sorted(planned), "each plan is taken once, or told once"
    assert went == [item for item in planned if item in went], "in the planned order"
    assert (queue.running, queue.present, queue.has_waiting()) == (0, 0, False)


@examples(25)
@given(
    st.lists(st.lists(st.sampled_from(["go", "leave"]), max_size=6), min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(0, 99),
)
def test_threads_and_event_loops_share_a_queue(groups, places, seed):
    """Each group waits in its own event loop, or in threads of its own."""
    unused, went, most = [], [], []
    lock, shuffle = threading.Lock(), Random(seed).shuffle
    queue = OrderedQueue(places, unused=unused.append)
    total = sum(map(len, groups))

    def runs(slot):
        with lock:
            went.append(slot.take())
            most.append(queue.running)

    async def task(name, what):
        slot = Slot(queue, name)
        waiter = TaskWaiter(slot)
        try:
            if what == "leave":
                await waiter.wait(0.001)
            else:
                await waiter.wait()
                runs(slot)
        finally:
            slot.leave()

    def thread(name, what):
        slot = Slot(queue, name)
        woken = threading.Event()
        slot.attach(woken.set)
        try:
            if what == "leave":
                woken.wait(0.001)
            else:
                woken.wait()
                runs(slot)
        finally:
            slot.leave()

    async def tasks(number, group):
        await asyncio.gather(*(task(f"{number} {n}", what) for n, what in enumerate(group)))

    def shuffled(slots):
        for slot in slots:
            slot.results = [slot.item]
        shuffle(slots)
        return slots

    with ThreadPoolExecutor(max(1, total + len(groups))) as pool:
        started = []
        for number, group in enumerate(groups):
            if number % 2:
                started += [
                    pool.submit(thread, f"{number} {n}", what) for n, what in enumerate(group)
                ]
            else:
                started.append(pool.submit(asyncio.run, tasks(number, group)))
        deadline = time.monotonic() + 20
        while not all(one.done() for one in started):
            assert time.monotonic() < deadline, "somebody waits for ever"
            queue.plan(list(queue.arrived), shuffled)
        for one in started:
            one.result()
    stayed = sorted(
        f"{number} {n}"
        for number, group in enumerate(groups)
        for n, what in enumerate(group)
        if what == "go"
    )
    assert sorted(went) == stayed, "each is released once"
    assert not set(unused) & set(stayed)
    assert len(set(unused)) == len(unused)
    assert max(most, default=0) <= places
    assert (queue.running, queue.present, queue.has_waiting()) == (0, 0, False)
