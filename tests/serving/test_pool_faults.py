import asyncio
import time
from collections import Counter
from itertools import product
from typing import Any

import httpx
import pytest
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st
from pool_helpers import (
    IDLE,
    Clock,
    Gate,
    Network,
    asking,
    index_tokens,
    planner_of,
    pool_on,
    queues,
    state_of,
    until,
)
from virtual_time import virtual_time

from ctxreuse.errors import EngineError
from ctxreuse.serving import EmulatedEngine, EngineClient, EnginePool

ALWAYS = [503] * 100


def network_of(**failures):
    return Network(**{name: EmulatedEngine(fail=fail or ()) for name, fail in failures.items()})


def arrivals(network):
    return {name: len(engine.requests) for name, engine in network.engines.items()}


@pytest.fixture
def waits(monkeypatch):
    waited, sleep = [], asyncio.sleep

    async def note(seconds, result=None):
        if seconds:
            waited.append(seconds)
        return await sleep(0, result)

    monkeypatch.setattr(asyncio, "sleep", note)
    return waited


STATES: dict[Any, str] = {
    **dict.fromkeys((400, 413, 422, 451), ""),  # the request is at fault
    **dict.fromkeys(("refuse", 408, 409, 425, 500, 502, 503, 504, 599), "resting"),
    **dict.fromkeys((429, 529), "up"),
    301: "refuses: 301 Moved Permanently", 302: "refuses: 302 Found", 399: "refuses: 399",
    307: "refuses: 307 Temporary Redirect", 308: "refuses: 308 Permanent Redirect",
    401: "refuses: 401 Unauthorized", 402: "refuses: 402 Payment Required",
    403: "refuses: 403 Forbidden", 404: "refuses: 404 Not Found",
    405: "refuses: 405 Method Not Allowed", 410: "refuses: 410 Gone",
    407: "refuses: 407 Proxy Authentication Required", 421: "refuses: 421 Misdirected Request",
}  # fmt: skip
# a stream breaks when a piece has been shown
ANSWERS = [*product(STATES.items(), [False, True]), (("break", "resting"), False)]


@pytest.mark.parametrize(("answered", "streams"), ANSWERS)
async def test_what_an_engine_answers_says_if_another_is_asked_and_it_rests(
    answered, streams, waits
):
    status, state = answered
    network = network_of(a=[status], b=None)
    async with pool_on(network, failures=1, clock=Clock()) as pool:
        if state:
            served = await ask(pool, streams, replica="a")
            assert (served.completion.text, served.replica, served.tried) == ("OK.", "b", ("a",))
        else:
            with pytest.raises(EngineError, match=f"at a did not answer: status {status}"):
                await ask(pool, streams, replica="a")
        assert [one.failed for one in pool.statistics()] == [1 if state else 0, 0]
        assert state_of(pool, "a") == (state or "up")
        assert pool.available() == (("a", "b") if state in ("", "up") else ("b",))
        assert index_tokens(pool) == {"a": 0, "b": 80 if state else 0}
        assert queues(pool) == IDLE
    assert arrivals(network) == {"a": 1, "b": 1 if state else 0}
    assert waits == []


async def ask(pool, streams, **options):
    if not streams:
        return await pool.complete(asking("x"), **options)
    async with pool.stream(asking("x"), **options) as pieces:
        assert "".join([piece async for piece in pieces]) == "OK."
    return pieces.served


async def test_what_all_refuse_is_the_first_ones_error_and_puts_none_to_rest():
    network = network_of(a=[404] * 9, b=[401] * 9, c=[307] * 9)
    async with pool_on(network, attempts=1, failures=1) as pool:
        for first, status in zip("abc", (404, 401, 307), strict=True):
            with pytest.raises(EngineError) as caught:
                await pool.complete(asking("x"), replica=first)
            assert (caught.value.status, caught.value.attempts) == (status, 3)
            assert caught.value.__notes__[0].startswith(f"sent to {first}, ")
        assert {one.state for one in pool.statistics()} == {"up"}
    assert arrivals(network) == {"a": 3, "b": 3, "c": 3}


