import asyncio

from workflow_engines import virtual_time

from ctxreuse.context.fail_open import FailOpen
from ctxreuse.serving.aio.concurrency import BackgroundTasks


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
