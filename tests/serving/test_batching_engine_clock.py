"""The emulated engine in the time of an event loop, here a virtual one."""

import asyncio
from contextlib import aclosing

import pytest
from virtual_time import virtual_time

from ctxreuse.cache import CacheUsage
from ctxreuse.errors import InvalidRequestError
from ctxreuse.serving.emulation.batching_engine import BatchingEngine, EngineRates
from virtual_clock import run_in_virtual_time

RATES = EngineRates(prefill_tokens_per_s=64, decode_step_s=1.0, decode_step_per_request_s=0.25)


def engine(capacity_tokens=1_000, speed=1.0, **bounds):
    """Return an engine whose requests may use `capacity_tokens`, and its cache."""
    made = BatchingEngine(capacity_tokens + 1, 1, RATES, speed=speed, **bounds)
    return made, made.cache


def now():
    return asyncio.get_running_loop().time()


async def served(timed, start, length, answer=1, at=0.0):
    """Ask for an answer at a time; return (when it came, its usage)."""
    await asyncio.sleep(at - now())
    usage = await timed.serve(range(start, start + length), range(answer))
    return now(), usage


@virtual_time
async def test_answers_come_when_the_engine_has_computed_them():
    timed, _ = engine()
    assert (
        await asyncio.gather(
            served(timed, 0, 64, answer=3),
            served(timed, 0, 64, answer=1),
            served(timed, 500, 32, answer=2, at=2.0),
            served(timed, 0, 64, at=100.0),
        )
    ) == [
        # 65 tokens and two answers: 65 / 64 + 1.5 s; then 0.5 + 1.5 s; then 1.5 s
        (6.015625, CacheUsage(64, 0)),
        (2.515625, CacheUsage(64, 63)),
        (6.015625, CacheUsage(32, 0)),
        (101.265625, CacheUsage(64, 63)),
    ]


def test_an_engine_may_run_faster_than_its_rates():
    timed, _ = engine(speed=2)
    assert run_in_virtual_time(served(timed, 0, 64)) == (1.125, CacheUsage(64, 0))


def test_the_engine_can_be_used_again_after_it_was_idle():
    timed, _ = engine()

    async def main():
        first = await served(timed, 0, 64)
        await asyncio.sleep(3_600)
        return first[0], (await served(timed, 200, 64, at=now()))[0]

    assert run_in_virtual_time(main()) == (2.25, 2.25 + 3_600 + 2.25)
    assert run_in_virtual_time(main()) == (
        1 / 64 + 1.25,  # another event loop, the same cache
        1 / 64 + 1.25 + 3_600 + 1 / 64 + 1.25,
    )
    assert not timed.has_work


@pytest.mark.parametrize(
    ("at", "cached"),
    [
        (0.0, 0),  # before the first step
        (0.25, 32),  # in the first step, which computes 32 tokens
        (2.0, 64),  # in the second, with the second half
        (4.0, 64),  # while it is answered
    ],
)
@virtual_time
async def test_who_is_cancelled_aborts_the_request_and_leaves_what_was_computed(at, cached):
    timed, cache = engine(max_step_tokens=32)
    task = asyncio.create_task(served(timed, 0, 64, answer=5))
    await asyncio.sleep(at)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not timed.has_work
    assert cache._users == {}
    assert (await served(timed, 0, 65, at=now()))[1] == CacheUsage(65, cached)


@virtual_time
async def test_a_cancelled_request_does_not_hold_up_the_others():
    timed, _ = engine(max_running=1)
    # its step goes on until 2.25; then 2.25 + 1.25 s
    tasks = [asyncio.create_task(served(timed, 100 * n, 64, answer=2)) for n in range(3)]
    await asyncio.sleep(1)
    tasks[0].cancel()
    tasks[1].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert ([type(one) for one in results[:2]], results[2]) == (
        [asyncio.CancelledError] * 2,
        (5.75, CacheUsage(64, 0)),
    )
    assert not timed.has_work