@pytest.mark.parametrize(
    ("failures", "down", "goes", "waited"),
    [
        ({"a": [401, 401], "b": [503, 503]}, "", "abb b", [0.5, 1.0]),  # who refuses, not again
        ({"a": [503, "refuse", "break"]}, "", "aaa a", [0.5, 1.0, 2.0]),  # it is alone
        ({"a": [429], "b": None}, "b", "a a", [0.5]),  # who rests is left alone
    ],
)
async def test_who_may_answer_is_asked_again_after_longer_waits(
    failures, down, goes, waited, waits
):
    network = network_of(**failures)
    network.down.update(down)
    async with pool_on(network, attempts=4, backoff_s=0.5) as pool:
        await pool.check()
        served = await pool.complete(asking("x"), replica="a")
        assert f"{''.join(served.tried)} {served.replica}" == goes
        assert state_of(pool, "a") == ("refuses: 401 Unauthorized" if "abb" in goes else "up")
    assert waits == waited
    assert not any("/v1/chat/completions" in network.paths(name) for name in down)


async def test_who_refuses_rests_for_longer_each_time_until_it_answers(caplog):
    network, clock = network_of(a=[404, 404, "refuse", 400], b=None), Clock()
    async with pool_on(network, clock=clock, open_s=10) as pool:
        for rest_s, state in (10, STATES[404]), (20, STATES[404]), (40, "resting"):
            assert (await pool.complete(asking("x"), replica="a")).replica == "b"
            clock.now += rest_s - 0.1
            await pool.check()  # that it is healthy says nothing of the model
            assert state_of(pool, "a") == state
            assert f"a rests for {rest_s} s: the" in caplog.text
            clock.now += 0.1
            assert state_of(pool, "a") == "on trial"
        with pytest.raises(EngineError, match="status 400"):
            await pool.complete(asking("x"), replica="a")
        assert (state_of(pool, "a"), pool.cache_epoch("a")) == ("up", 0)


async def test_each_replica_is_tried_before_any_is_tried_again_so_many_times_at_most(waits):
    network = network_of(a=ALWAYS, b=ALWAYS, c=ALWAYS)
    async with pool_on(network, attempts=5, backoff_s=0.5) as pool:
        with pytest.raises(EngineError) as info:
            await pool.complete(asking("x", "The question?"), replica="c")
    assert (info.value.status, info.value.attempts) == (503, 5)
    assert " (attempts: 5); the cause says" in str(info.value)
    assert set(info.value.__notes__[0].split()[3].rstrip(",")) <= set("ab")
    assert sorted(arrivals(network).values()) == [1, 1, 3]
    # nothing while there are others, then longer and longer at the one that is tried again
    assert waits == [0.5, 1.0]


async def test_a_request_fails_with_the_engines_error_where_its_only_replica_begins_to_drain():
    network = network_of(a=None)
    async with pool_on(network) as pool:
        network.engines["a"]._fail = lambda number, body: (pool.drain("a"), 503)[1]
        with pytest.raises(EngineError, match="status 503"):
            await pool.complete(asking("x"))


async def test_a_context_request_that_moves_is_planned_anew():
    network = network_of(a=[None, 503], b=None)
    async with pool_on(network) as pool:
        await pool.complete(asking("xy"), replica="a")
        await pool.complete(asking("yx"), replica="b")
        served = await pool.complete(asking("zxy"), replica="a")
        assert (served.replica, served.tried) == ("b", ("a",))
        assert [one.id for one in served.plan.blocks] == ["y", "x", "z"]
        assert index_tokens(pool) == {"a": 160, "b": 240}


