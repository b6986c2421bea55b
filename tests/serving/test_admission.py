"""Where requests wait for an engine, planned together as they wait."""

import asyncio
import gc
import threading
from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_helpers import assistant, big_request, sent_ids

from ctxreuse import ContextRequest, ReusePlanner
from ctxreuse.errors import InvalidRequestError, UnknownStrategyError
from ctxreuse.serving.aio.virtual_time import run_in_virtual_time
from ctxreuse.serving.pool.admission import AdmissionQueue

WINDOW_S = 0.005


def now():
    return asyncio.get_running_loop().time()


def room_of(concurrency=1, window_s=WINDOW_S, planner=None, **arguments):
    planner = ReusePlanner() if planner is None else planner
    return AdmissionQueue(planner, concurrency, window_s, **arguments), planner


class Visits:
    """Sends requests through a room, and notes who was inside when."""

    def __init__(self, room):
        self.room = room
        self.plans = []  # of all who came in, in that order
        self.times = []
        self.most = 0
        self._inside = 0
        self._lock = threading.Lock()

    async def go(self, request, hold_s=1.0, at=None):
        """Come at a time, hold a place for a while; return the plan."""
        if at is not None:
            await asyncio.sleep(at - now())
        async with self.room.slot(request) as plan:
            with self._lock:
                self._inside += 1
                self.most = max(self.most, self._inside)
                self.plans.append(plan)
                self.times.append(now())
            try:
                await asyncio.sleep(hold_s)
            finally:
                with self._lock:
                    self._inside -= 1
            return plan

    def task(self, request, hold_s=1.0):
        return asyncio.create_task(self.go(request, hold_s))

    @property
    def queries(self):
        return [plan.request.query for plan in self.plans]