@virtual_time
async def test_requests_that_the_engine_refuses_raise_and_leave_nothing_behind():
    timed, _ = engine(capacity_tokens=10)
    with pytest.raises(InvalidRequestError, match="larger than the cache"):
        await timed.serve(range(11), [1])
    with pytest.raises(InvalidRequestError, match="at least one token"):
        await timed.serve(range(2), [])
    assert await served(timed, 0, 8) == (0.125 + 1.25, CacheUsage(8, 0))
    assert timed.open_requests == 0
    assert not timed.has_work


@pytest.mark.parametrize(
    ("tokens", "answer"), [(["no", "tokens"], [1]), ([1, 2], ["no", "tokens"])]
)
@virtual_time
async def test_token_ids_that_are_none_raise_instead_of_keeping_everybody_waiting(tokens, answer):
    timed, cache = engine()
    with pytest.raises(InvalidRequestError, match="token ids must be integers"):
        await timed.serve(tokens, answer)
    assert not timed.has_work
    assert cache._users == {}
    assert (await served(timed, 0, 64, at=now()))[1] == CacheUsage(64, 0)


@pytest.mark.parametrize("speed", [0, -1, float("inf"), float("nan"), "fast"])
def test_a_speed_that_is_no_number_above_0_is_refused(speed):
    with pytest.raises(InvalidRequestError, match=r"speed must be .*0, not"):
        engine(speed=speed)


async def followed(timed, start, length, answer=1, at=0.0, chunk_tokens=2):
    """Follow an answer from a time on; return (when, tokens) for each number."""
    await asyncio.sleep(at - now())
    async with aclosing(
        timed.stream(range(start, start + length), range(answer), chunk_tokens=chunk_tokens)
    ) as counts:
        return [(now(), said) async for said in counts]


@virtual_time
async def test_an_answer_is_followed_beside_one_that_is_waited_for():
    timed, _ = engine()
    # 128 tokens and two answers: 2 + 1.5 s; then 1.5 s twice, 1.25 s twice
    assert (
        await asyncio.gather(followed(timed, 0, 64, answer=5), served(timed, 500, 64, answer=3))
    ) == [
        [(5.0, 2), (7.75, 4), (9.0, 5)],
        (6.5, CacheUsage(64, 0)),
    ]


@virtual_time
async def test_there_is_no_task_but_those_that_wait():
    timed, _ = engine()
    asking = [
        asyncio.create_task(served(timed, 0, 64, answer=9)),
        asyncio.create_task(followed(timed, 100, 64, answer=9)),
    ]
    await asyncio.sleep(3)
    assert (timed.open_requests, asyncio.all_tasks()) == (2, {asyncio.current_task(), *asking})
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    assert (timed.open_requests, timed.has_work) == (0, False)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize(("after", "left_at"), [(1, 3.5), (2, 6.0)])
@virtual_time
async def test_who_stops_following_aborts_the_request(after, left_at):
    timed, cache = engine()
    counts = timed.stream(range(64), range(10), chunk_tokens=2)
    for _ in range(after):
        await anext(counts)
    assert timed.has_work
    await counts.aclose()
    assert (now(), timed.open_requests, timed.has_work) == (left_at, 0, False)
    assert cache._users == {}
    # the step that goes on ends first, 1.25 s later
    assert await served(timed, 500, 64, at=now()) == (left_at + 1.25 + 2.25, CacheUsage(64, 0))


@virtual_time
async def test_who_leaves_with_the_last_token_has_aborted_nothing():
    timed, _ = engine()
    counts = timed.stream(range(64), range(64, 66), chunk_tokens=2)
    assert await anext(counts) == 2
    await counts.aclose()
    assert (await served(timed, 0, 66, at=now()))[1] == CacheUsage(
        66, 65
    )  # with the first token of the answer


@virtual_time
async def test_token_ids_that_are_none_end_every_stream():
    timed, _ = engine()

    async def refused():
        await asyncio.sleep(0)
        await timed.serve(["no", "tokens"], [1])

    assert [
        type(one)
        for one in (
            await asyncio.gather(
                followed(timed, 0, 64, answer=9),
                followed(timed, 0, 64, answer=9),
                served(timed, 0, 64, answer=9),
                refused(),
                return_exceptions=True,
            )
        )
    ] == [InvalidRequestError] * 4
    assert not timed.has_work