async def test_a_stream_that_breaks_after_a_piece_raises():
    network = network_of(a=["break"], b=None)
    async with pool_on(network) as pool:
        stream = pool.stream(asking("x"), replica="a")
        assert await anext(stream) == "OK."
        with pytest.raises(EngineError, match="the engine at a did not answer"):
            await anext(stream)
        assert [one.failed for one in pool.statistics()] == [1, 0]
        assert index_tokens(pool) == {"a": 0, "b": 0}
        assert queues(pool) == IDLE
    assert arrivals(network) == {"a": 1, "b": 0}


async def test_a_stream_that_is_left_early_leaves_nothing_behind():
    network = Network(a=EmulatedEngine(answer="one two three"))
    async with pool_on(network, failures=1) as pool:
        async with pool.stream(asking("x")) as stream:
            assert await anext(stream) == "one"
            assert queues(pool) == {(1, 0, 225)}
        assert queues(pool) == IDLE
        assert index_tokens(pool) == {"a": 0}
        assert state_of(pool, "a") == "up"
        with pytest.raises(EngineError, match="has not ended"):
            stream.served  # noqa: B018 - it raises


@virtual_time
async def test_who_takes_too_long_is_left_for_another():
    network = network_of(a=None, b=None)
    network.silent.add("a")
    async with pool_on(network) as pool:
        served = await pool.complete(asking("x"), replica="a", limit_s=0.2)
        assert (served.replica, served.tried) == ("b", ("a",))
        async with pool.stream(asking("x"), replica="a", limit_s=0.2) as stream:
            assert [piece async for piece in stream] == ["OK."]
        assert stream.served.tried == ("a",)
        assert [one.failed for one in pool.statistics()] == [2, 0]
        assert queues(pool) == IDLE


async def test_where_all_take_too_long_the_error_says_so():
    network = network_of(a=None)
    network.silent.add("a")
    async with pool_on(network, attempts=1) as pool:
        message = r"^replica a did not answer within 0.01 s; give a larger limit_s if it needs long"
        with pytest.raises(EngineError, match=message) as info:
            await pool.complete(asking("x", "The question?"), limit_s=0.01)
        assert isinstance(info.value.__cause__, TimeoutError)
        with pytest.raises(EngineError, match=message):
            await anext(pool.stream(asking("x"), limit_s=0.01))
        assert index_tokens(pool) == {"a": 0}
        assert queues(pool) == IDLE


@virtual_time
async def test_the_time_is_for_the_whole_answer():
    async def answer():
        for _ in range(200):
            yield "word "
            await asyncio.sleep(0.005)

    network = Network(a=EmulatedEngine(answer=lambda body: answer()), b=EmulatedEngine())
    async with pool_on(network) as pool:
        stream = pool.stream(asking("x"), replica="a", limit_s=0.6)
        assert await anext(stream) == "word "
        with pytest.raises(EngineError, match=r"replica a did not answer within 0\.6 s"):
            [piece async for piece in stream]
        assert queues(pool) == IDLE
        assert [one.failed for one in pool.statistics()] == [1, 0]


@virtual_time
async def test_the_time_in_the_waiting_room_does_not_count():
    gate = Gate()
    network = Network(a=EmulatedEngine(answer=gate))
    async with pool_on(network, concurrency=1, attempts=1) as pool:
        slow = asyncio.create_task(pool.complete(asking("x", "slow")))
        await until(lambda: gate.waiting == 1)
        other = asyncio.create_task(pool.complete(asking("y"), limit_s=0.2))
        await until(lambda: pool.statistics()[0].waiting == 1)
        await asyncio.sleep(0.25)
        gate.opened.set()
        assert [(await task).replica for task in (slow, other)] == ["a", "a"]


