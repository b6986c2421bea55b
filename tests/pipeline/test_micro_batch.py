import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st
from pool_helpers import until

from ctxreuse.errors import InvalidRequestError
from ctxreuse.pipeline import ordered_release
from ctxreuse.pipeline.ordered_release import MicroBatcher, checked_window
from virtual_clock import run_in_virtual_time

LONG_S = 30.0
"""A window that a test closes itself."""


@pytest.fixture(autouse=True)
def no_stall_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nobody go on without the release token, so that a lost token is noticed."""
    monkeypatch.setattr(ordered_release, "_STALL_TIMEOUT_S", 1_000.0)


class Scheduled(NamedTuple):
    position: int
    result: Any


def as_they_came(items: list[Any]) -> list[Scheduled]:
    return [Scheduled(position, item) for position, item in enumerate(items)]


class Planner:
    """Plans letters into alphabetical order, and keeps what it was given and what was dropped."""

    def __init__(self, window_s: float = LONG_S) -> None:
        self.batches: list[list[str]] = []
        self.dropped: list[str] = []
        self.gone: list[str] = []
        self.window = MicroBatcher(
            self.schedule, window_s, lambda one: self.dropped.append(one.result)
        )

    def schedule(self, items: list[str]) -> Sequence[Scheduled]:
        self.batches.append(items)
        order = sorted(range(len(items)), key=lambda position: items[position])
        return [Scheduled(position, f"plan of {items[position]}") for position in order]

    def call(self, item: str) -> str:
        result = self.window.submit(item).result
        self.gone.append(item)
        return str(result)

    async def acall(self, item: str) -> str:
        result = (await self.window.asubmit(item)).result
        self.gone.append(item)
        return str(result)

    def waiting(self) -> int:
        return sum(len(batch.arrived) for batch in self.window._open.values())

    def close(self, callers: int) -> None:
        """Close the window, as if its time was over, when so many have come."""
        while self.waiting() < callers:
            time.sleep(0.001)
        (batch,) = self.window._open.values()
        self.window._close(batch)


def started(work: Callable[[str], str], *items: str, planner: Planner) -> list[Future[str]]:
    """Run work in a thread for each item, so that they come in the order given."""
    pool = ThreadPoolExecutor(len(items))
    futures = []
    for number, item in enumerate(items):
        futures.append(pool.submit(work, item))
        while planner.waiting() <= number:
            time.sleep(0.001)
    pool.shutdown(wait=False)
    return futures


def test_threads_are_planned_together_and_released_in_the_planned_order():
    planner = Planner()
    futures = started(planner.call, "c", "a", "b", planner=planner)
    released: list[str] = []
    (batch,) = planner.window._open.values()
    for slot in batch.arrived:
        slot.wake = _noting(released, slot.item, slot.wake)
    planner.close(3)
    assert [future.result(10) for future in futures] == ["plan of c", "plan of a", "plan of b"]
    assert planner.batches == [["c", "a", "b"]]
    assert released == ["a", "b", "c"]


def _noting(notes: list[str], item: str, wake: Callable[[], object]) -> Callable[[], object]:
    def noted() -> object:
        notes.append(item)
        return wake()

    return noted


async def test_tasks_and_threads_share_a_window():
    planner = Planner()
    tasks = [asyncio.create_task(planner.acall(item)) for item in "da"]
    await until(lambda: planner.waiting() == 2)
    threads = [asyncio.create_task(asyncio.to_thread(planner.call, item)) for item in "cb"]
    await until(lambda: planner.waiting() == 4)
    planner.close(4)
    results = await asyncio.gather(*tasks, *threads)
    assert sorted(results) == ["plan of a", "plan of b", "plan of c", "plan of d"]
    assert [sorted(batch) for batch in planner.batches] == [["a", "b", "c", "d"]]


async def test_without_a_window_each_call_is_planned_at_once_on_its_own():
    planner = Planner(window_s=0)
    assert planner.call("b") == "plan of b"
    assert await planner.acall("a") == "plan of a"
    assert planner.batches == [["b"], ["a"]]


@pytest.mark.parametrize("number", [20, 200])
async def test_a_busy_event_loop_lets_all_of_a_batch_go_on_at_once(number):
    """Else each waits for all that others do there, as often as calls stand before it."""
    turns = 0
    released: list[tuple[int, int]] = []
    over = asyncio.Event()

    async def others() -> None:
        nonlocal turns
        while not over.is_set():
            turns += 1
            await asyncio.sleep(0)

    async def call(item: int) -> None:
        await batcher.asubmit(item)
        released.append((item, turns))

    batcher = MicroBatcher[int, Scheduled](lambda items: as_they_came(items)[::-1], 0.01)
    busy = asyncio.create_task(others())
    await asyncio.gather(*map(call, range(number)))
    over.set()
    await busy
    assert [item for item, _ in released] == list(reversed(range(number)))
    assert released[-1][1] - released[0][1] <= number / 10


async def test_large_batches_are_planned_off_the_event_loop():
    threads: list[str] = []

    def schedule(items: list[int]) -> list[Scheduled]:
        threads.append(threading.current_thread().name)
        return as_they_came(items)

    window = MicroBatcher(schedule, 0.005)
    for calls in (range(3), range(200)):
        assert await asyncio.gather(*map(window.asubmit, calls)) == as_they_came([*calls])
    assert threads[0] == threading.current_thread().name
    assert threads[1] != threading.current_thread().name
    assert len(threads) == 2


class NoThreads(ThreadPoolExecutor):
    """An executor that is shut down, or that cannot start a thread."""

    def submit(self, *args: object, **kwargs: object) -> Future[object]:
        raise RuntimeError("can't start new thread")


class NeverRuns(ThreadPoolExecutor):
    """An executor whose threads are all busy with other work."""

    def submit(self, *args: object, **kwargs: object) -> Future[object]:
        return Future()


@pytest.mark.parametrize("executor", [NoThreads, NeverRuns])
async def test_a_large_batch_is_planned_where_no_thread_is_free(executor, monkeypatch):
    monkeypatch.setattr(ordered_release, "_STALL_TIMEOUT_S", 0.05)
    loop, faults = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _, fault: faults.append(fault))
    loop.set_default_executor(executor())
    window = MicroBatcher(as_they_came, 0.005)
    calls = asyncio.gather(*map(window.asubmit, range(200)))
    assert await asyncio.wait_for(calls, LONG_S) == as_they_came([*range(200)])
    assert not faults


async def test_exceptions_of_the_planner_and_calls_that_it_loses_reach_the_callers():
    def fails(items: list[str]) -> list[Scheduled]:
        raise ValueError("no plan")

    window = MicroBatcher(fails, 0.005)
    answers = await asyncio.gather(*map(window.asubmit, "abc"), return_exceptions=True)
    assert [str(error) for error in answers] == ["no plan"] * 3
    with pytest.raises(ValueError, match="no plan"):
        MicroBatcher(fails, 0).submit("a")
    window = MicroBatcher(lambda items: [Scheduled(0, "only one")], 0.005)
    answers = await asyncio.gather(*map(window.asubmit, "ab"), return_exceptions=True)
    assert [type(error) for error in answers] == [AssertionError, AssertionError]


def test_a_closed_event_loop_does_not_hold_up_others():
    planner = Planner()
    loop = asyncio.new_event_loop()
    task = loop.create_task(planner.acall("a"))
    loop.run_until_complete(asyncio.sleep(0.001))
    [follower] = started(planner.call, "b", planner=planner)
    loop.close()
    planner.close(2)
    assert follower.result(10) == "plan of b"
    assert planner.batches == [["a", "b"]]
    assert planner.dropped == ["plan of a"]
    task._log_destroy_pending = False  # nobody can run it any more


def test_an_event_loop_that_stands_still_does_not_hold_up_others(monkeypatch):
    monkeypatch.setattr(ordered_release, "_STALL_TIMEOUT_S", 0.02)
    planner = Planner(window_s=0.05)
    loop = asyncio.new_event_loop()
    try:
        first = loop.create_task(planner.acall("a"))
        loop.run_until_complete(asyncio.sleep(0))  # it has opened the window, and runs no more
        with ThreadPoolExecutor(2) as pool:
            others = [pool.submit(planner.call, item) for item in "cb"]
            assert [other.result(10) for other in others] == ["plan of c", "plan of b"]
        assert "a" in planner.batches[0], "its window was closed for it"
        assert sorted(item for batch in planner.batches for item in batch) == ["a", "b", "c"]
        assert loop.run_until_complete(first) == "plan of a"
    finally:
        loop.close()
    assert planner.dropped == []


async def test_a_blocking_call_inside_an_event_loop_waits_for_nobody():
    planner = Planner()
    task = asyncio.create_task(planner.acall("b"))
    await until(lambda: planner.waiting() == 1)
    assert planner.call("a") == "plan of a"
    assert planner.batches == [["a"]]
    planner.close(1)
    assert await task == "plan of b"


def test_many_threads_and_tasks_lose_nothing():
    planner = Planner(window_s=0.002)

    async def burst(names: list[str]) -> list[str]:
        return list(await asyncio.gather(*map(planner.acall, names)))

    groups = [[f"{group}-{number:02}" for number in range(30)] for group in range(3)]
    singles = [f"t-{number:02}" for number in range(30)]
    with ThreadPoolExecutor(16) as pool:
        bursts = [pool.submit(asyncio.run, burst(names)) for names in groups]
        calls = [pool.submit(planner.call, name) for name in singles]
        for names, answers in zip(groups, bursts, strict=True):
            assert answers.result(30) == [f"plan of {name}" for name in names]
        assert [one.result(30) for one in calls] == [f"plan of {name}" for name in singles]
    everything = sorted([*singles, *(name for names in groups for name in names)])
    assert sorted(planner.gone) == everything
    assert sorted(item for batch in planner.batches for item in batch) == everything
    assert planner.dropped == []


callers = st.lists(
    st.tuples(
        st.integers(0, 40),  # comes, in milliseconds
        st.none() | st.integers(0, 50),  # is cancelled
        st.integers(0, 5),  # its place in the plan
    ),
    max_size=10,
)


@examples(60)
@given(callers, st.sampled_from([0.0, 0.005, 0.02]))
def test_each_caller_gets_its_result_in_the_planned_order_or_is_dropped_once(arrivals, window_s):
    planner = Planner(window_s)

    async def main() -> list[str | BaseException]:
        loop = asyncio.get_running_loop()
        tasks = []
        for number, (comes, cancelled, rank) in enumerate(arrivals):

            async def call(comes: int = comes, item: str = f"{rank} {number:02}") -> str:
                await asyncio.sleep(comes / 1000)
                return await planner.acall(item)

            tasks.append(asyncio.create_task(call()))
            if cancelled is not None:
                loop.call_later(cancelled / 1000, tasks[-1].cancel)
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert loop.time() < 1, "nobody waits longer than a window"
        return ended

    ended = run_in_virtual_time(main())
    for number, ((_, cancelled, rank), end) in enumerate(zip(arrivals, ended, strict=True)):
        is_cancelled = cancelled is not None and isinstance(end, asyncio.CancelledError)
        assert is_cancelled or end == f"plan of {rank} {number:02}"
    planned = sorted(item for batch in planner.batches for item in batch)
    dropped = [result.removeprefix("plan of ") for result in planner.dropped]
    assert sorted([*planner.gone, *dropped]) == planned
    line = [item for batch in planner.batches for item in sorted(batch) if item in planner.gone]
    assert planner.gone == line


@pytest.mark.parametrize("seconds", [0, 0.005, 60, 1])
def test_windows_of_up_to_a_minute_are_taken(seconds):
    assert checked_window(seconds) == seconds


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), 61, "5 ms", None, True])
def test_other_windows_are_refused(seconds):
    with pytest.raises(InvalidRequestError, match=r"micro-batch window.*seconds"):
        MicroBatcher(lambda items: [], seconds)
