"""An event loop whose clock jumps instead of waiting."""

import asyncio
import contextvars
import threading

import pytest
from virtual_time import now, virtual_time

from virtual_clock import run_in_virtual_time


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