async def test_who_fails_several_times_in_a_row_is_left_alone_for_a_while():
    clock = Clock()
    network = network_of(a=[503, None, 503, 503], b=None)
    async with pool_on(network, failures=2, open_s=10, clock=clock) as pool:

        async def place():
            return (await pool.complete(asking("x"), replica="a")).replica

        assert [await place() for _ in range(3)] == ["b", "a", "b"]
        assert (state_of(pool, "a"), pool.cache_epoch("a")) == ("up", 0)
        assert await place() == "b"
        assert (state_of(pool, "a"), pool.available()) == ("resting", ("b",))
        assert pool.cache_epoch("a") == 1  # its cache counts as empty
        assert index_tokens(pool) == {"a": 0, "b": 80}
        clock.now = 9.9
        assert [await place() for _ in range(3)] == ["b", "b", "b"]
        assert arrivals(network)["a"] == 4
        clock.now = 10
        assert (state_of(pool, "a"), pool.available()) == ("on trial", ("a", "b"))
        assert await place() == "a"
        assert (state_of(pool, "a"), pool.cache_epoch("a")) == ("up", 1)


async def test_a_trial_ends_if_it_is_cancelled_and_not_if_an_older_request_is():
    clock = Clock()
    gate = Gate()
    fail = [None, 503]
    network = Network(a=EmulatedEngine(fail=fail, answer=gate), b=EmulatedEngine())
    async with pool_on(network, failures=1, open_s=10, clock=clock) as pool:
        older = asyncio.create_task(pool.complete(asking("x", "slow"), replica="a"))
        await until(lambda: gate.waiting == 1)
        await pool.complete(asking("x"), replica="a")
        clock.now = 10
        trial = asyncio.create_task(pool.complete(asking("x", "slow"), replica="a"))
        await until(lambda: gate.waiting == 2)
        older.cancel()
        await asyncio.wait([older])
        assert pool.available() == ("b",)
        trial.cancel()
        await asyncio.wait([trial])
        assert (state_of(pool, "a"), pool.available()) == ("on trial", ("a", "b"))
        gate.opened.set()
        assert (await pool.complete(asking("x"), replica="a")).replica == "a"


async def test_a_trial_that_waits_for_a_place_is_the_only_one():
    clock = Clock()
    gate = Gate()
    network = Network(a=EmulatedEngine(fail=[None, 503], answer=gate), b=EmulatedEngine())
    options = {"failures": 1, "open_s": 10, "concurrency": 2}
    async with pool_on(network, clock=clock, **options) as pool:
        older = [asyncio.create_task(pool.complete(asking("x", "slow"), replica="a"))]
        await until(lambda: gate.waiting == 1)
        await pool.complete(asking("x"), replica="a")
        clock.now = 10
        older.append(asyncio.create_task(pool.complete(asking("y", "slow"), replica="a")))
        await until(lambda: gate.waiting == 2)
        assert (await pool.complete(asking("x"), replica="a")).replica == "b"
        gate.opened.set()
        assert [(await task).replica for task in older] == ["a", "a"]
        assert state_of(pool, "a") == "up"


async def test_where_all_rest_they_are_tried_nevertheless():
    network = network_of(a=[503], b=[503])
    async with pool_on(network, failures=1, attempts=2, clock=Clock()) as pool:
        with pytest.raises(EngineError):
            await pool.complete(asking("x"))
        assert pool.available() == ()
        served = await pool.complete(asking("x"), replica="b")
        assert (served.replica, served.tried) == ("b", ())
        assert pool.available() == ("b",)


async def test_that_a_replica_is_healthy_does_not_hide_that_requests_fail_in_a_row():
    network = network_of(a=ALWAYS, b=None)
    async with pool_on(network, failures=2, clock=Clock()) as pool:
        for _ in range(2):
            await pool.complete(asking("x"), replica="a")
            assert await pool.check() == {"a": True, "b": True}
        assert (state_of(pool, "a"), pool.cache_epoch("a")) == ("resting", 1)


async def test_an_engine_that_serves_nothing_from_its_cache_several_times_counts_as_empty():
    network = network_of(a=None)
    async with pool_on(network) as pool:
        for name in "lmnop":
            await pool.complete(asking(name))
        network.engines["a"].reset_prefix_cache()
        generations = []
        for name in "lmn":
            served = await pool.complete(asking(name))
            assert (served.completion.cached_tokens, served.plan.expected_cached_tokens) == (0, 80)
            generations.append(pool.cache_epoch("a"))
        assert generations == [0, 0, 1]
        # what it has computed since stays: the three that it served nothing for
        statistics = planner_of(pool, "a").statistics()
        assert (statistics.tokens, statistics.nodes) == (240, 3)
        served = await pool.complete(asking("o"))
        assert served.plan.expected_cached_tokens == 0
        assert pool.cache_epoch("a") == 1


