"""An engine with continuous batching, step by step and in the time of an event loop."""

import asyncio
from contextlib import aclosing

import pytest
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st
from virtual_time import now, virtual_time

from ctxreuse.cache import CacheUsage
from ctxreuse.errors import InvalidRequestError
from ctxreuse.serving.emulation.batching_engine import (
    COMMON_RATES,
    BatchedRequest,
    BatchingEngine,
    BatchStep,
    EngineRates,
)
from virtual_clock import run_in_virtual_time

# sums of these are exact: 64 tokens a second; a token each in 1 s, and 0.25 s a request
RATES = EngineRates(prefill_tokens_per_s=64, decode_step_s=1.0, decode_step_per_request_s=0.25)


def engine(capacity_tokens=1_000, block_size=1, **bounds):
    # one block is kept back
    made = BatchingEngine(capacity_tokens + block_size, block_size, RATES, **bounds)
    return made, made.cache


def request(tokens, answer=1, **fields):
    if isinstance(tokens, int):
        request.numbers += 1
        tokens = [1_000 * request.numbers + n for n in range(tokens)]
    return BatchedRequest(tokens=tokens, answer=range(answer), **fields)


request.numbers = 0


def submitted(engine, *requests):
    for one in requests:
        engine.submit(one)
    return requests


def durations(engine):
    steps = []
    while engine.has_work:
        steps.append(engine.step().duration_s)
    return steps


def endings(engine):
    """Run to the end; return (emulated second, request) for each answer that ends."""
    now, ended = 0.0, []
    while engine.has_work:
        step = engine.step()
        now += step.duration_s
        ended += [(now, one) for one in step.finished]
    return ended


def assert_is_unused(cache, blocks):
    assert cache._users == {}
    assert len(cache._free) + cache._empty == blocks


def test_a_step_takes_what_is_computed_in_it_at_common_rates_as_in_the_benchmarks():
    assert RATES.step_s(0, 0) == 0.0
    assert RATES.step_s(128, 0) == 2.0
    assert RATES.step_s(0, 1) == 1.25
    assert RATES.step_s(0, 4) == 2.0
    assert RATES.step_s(32, 4) == 2.5
    assert EngineRates() == COMMON_RATES
    assert COMMON_RATES.step_s(10_000, 0) == 1.0
    assert COMMON_RATES.step_s(0, 100) == pytest.approx(0.025)


@pytest.mark.parametrize(
    ("make", "name", "values"),
    [
        (EngineRates, "prefill_tokens_per_s", [0, -1]),
        (EngineRates, "decode_step_s", [-1, "1"]),
        (EngineRates, "decode_step_per_request_s", [float("inf")]),
        (engine, "max_running", [0, 1.5, None]),
        (engine, "max_step_tokens", [0, 1.5, None]),
        (engine, "speed", [0, -1, float("nan"), "fast"]),
    ],
)
def test_settings_out_of_range_are_refused(make, name, values):
    for value in values:
        with pytest.raises(InvalidRequestError, match=f"{name} must be .*, not"):
            make(**{name: value})


def test_a_request_gets_its_first_token_in_the_step_that_computes_its_prompt():
    one, _ = engine()
    (asked,) = submitted(one, request(64, answer=3))
    assert [one.step() for _ in range(3)] == [
        BatchStep(1.0 + 1.25, ()),
        BatchStep(1.25, ()),
        BatchStep(1.25, (asked,)),
    ]
    assert not one.has_work
    assert asked.usage == CacheUsage(64, 0)


def test_requests_that_run_together_share_the_steps_also_if_one_comes_later():
    one, _ = engine()
    long, short = submitted(one, request(64, answer=3), request(32, answer=1))
    assert [one.step() for _ in range(3)] == [
        BatchStep(1.5 + 1.5, (short,)),
        BatchStep(1.25, ()),
        BatchStep(1.25, (long,)),
    ]

    one, _ = engine()
    (first,) = submitted(one, request(64, answer=3))
    assert one.step() == BatchStep(2.25, ())
    (second,) = submitted(one, request(32, answer=2))
    assert one.step() == BatchStep(0.5 + 1.5, ())
    assert one.step() == BatchStep(1.5, (first, second))


def test_answers_are_cached_for_the_next_turn():
    one, _ = engine()
    submitted(one, BatchedRequest(tokens=[1, 2], answer=[3, 4]))
    durations(one)
    (later,) = submitted(one, request([1, 2, 3, 4, 5]))
    durations(one)
    assert later.usage == CacheUsage(5, 3)  # the last token of an answer is never computed
    one, _ = engine(block_size=4)
    first, second = submitted(one, request(range(64)), request(range(64)))
    assert one.step() == BatchStep(1.0 + 4 / 64 + 1.5, (first, second))
    assert (first.usage, second.usage) == (CacheUsage(64, 0), CacheUsage(64, 60))
    assert one.usage == CacheUsage(128, 60)