async def cancelled(*tasks):
    """Cancel tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(one, asyncio.CancelledError) for one in ended)


def assert_is_empty(room):
    assert (room.running, room.waiting) == (0, 0)
    assert not room._queue.arrived
    assert not room._queue.has_waiting()


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


visitors = st.lists(
    st.tuples(
        st.integers(0, 8),  # comes
        st.integers(0, 4),  # stays
        st.lists(st.integers(0, 5), max_size=4, unique=True),  # documents
        st.none() | st.integers(0, 12),  # is cancelled
    ),
    max_size=12,
)


@settings(max_examples=80)
@given(visitors, st.integers(1, 3), st.sampled_from((0, 0.5, 2.0)))
def test_everybody_who_stays_gets_a_place_and_exactly_the_own_plan(visitors, places, window_s):
    room, planner = room_of(places, window_s)
    visits = Visits(room)

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
    assert_is_empty(room)
    assert_knows_only(planner, visits.plans)
    assert room.faults == 0


def test_who_comes_waits_for_others_even_if_there_is_a_place(monkeypatch):
    room, planner = room_of(concurrency=10)
    sizes = counting(planner, monkeypatch)
    visits = Visits(room)

    async def main():
        requests = [big_request([n], str(n)) for n in range(4)]
        times = (0.0, 0.001, 0.004, 0.006)
        await asyncio.gather(
            *(visits.go(one, at=at) for one, at in zip(requests, times, strict=True))
        )

    run_in_virtual_time(main())
    assert sizes == [3, 1]
    assert visits.queries == ["0", "1", "2", "3"]
    assert visits.times == pytest.approx([0.005, 0.005, 0.005, 0.011])


def test_who_goes_does_not_cut_short_the_wait_of_those_who_have_just_come(monkeypatch):
    room, planner = room_of(concurrency=10)
    sizes = counting(planner, monkeypatch)
    visits = Visits(room)

    async def main():
        await asyncio.gather(
            visits.go(big_request([1]), hold_s=1.0),
            visits.go(big_request([2]), at=1.004),
            visits.go(big_request([3]), at=1.006),  # the first one has just gone
        )

    run_in_virtual_time(main())
    assert sizes == [1, 2]
    assert visits.times == pytest.approx([0.005, 1.009, 1.009])


def test_without_a_window_those_who_come_at_the_same_moment_are_planned_together(monkeypatch):
    room, planner = room_of(concurrency=10, window_s=0)
    sizes = counting(planner, monkeypatch)
    visits = Visits(room)

    async def main():
        await asyncio.gather(*(visits.go(big_request([n])) for n in range(5)))

    run_in_virtual_time(main())
    assert sizes == [5]
    assert visits.times == [0.0] * 5


def test_those_who_wait_together_go_grouped_by_what_they_share(monkeypatch):
    room, planner = room_of()
    sizes = counting(planner, monkeypatch)
    visits = Visits(room)

    def texts(ids, query):
        return ContextRequest([f"{one} " * 100 for one in ids], query)

    async def main():
        first = visits.task(texts(["x"], "first"))
        await asyncio.sleep(0.5)
        asked = [texts([f"{one}1", f"{one}2", n], one) for n in range(3) for one in "abc"]
        assert [one.query for one in asked] == list("abcabcabc")
        await asyncio.gather(first, *(visits.go(one) for one in asked))

    run_in_virtual_time(main())
    assert sizes == [1, 9]
    runs = [query for query, _ in groupby(visits.queries)]
    assert runs[0] == "first"
    assert sorted(runs[1:]) == ["a", "b", "c"]
    assert sum(plan.expected_cached_tokens > 0 for plan in visits.plans) == 6


def test_a_request_is_planned_on_top_of_what_was_sent():
    room, _ = room_of()
    visits = Visits(room)

    async def main():
        await visits.go(big_request([1, 2, 3]))
        return await visits.go(big_request([9, 3, 2, 1]))

    plan = run_in_virtual_time(main())
    assert sent_ids(plan) == [1, 2, 3, 9]
    assert plan.expected_cached_tokens == 300


def test_with_strategy_none_all_go_as_they_came():
    room, _ = room_of(strategy="none")
    visits = Visits(room)

    async def main():
        asked = [big_request(ids, str(n)) for n, ids in enumerate(([1, 2], [3], [2, 1], [3]))]
        await asyncio.gather(*(visits.go(one) for one in asked))

    run_in_virtual_time(main())
    assert visits.queries == ["0", "1", "2", "3"]
    assert [sent_ids(plan) for plan in visits.plans] == [[1, 2], [3], [2, 1], [3]]


def test_nobody_who_was_planned_is_overtaken_by_those_who_come_later():
    room, _ = room_of()
    visits = Visits(room)

    async def main():
        tasks = [visits.task(big_request([1, 2], "a")), visits.task(big_request([3, 4], "b"))]
        for late in range(5):
            await asyncio.sleep(0.5)
            tasks.append(visits.task(big_request([1, 2], f"late {late}")))
        await asyncio.gather(*tasks)

    run_in_virtual_time(main())
    assert sorted(visits.queries[:2]) == ["a", "b"]
    assert visits.queries[2:] == [f"late {late}" for late in range(5)]


def test_requests_without_blocks_take_turns_with_those_that_wait_to_be_planned():
    async def main():
        room, _ = room_of()
        visits = Visits(room)
        first = visits.task(big_request(["a"], "first"))
        await asyncio.sleep(0.1)
        planned = [visits.task(big_request(["a"], f"line {n}")) for n in range(3)]
        await asyncio.sleep(0.1)
        plain = [visits.task(ContextRequest([], f"plain {n}")) for n in range(2)]
        await asyncio.gather(first, *planned, *plain)
        assert visits.queries == ["first", "plain 0", "line 0", "plain 1", "line 1", "line 2"]
        assert_is_empty(room)

    run_in_virtual_time(main())


def test_a_request_without_blocks_waits_for_nobody_if_there_is_a_place():
    async def main():
        room, _ = room_of(window_s=5)
        visits = Visits(room)
        await visits.go(ContextRequest([], "plain"))
        assert visits.times == [0]

    run_in_virtual_time(main())


def test_a_request_without_blocks_that_is_cancelled_leaves_nothing_behind():
    async def main():
        room, planner = room_of()
        visits = Visits(room)
        inside = visits.task(ContextRequest([], "inside"))
        waiting = visits.task(ContextRequest([], "waiting"))
        await asyncio.sleep(0.1)
        await cancelled(waiting)
        await inside
        assert visits.queries == ["inside"]
        assert_is_empty(room)
        assert planner.statistics().requests == 1

    run_in_virtual_time(main())


def test_the_room_says_how_many_wait_and_how_many_are_inside():
    room, _ = room_of(concurrency=2)
    visits = Visits(room)

    async def main():
        counts = []
        tasks = [visits.task(big_request([n])) for n in range(5)]
        for seconds in (0.001, 0.5, 1.0, 1.0, 1.0):
            await asyncio.sleep(seconds)
            counts.append((room.running, room.waiting))
        await asyncio.gather(*tasks)
        return counts

    assert run_in_virtual_time(main()) == [(0, 5), (2, 3), (2, 1), (1, 0), (0, 0)]


def test_a_place_is_given_back_when_what_happens_inside_fails():
    room, _ = room_of()
    visits = Visits(room)

    async def fail():
        async with room.slot(big_request([1])):
            raise ValueError("boom")

    async def main():
        results = await asyncio.gather(fail(), visits.go(big_request([2])), return_exceptions=True)
        return [type(one) for one in results]

    kinds = run_in_virtual_time(main())
    assert kinds[0] is ValueError
    assert len(visits.plans) == 1
    assert_is_empty(room)


# leaving


def test_who_is_cancelled_while_others_are_waited_for_is_never_planned(monkeypatch):
    room, planner = room_of()
    sizes = counting(planner, monkeypatch)
    visits = Visits(room)

    async def main():
        left, stays = visits.task(big_request([1])), visits.task(big_request([2], "stays"))
        await asyncio.sleep(0.001)
        assert room.waiting == 2
        await cancelled(left)
        assert room.waiting == 1
        await stays

    run_in_virtual_time(main())
    assert (sizes, visits.queries) == ([1], ["stays"])
    assert_is_empty(room)
    assert_knows_only(planner, visits.plans)


def test_who_is_cancelled_before_a_place_is_free_is_never_planned(monkeypatch):
    room, planner = room_of()
    sizes = counting(planner, monkeypatch)
    visits = Visits(room)

    async def main():
        first = visits.task(big_request([1]))
        await asyncio.sleep(0.5)
        left = visits.task(big_request([2]))
        await asyncio.sleep(0.1)
        await cancelled(left)
        assert (room.running, room.waiting) == (1, 0)
        await first

    run_in_virtual_time(main())
    assert sizes == [1]
    assert_is_empty(room)
    assert_knows_only(planner, visits.plans)


def test_who_is_cancelled_in_the_line_is_passed_over_and_forgotten_by_the_planner():
    room, planner = room_of()
    visits = Visits(room)

    async def main():
        tasks = [visits.task(big_request([n], str(n))) for n in range(3)]
        await asyncio.sleep(0.5)
        assert (room.running, room.waiting, planner.statistics().requests) == (1, 2, 3)
        await cancelled(tasks[1])
        assert (room.running, room.waiting, planner.statistics().requests) == (1, 1, 2)
        await asyncio.gather(tasks[0], tasks[2])

    run_in_virtual_time(main())
    assert visits.queries == ["0", "2"]
    assert_is_empty(room)
    assert_knows_only(planner, visits.plans)


@pytest.mark.parametrize("turns_of_the_loop", [0, 1])
def test_who_is_cancelled_between_being_let_through_and_going_on_gives_the_place_back(
    turns_of_the_loop,
):
    room, planner = room_of()
    visits = Visits(room)

    async def main():
        first = room.slot(big_request([1]))
        sent = await first.__aenter__()
        second, third = visits.task(big_request([2], "2")), visits.task(big_request([3], "3"))
        await asyncio.sleep(0.5)
        assert (room.running, room.waiting) == (1, 2)
        await first.__aexit__(None, None, None)
        assert (room.running, room.waiting) == (1, 1)  # the second was let through
        for _ in range(turns_of_the_loop):
            await asyncio.sleep(0)
        assert visits.plans == []
        await cancelled(second)
        await third
        return sent

    sent = run_in_virtual_time(main())
    assert visits.queries == ["3"]
    assert_is_empty(room)
    assert_knows_only(planner, [sent, *visits.plans])


def test_who_is_cancelled_inside_gives_the_place_back_and_was_sent():
    room, planner = room_of()
    visits = Visits(room)

    async def main():
        first, second = visits.task(big_request([1], "1")), visits.task(big_request([2], "2"))
        await asyncio.sleep(0.5)
        await cancelled(first)
        await asyncio.sleep(0)
        assert (room.running, room.waiting) == (1, 0)
        await second

    run_in_virtual_time(main())
    assert visits.queries == ["1", "2"]
    assert visits.times == pytest.approx([0.005, 0.5])
    assert_is_empty(room)
    assert_knows_only(planner, visits.plans)


def test_a_request_that_is_sent_again_under_its_id_stays_known_though_it_was_cancelled_before():
    room, planner = room_of()
    visits = Visits(room)

    async def main():
        first = visits.task(big_request([1]))
        left = visits.task(big_request([2], request_id="again"))
        await asyncio.sleep(0.5)
        await cancelled(left)
        again = visits.task(big_request([2], request_id="again"))
        await asyncio.gather(first, again)

    run_in_virtual_time(main())
    assert visits.plans[1].request_id == "again"
    assert_knows_only(planner, visits.plans)


def test_a_turn_is_for_one_request():
    room, _ = room_of()

    async def main():
        turn = room.slot(big_request([1]))
        async with turn:
            pass
        with pytest.raises(AssertionError, match="an admission slot is for one request"):
            await turn.__aenter__()

    run_in_virtual_time(main())
    assert_is_empty(room)


# plans


def test_a_plan_is_sent_as_it_is_and_recorded_by_the_rooms_planner():
    room, planner = room_of(concurrency=2)
    other = ReusePlanner()
    other.plan(big_request([1, 2, 3]))
    plan = other.plan(big_request([3, 2, 1], "Why?"))
    assert plan.request_id == "request-1"
    visits = Visits(room)

    async def main():
        first = await visits.go(plan)
        requested = await visits.go(big_request([7, 1], "And?"))
        return first, requested, await visits.go(plan)

    first, requested, again = run_in_virtual_time(main())
    for sent in (first, again):
        assert sent.messages() == plan.messages()
        assert sent.parts == plan.parts
        assert sent.labels == plan.labels
        assert sent.request is plan.request
    assert sent_ids(requested) == [1, 7]
    assert [one.expected_cached_tokens for one in (first, requested, again)] == [0, 100, 300]
    assert [one.request_id for one in (first, requested, again)] == [
        "request-0",
        "request-1",
        "request-2",
    ]
    assert_knows_only(planner, visits.plans)


def test_a_plan_of_a_later_turn_keeps_its_references():
    room, planner = room_of()
    other = ReusePlanner()
    first = other.plan(big_request([1], history=[], conversation_id="c"))
    history = [*first.messages(), assistant("Yes.")]
    second = other.plan(big_request([2, 1], history=history, conversation_id="c"))
    assert second.references == (1,)
    visits = Visits(room)

    async def main():
        return [await visits.go(first), await visits.go(second)]

    sent = run_in_virtual_time(main())
    assert [one.messages() for one in sent] == [first.messages(), second.messages()]
    assert_knows_only(planner, sent)


def test_a_plan_that_is_cancelled_is_forgotten():
    room, planner = room_of()
    visits = Visits(room)
    plan = ReusePlanner().plan(big_request([2, 1]))

    async def main():
        first, second = visits.task(big_request([3])), visits.task(plan)
        await asyncio.sleep(0.5)
        assert planner.statistics().requests == 2
        await cancelled(second)
        assert planner.statistics().requests == 1
        await first

    run_in_virtual_time(main())
    assert_knows_only(planner, visits.plans)


# faults


def broken(*arguments, **more):
    raise ZeroDivisionError


def test_where_planning_a_batch_fails_all_go_as_they_came(monkeypatch):
    room, planner = room_of()
    planner.plan(big_request([1, 2]))
    monkeypatch.setattr(planner, "plan_batch", broken)
    visits = Visits(room)

    async def main():
        asked = [big_request(ids, str(n)) for n, ids in enumerate(([2, 1], [3], [2, 1]))]
        await asyncio.gather(*(visits.go(one) for one in asked))

    run_in_virtual_time(main())
    assert visits.queries == ["0", "1", "2"]
    assert [sent_ids(plan) for plan in visits.plans] == [[2, 1], [3], [2, 1]]
    assert [plan.expected_cached_tokens for plan in visits.plans] == [0, 0, 200]
    assert room.faults == 1
    assert_is_empty(room)


def test_where_the_planner_fails_altogether_all_go_as_they_came_and_nothing_is_recorded(
    monkeypatch,
):
    room, planner = room_of()
    plan = ReusePlanner().plan(big_request([8, 7], "plan"))
    monkeypatch.setattr(planner, "plan_batch", broken)
    monkeypatch.setattr(planner, "plan", broken)
    visits = Visits(room)

    async def main():
        asked = [big_request([2, 1], "0"), plan, big_request([3], "2", request_id="mine")]
        await asyncio.gather(*(visits.go(one) for one in asked))

    run_in_virtual_time(main())
    assert visits.queries == ["0", "plan", "2"]
    assert visits.plans[0].content == "[Doc_1] text of 2\n\n[Doc_2] text of 1\n\n0"
    assert visits.plans[1].messages() == plan.messages()
    ids = [one.request_id for one in visits.plans]
    assert ids == ["unplanned-0", "unplanned-1", "mine"]  # no other request's by accident
    assert planner.evict(ids).unknown == tuple(ids)
    assert room.faults == 4  # the batch, then each of the three
    assert_is_empty(room)


def test_a_fault_with_one_plan_leaves_what_was_planned_before_it(monkeypatch):
    room, planner = room_of()
    visits = Visits(room)
    plan = ReusePlanner().plan(big_request([5]))
    calls = []

    def fails_once(*arguments, **more):
        calls.append(arguments)
        if len(calls) == 1:
            raise ZeroDivisionError
        return ReusePlanner.plan(planner, *arguments, **more)

    monkeypatch.setattr(planner, "plan", fails_once)

    async def main():
        await asyncio.gather(visits.go(big_request([1], "request")), visits.go(plan))

    run_in_virtual_time(main())
    assert visits.queries == ["request", ""]
    assert room.faults == 1
    assert_knows_only(planner, visits.plans)


def test_an_interrupt_while_planning_is_for_one_and_the_others_hear_of_it(monkeypatch):
    room, planner = room_of()
    visits = Visits(room)

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
    assert_is_empty(room)
    assert_knows_only(planner, [plan])


# threads and event loops


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


def test_event_loops_in_several_threads_share_one_room():
    room, planner = room_of(concurrency=3, window_s=0.001)
    visits = Visits(room)

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
    assert_is_empty(room)
    assert_knows_only(planner, visits.plans)


def test_many_are_planned_in_a_thread_and_count_as_waiting_meanwhile(monkeypatch):
    room, planner = room_of(concurrency=200, window_s=0)
    visits = Visits(room)
    planning, go_on, threads = threading.Event(), threading.Event(), []
    plan_batch = planner.plan_batch

    def slow(*arguments):
        threads.append(threading.get_ident())
        planning.set()
        assert go_on.wait(10)
        return plan_batch(*arguments)

    async def main():
        tasks = [visits.task(big_request([n]), 0) for n in range(100)]
        while not planning.is_set():
            await asyncio.sleep(0.001)
        assert (room.running, room.waiting) == (0, 100)
        await cancelled(*tasks[:40])
        assert (room.running, room.waiting) == (0, 60)
        go_on.set()
        await asyncio.gather(*tasks[40:])

    monkeypatch.setattr(planner, "plan_batch", slow)
    asyncio.run(main())
    assert threading.get_ident() not in threads
    assert sorted(sent_ids(plan)[0] for plan in visits.plans) == list(range(40, 100))
    assert_is_empty(room)
    assert_knows_only(planner, visits.plans)


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
    room, planner = room_of()
    visits = Visits(room)
    here, gone = asyncio.new_event_loop(), asyncio.new_event_loop()
    (inside,) = started(here, visits, big_request([1]))
    waiting = started(gone, visits, big_request([2]), big_request([3]))
    other = here.create_task(visits.go(big_request([4], "other"), hold_s=0))
    here.run_until_complete(asyncio.sleep(0.02))
    assert (room.running, room.waiting) == (1, 3)
    abandon(gone, waiting)
    inside.cancel()
    here.run_until_complete(asyncio.wait([inside, other]))
    here.close()
    assert visits.queries == ["", "other"]
    assert_is_empty(room)
    assert_knows_only(planner, visits.plans)


def test_places_that_a_closed_event_loop_held_come_back_with_its_tasks():
    room, planner = room_of(concurrency=2)
    visits = Visits(room)
    here, gone, also_gone = (asyncio.new_event_loop() for _ in range(3))
    (first,) = started(here, visits, big_request([1]))
    inside = started(gone, visits, big_request([2]))
    let_through = started(also_gone, visits, big_request([3]))
    first.cancel()
    here.run_until_complete(asyncio.wait([first]))
    other = here.create_task(visits.go(big_request([4], "other"), hold_s=0))
    here.run_until_complete(asyncio.sleep(0.02))
    assert (room.running, room.waiting) == (2, 1)
    abandon(gone, inside)
    abandon(also_gone, let_through)
    del inside, let_through
    gc.collect()
    here.run_until_complete(other)
    here.close()
    assert visits.queries == ["", "", "other"]
    assert_is_empty(room)
    assert_knows_only(planner, visits.plans)


# arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"planner": None}, "planner must be a ReusePlanner, not None (NoneType)"),
        ({"concurrency": 0}, "concurrency must be an integer from 1, not 0 (int)"),
        ({"concurrency": 2.5}, "concurrency must be an integer from 1, not 2.5 (float)"),
        (
            {"window_s": "long"},
            "the micro-batch window must be a number of seconds, not 'long' (str)",
        ),
    ],
)
def test_arguments_of_the_wrong_kind_are_refused(arguments, message):
    with pytest.raises(InvalidRequestError) as caught:
        AdmissionQueue(**{"planner": ReusePlanner(), **arguments})
    assert str(caught.value) == message


def test_an_unknown_strategy_is_refused():
    with pytest.raises(UnknownStrategyError):
        AdmissionQueue(ReusePlanner(), strategy="best")