async def test_a_hit_in_between_and_small_or_unknown_counts_say_that_the_cache_is_there():
    network = network_of(a=None)
    async with pool_on(network) as pool:
        await pool.complete(asking("l"))
        for _ in range(5):
            network.engines["a"].reset_prefix_cache()
            served = [await pool.complete(asking("l")) for _ in range(2)]
            assert [one.completion.cached_tokens > 0 for one in served] == [False, True]
        assert (pool.cache_epoch("a"), index_tokens(pool)) == (0, {"a": 80})

    engine = EmulatedEngine(prompt_tokens_details=False)
    async with pool_on(Network(a=engine)) as pool:
        for _ in range(5):
            await pool.complete(asking("x"))
        assert (pool.cache_epoch("a"), index_tokens(pool)) == (0, {"a": 80})


async def test_requests_that_were_on_their_way_when_the_cache_was_lost_count_once():
    gate = Gate()
    network = Network(a=EmulatedEngine(answer=gate))
    async with pool_on(network) as pool:
        for name in "lmnopqrst":
            await pool.complete(asking(name))
        network.engines["a"].reset_prefix_cache()
        tasks = [asyncio.create_task(pool.complete(asking(name, "slow"))) for name in "lmnopqrst"]
        await until(lambda: gate.waiting == 9)
        gate.opened.set()
        await asyncio.gather(*tasks)
        assert pool.cache_epoch("a") == 1


async def test_a_replica_that_is_not_ready_is_left_alone_at_once_and_comes_back_empty():
    network = network_of(a=None, b=None)
    async with pool_on(network, clock=Clock()) as pool:
        for name in "ab":
            await pool.complete(asking("x"), replica=name)
        network.down.add("a")
        assert await pool.check() == {"a": False, "b": True}
        assert await pool.check() == {"a": False, "b": True}
        assert (state_of(pool, "a"), pool.cache_epoch("a")) == ("resting", 1)
        assert index_tokens(pool) == {"a": 0, "b": 80}
        assert pool.route(asking("x"), among=["a", "b"]) == "b"
        network.down.clear()
        assert await pool.check() == {"a": True, "b": True}
        assert (state_of(pool, "a"), pool.cache_epoch("a")) == ("up", 1)
        assert pool.available() == ("a", "b")
        assert [one.failed for one in pool.statistics()] == [0, 0]


@pytest.mark.parametrize(("status", "is_ready"), [(404, True), (401, True), (503, False)])
async def test_a_replica_without_a_health_route_counts_as_ready(status, is_ready):
    network = network_of(a=None)
    network.statuses["a", "/health"] = status
    async with pool_on(network) as pool:
        assert await pool.check() == {"a": is_ready}


async def test_the_time_in_which_a_client_is_made_is_not_the_engines():
    async with pool_on(network_of(a=None)) as pool:
        replica = pool._replicas["a"]
        connect, replica._connect = replica._connect, lambda: time.sleep(0.2) or connect()
        assert await pool.check(limit_s=0.15) == {"a": True}


async def test_watching_notices_what_goes_and_comes_until_it_is_cancelled():
    network = network_of(a=None, b=None)
    async with pool_on(network, clock=Clock()) as pool:
        watch = asyncio.create_task(pool.watch(interval_s=0))
        network.down.add("a")
        await until(lambda: pool.available() == ("b",))
        network.down.clear()
        await until(lambda: pool.available() == ("a", "b"))
        watch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watch
        seen = len(network.sent)
        await asyncio.sleep(0.005)
        assert len(network.sent) == seen


