"""An event loop whose clock jumps instead of waiting."""

import asyncio
import contextvars
import threading

import pytest
from virtual_time import now, virtual_time

from virtual_clock import VirtualTimeLoop, run_in_virtual_time


@virtual_time
async def test_computing_and_calls_from_threads_take_no_virtual_time():
    for _ in range(1_000):
        await asyncio.sleep(0)
    assert now() == 0.0

    loop, called = asyncio.get_running_loop(), asyncio.Event()
    loop.call_soon_threadsafe(called.set)
    loop.call_later(60, lambda: None)
    await called.wait()
    assert now() == 0.0


@virtual_time
async def test_a_time_limit_goes_off_at_its_time_and_only_then():
    async with asyncio.timeout(10):
        await asyncio.sleep(9)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.sleep(7_200), 3_600)
    assert now() == 3_609.0


def test_what_can_never_end_is_an_error_instead_of_a_hang():
    cleaned = []

    async def main():
        await asyncio.sleep(5)
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append(now())

    with pytest.raises(RuntimeError, match="all tasks wait, and no timer will wake one"):
        run_in_virtual_time(main())
    assert cleaned == [5.0]


@virtual_time
async def test_work_for_other_threads_is_done_at_once_in_this_one():
    variable = contextvars.ContextVar("variable", default="unset")
    variable.set("set")
    loop = asyncio.get_running_loop()
    seen = await asyncio.to_thread(lambda: (threading.get_ident(), variable.get()))
    future = loop.run_in_executor(None, max, 3, 5)
    assert (seen, future.done(), await future, now()) == (
        (threading.get_ident(), "set"),
        True,
        5,
        0.0,
    )


def test_a_loop_is_closed_when_it_has_run_and_another_one_starts_anew():
    loops = []

    async def main():
        loops.append(asyncio.get_running_loop())
        await asyncio.sleep(1)
        return now()

    assert [run_in_virtual_time(main()) for _ in range(2)] == [1.0, 1.0]
    assert all(isinstance(loop, VirtualTimeLoop) and loop.is_closed() for loop in loops)
    assert loops[0] is not loops[1]
