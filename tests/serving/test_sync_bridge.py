"""Asynchronous work for sync callers, in the event loop that lasts or their own, and beside."""

import asyncio
from typing import Any

import pytest
from workflow_engines import virtual_time

from ctxreuse.context.fail_open import FailOpen
from ctxreuse.serving.aio import sync_bridge
from ctxreuse.serving.aio.concurrency import BackgroundTasks


@pytest.mark.parametrize("lasting", [True, False])
def test_what_is_asynchronous_runs_for_sync_callers(lasting):
    async def work() -> int:
        await asyncio.sleep(0)
        return 3

    async def pieces() -> Any:
        yield 1
        yield 2

    assert sync_bridge.run(work, lasting=lasting) == 3
    assert list(sync_bridge.iterate(pieces, lasting=lasting)) == [1, 2]


def test_the_lasting_event_loop_is_the_same_for_every_call_and_one_inside_it_does_not_wait():
    async def loop() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    assert sync_bridge.run(loop, lasting=True) is sync_bridge.run(loop, lasting=True)
    assert sync_bridge.run(loop, lasting=False) is not sync_bridge.run(loop, lasting=True)

    async def inner() -> str:
        return "done"

    async def outer() -> str:
        return sync_bridge.run(inner, lasting=True)

    assert sync_bridge.run(outer, lasting=True) == "done"


@pytest.mark.parametrize("lasting", [True, False])
def test_errors_arrive_and_who_stops_early_cancels(lasting):
    ended: list[str] = []

    async def pieces() -> Any:
        try:
            yield 1
            await asyncio.sleep(60)
        finally:
            ended.append("cancelled")

    async def fails() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        sync_bridge.run(fails, lasting=lasting)
    stream = sync_bridge.iterate(pieces, lasting=lasting)
    assert next(stream) == 1
    stream.close()  # a generator
    sync_bridge.run(lambda: asyncio.sleep(0.001), lasting=lasting)
    assert ended == ["cancelled"]


@virtual_time
async def test_background_tasks_end_before_their_owner_does_even_if_that_is_cancelled():
    failing = FailOpen("tests")
    background = BackgroundTasks(failing)
    ended = []

    async def work(number: int) -> None:
        await asyncio.sleep(0.1 * number)
        if number == 2:
            raise OSError("no")
        ended.append(number)

    for number in range(4):
        background.start(work(number))
    waiting = asyncio.ensure_future(background.wait())
    await asyncio.sleep(0.05)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    assert ended == [0, 1, 3]
    assert failing.faults == 1