def test_a_step_without_work_takes_no_time_and_an_empty_prompt_is_answered():
    one, _ = engine()
    assert not one.has_work
    assert one.step() == BatchStep(0.0, ())
    (asked,) = submitted(one, request(64))
    assert one.step() == BatchStep(2.25, (asked,))  # the empty step before it changed nothing
    one, _ = engine()
    submitted(one, request(0, answer=2))
    assert durations(one) == [1.25, 1.25]


def test_a_long_prompt_is_computed_in_steps_which_others_fill():
    one, _ = engine(max_step_tokens=64)
    (asked,) = submitted(one, request(160, answer=2))
    assert [one.step() for _ in range(4)] == [
        BatchStep(1.0, ()),
        BatchStep(1.0, ()),
        BatchStep(0.5 + 1.25, ()),
        BatchStep(1.25, (asked,)),
    ]

    one, _ = engine(max_step_tokens=64)
    long, short, last = submitted(one, request(96), request(16), request(32))
    assert [one.step() for _ in range(3)] == [
        BatchStep(1.0, ()),
        # 32 of the long one, 16 of the short one, 16 of the last one
        BatchStep(1.0 + 1.5, (long, short)),
        BatchStep(0.25 + 1.25, (last,)),
    ]

    one, _ = engine(max_step_tokens=64)
    first, second = submitted(one, request(64), request(64))
    assert one.step() == BatchStep(2.25, (first,))
    assert second.usage is None  # it has not begun
    assert one.step() == BatchStep(2.25, (second,))


def test_others_get_their_tokens_while_a_long_prompt_is_computed():
    one, _ = engine(max_step_tokens=64)
    (first,) = submitted(one, request(32, answer=3))
    assert one.step() == BatchStep(1.75, ())
    (long,) = submitted(one, request(128))
    assert [one.step() for _ in range(3)] == [
        BatchStep(2.25, ()),
        BatchStep(1.0 + 1.5, (first, long)),
        BatchStep(0.0, ()),
    ]


def test_no_more_run_than_allowed_and_they_begin_in_the_order_of_arrival():
    one, _ = engine(max_running=2)
    a, b, c, d = submitted(one, *(request(0, answer=n) for n in (3, 1, 1, 1)))
    assert endings(one) == [(1.5, b), (3.0, c), (4.5, a), (4.5, d)]


def test_a_request_waits_for_room_for_its_whole_answer_and_holds_up_those_behind_it():
    one, _ = engine(capacity_tokens=10)
    first, large, small = submitted(one, request(6, answer=2), request(8), request(1))
    assert one.step().finished == ()
    assert (large.usage, small.usage) == (None, None)
    assert one.step().finished == (first,)
    assert one.step().finished == (large, small)

    one, _ = engine(capacity_tokens=10)
    first, second = submitted(one, request(4, answer=4), request(4, answer=1))
    assert [ended for _, ended in endings(one)] == [first, second]
    first, second = submitted(one, request(4, answer=3), request(4, answer=1))
    assert [ended for _, ended in endings(one)] == [second, first]


def test_followed_answers_are_told_of_chunk_by_chunk_until_their_end():
    one, _ = engine()
    (asked,) = submitted(one, request(64, answer=5, chunk_tokens=2))
    assert [one.step() for _ in range(5)] == [
        BatchStep(2.25, ()),
        BatchStep(1.25, (), (asked,)),
        BatchStep(1.25, ()),
        BatchStep(1.25, (), (asked,)),
        BatchStep(1.25, (asked,)),
    ]
    assert not one.has_work


def test_requests_progress_and_finish_in_the_order_in_which_they_began():
    one, _ = engine()
    a, b, c = submitted(one, *(request(0, answer=n, chunk_tokens=1) for n in (3, 3, 2)))
    assert [(step.finished, step.progressed) for step in (one.step() for _ in range(3))] == [
        ((), (a, b, c)),
        ((c,), (a, b)),
        ((a, b), ()),
    ]

    followed, cache = engine(200, 4, max_step_tokens=64)
    plain, other = engine(200, 4, max_step_tokens=64)
    for one, chunk in ((followed, 3), (plain, None)):
        submitted(one, *(request(range(30 * n), answer=n, chunk_tokens=chunk) for n in range(1, 5)))
    assert durations(followed) == durations(plain)
    assert followed.usage == plain.usage
    assert cache._hash_of == other._hash_of


def test_requests_that_wait_never_begin_or_begin_earlier_when_others_are_aborted():
    one, cache = engine(capacity_tokens=200, max_running=1)
    first, second, third = submitted(one, request(64, answer=2), request(64), request(64))
    one.step()
    one.abort(second)
    assert [ended for _, ended in endings(one)] == [first, third]
    assert second.usage is None
    assert one.usage == CacheUsage(128, 0)
    assert_is_unused(cache, 200)

    one, _ = engine(capacity_tokens=10)
    first, second = submitted(one, request(8, answer=3), request(8))
    one.step()
    one.abort(first)
    assert one.step().finished == (second,)


def test_a_prompt_that_is_aborted_half_way_leaves_what_was_computed_and_the_others_go_on():
    one, cache = engine(capacity_tokens=400, max_step_tokens=64)
    long, next_one = submitted(one, request(range(160)), request(64))
    assert one.step() == BatchStep(1.0, ())
    one.abort(long)
    assert one.step() == BatchStep(2.25, (next_one,))
    assert not one.has_work
    assert_is_unused(cache, 400)
    (again,) = submitted(one, request(range(160)))
    durations(one)
    assert again.usage == CacheUsage(160, 64)