async def test_a_request_that_is_cancelled_while_it_waits_to_be_tried_again_is_not_sent_again():
    network = network_of(a=ALWAYS)
    async with pool_on(network, backoff_s=60) as pool:
        task = asyncio.create_task(pool.complete(asking("x")))
        await until(lambda: pool.statistics()[0].failed == 1)
        task.cancel()
        await asyncio.wait([task])
        assert queues(pool) == IDLE
    assert arrivals(network) == {"a": 1}


@pytest.mark.parametrize("failure", ["refuse", "break", 503, 400])
async def test_no_error_holds_a_documents_text(failure, caplog):
    network = network_of(a=[failure] * 3)
    async with pool_on(network) as pool:
        with pytest.raises(EngineError) as info:
            await pool.complete(asking("secret", "private?"))
    words = str(info.value) + "".join(getattr(info.value, "__notes__", ())) + caplog.text
    assert "secret" not in words
    assert "private" not in words
    assert words.startswith("the engine at a did not answer: ")


async def test_faults_of_bookkeeping_do_not_fail_a_request(caplog):
    class Client(EngineClient):
        async def metrics(self):
            raise RuntimeError("secret")

    http = httpx.AsyncClient(transport=EmulatedEngine().transport())
    async with http, EnginePool({"a": lambda: Client("http://a", http_client=http)}) as pool:
        assert (await pool.complete(asking("x"))).completion.text == "OK."
        assert (pool.faults, index_tokens(pool)) == (1, {"a": 80})
    assert "RuntimeError" in caplog.text
    assert "secret" not in caplog.text


failures = st.lists(
    st.sampled_from([None, None, None, 503, 429, 400, "refuse", "break"]), max_size=12
)


@examples(30)
@given(
    fail=st.tuples(failures, failures, failures),
    ways=st.lists(st.sampled_from(["complete", "stream", "cancel", "leave"]), max_size=8),
    attempts=st.integers(1, 4),
    limit=st.integers(1, 3),
    concurrency=st.integers(1, 3),
)
def test_each_request_is_answered_once_or_raises_and_nothing_stays(
    fail, ways, attempts, limit, concurrency
):
    def answer(body):
        return "It is " + body["messages"][-1]["content"].split("\n\n")[-1]

    network = Network(
        **{
            name: EmulatedEngine(fail=some, answer=answer)
            for name, some in zip("abc", fail, strict=True)
        }
    )
    outcomes = Counter()

    async def ask(pool, number, way):
        request = asking("xyz"[number % 3], f"number {number}")
        try:
            if way == "complete":
                served = await pool.complete(request)
            elif way == "stream":
                stream = pool.stream(request)
                text = "".join([piece async for piece in stream])
                served = stream.served
                assert text == served.completion.text
            elif way == "leave":
                async with pool.stream(request) as stream:
                    await anext(stream)
                outcomes["left"] += 1
                return
            else:
                task = asyncio.create_task(pool.complete(request))
                for _ in range(number):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
                outcomes["left"] += 1
                if not task.cancelled() and task.exception() is None:
                    outcomes[task.result().replica] += 1
                return
        except EngineError:
            outcomes["failed"] += 1
            return
        assert served.completion.text == f"It is number {number}"
        assert len(served.tried) < attempts
        outcomes["served"] += 1
        outcomes[served.replica] += 1

    async def main():
        options = {"attempts": attempts, "failures": limit, "concurrency": concurrency}
        async with pool_on(network, **options) as pool:
            await asyncio.gather(*(ask(pool, number, way) for number, way in enumerate(ways)))
            assert queues(pool) == IDLE
            assert pool.faults == 0
            for status in pool.statistics():
                assert status.answered == outcomes[status.name]
                known = planner_of(pool, status.name).statistics().requests
                assert known <= status.answered
                # who failed has been reset, which may have been while others were on their way
                assert status.cache_epoch or known == status.answered

    asyncio.run(main())
    assert outcomes["served"] + outcomes["failed"] + outcomes["left"] == len(ways)