def test_a_request_that_is_aborted_while_it_is_answered_leaves_its_prompt_in_the_cache():
    one, cache = engine(capacity_tokens=200)
    first, second = submitted(one, request(range(64), answer=5), request(64, answer=3))
    one.step()
    one.abort(first)
    assert [one.step() for _ in range(2)] == [BatchStep(1.25, ()), BatchStep(1.25, (second,))]
    assert_is_unused(cache, 200)
    (again,) = submitted(one, request(range(65)))
    durations(one)
    assert again.usage == CacheUsage(65, 64)


def test_aborting_what_has_ended_changes_nothing_nor_the_tokens_that_were_generated():
    one, cache = engine(capacity_tokens=100)
    ended, left, other = submitted(one, request(8), request(8, answer=4), request(8, answer=2))
    assert one.step().finished == (ended,)
    for _ in range(2):
        one.abort(ended)
        one.abort(left)
    assert one.step().finished == (other,)
    assert_is_unused(cache, 100)

    one, _ = engine(max_step_tokens=64)
    _, left = submitted(one, request(64, answer=2), request(64, answer=9))
    one.step()
    one.step()
    assert one.generated_tokens == 3
    one.abort(left)
    one.step()
    assert one.generated_tokens == 3


scripts = st.lists(
    st.tuples(st.lists(st.integers(0, 1), max_size=20), st.integers(1, 4))
    | st.integers(0, 9)
    | st.none(),
    max_size=30,
)


@examples(100)
@given(scripts, st.integers(1, 4), st.integers(1, 9), st.integers(1, 3))
def test_every_request_ends_exactly_once_or_is_aborted(script, running, budget, block_size):
    one, cache = engine(36, block_size, max_running=running, max_step_tokens=budget)
    blocks = 36 // block_size
    asked, aborted, begun, ended = [], set(), [], []

    def step():
        ended.extend(one.step().finished)
        begun.extend([r for r in asked if r.usage is not None and r not in begun])
        unfinished = [r for r in asked if r.running is not None]
        assert len(unfinished) <= running
        assert not any(r in aborted for r in unfinished)

    for entry in script:
        if entry is None:
            step()
        elif isinstance(entry, int):
            if asked:
                one.abort(asked[entry % len(asked)])
                aborted.add(asked[entry % len(asked)])
        else:
            asked += submitted(one, request(*entry))
    for _ in range(1_000):
        if not one.has_work:
            break
        step()
    assert not one.has_work
    assert len(ended) == len(set(ended))
    assert {r for r in asked if r not in aborted} <= set(ended)
    assert begun == [r for r in asked if r in begun]  # in the order of arrival
    assert all(r.running is None for r in asked)
    assert one.usage == sum((r.usage for r in begun), CacheUsage())
    assert_is_unused(cache, blocks)


async def serve(timed, tokens, answer):
    request = BatchedRequest(tokens, answer)
    async with aclosing(timed.stream(request)) as counts:
        async for _ in counts:
            pass
    return request.usage


async def served(timed, start, length, answer=1, at=0.0):
    """Ask for an answer at a time; return (when it came, its usage)."""
    await asyncio.sleep(at - now())
    usage = await serve(timed, range(start, start + length), range(answer))
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
async def test_requests_that_the_engine_refuses_raise_and_leave_nothing_behind():
    timed, _ = engine(capacity_tokens=10)
    with pytest.raises(InvalidRequestError, match="larger than the cache"):
        await serve(timed, range(11), [1])
    with pytest.raises(InvalidRequestError, match="at least one token"):
        await serve(timed, range(2), [])
    assert await served(timed, 0, 8) == (0.125 + 1.25, CacheUsage(8, 0))
    assert timed.open_requests == 0
    assert not timed.has_work


async def followed(timed, start, length, answer=1, at=0.0, chunk_tokens=2):
    """Follow an answer from a time on; return (when, tokens) for each number."""
    await asyncio.sleep(at - now())
    async with aclosing(
        timed.stream(BatchedRequest(range(start, start + length), range(answer), chunk_tokens))
    ) as counts:
        return [(now(), said) async for said in counts]


@virtual_time
async def test_an_answer_is_followed_beside_one_that_is_waited_for():
    timed, _ = engine()
    # 128 tokens and two answers: 2 + 1.5 s; then 1.5 s twice, 1.25 s twice
    assert (
        await asyncio.gather(followed(timed, 0, 64, answer=5), served(timed, 500, 64, answer=3))
    ) == [[(5.0, 2), (7.75, 4), (9.0, 5)], (6.5, CacheUsage(64, 0))]


@virtual_time
async def test_who_leaves_with_the_last_token_has_aborted_nothing():
    timed, _ = engine()
    counts = timed.stream(BatchedRequest(range(64), range(64, 66), 2))
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
        await serve(timed, ["no", "tokens"], [1])

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
