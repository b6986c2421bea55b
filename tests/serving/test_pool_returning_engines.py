"""Engines that die and come back: the index keeps what each engine has answered since."""

import asyncio
import threading
from collections import defaultdict

import httpx
from example_counts import examples
from hypothesis import example, given
from hypothesis import strategies as st
from pool_helpers import (
    IDLE,
    Clock,
    Gate,
    Network,
    asking,
    index_tokens,
    long_block,
    planner_of,
    pool_on,
    queues,
    state_of,
    until,
)

from ctxreuse import ContextRequest
from ctxreuse.errors import EngineError
from ctxreuse.serving import EmulatedEngine


class Answered:
    """What each engine has answered since the pool has last seen it fail: it must be in the index.

    Every request has a document of its own, so nothing is expected in a cache, and nothing missed.
    """

    def __init__(self, pool):
        self.pool = pool
        self.count = 0
        self._documents = defaultdict(list)

    async def ask(self, number, query="Why?"):
        request = ContextRequest([long_block(f"d{number}")], query)
        try:
            served = await self.pool.complete(request)
        except EngineError:
            return
        self.count += 1
        failed = {one.name: one.failed for one in self.pool.statistics()}
        self._documents[served.replica].append((failed[served.replica], number))

    async def check(self):
        for name, is_ready in (await self.pool.check()).items():
            if not is_ready:
                self._documents[name].clear()

    def missing(self):
        missing = defaultdict(list)
        for status in self.pool.statistics():
            for failed, number in self._documents[status.name]:
                request = ContextRequest([long_block(f"d{number}")])
                is_known = planner_of(self.pool, status.name).cached_tokens(request)
                if failed == status.failed and not is_known:
                    missing[status.name].append(number)
        return dict(missing)


class MortalNetwork(Network):
    """Engines that break what is on its way when they die, and come back with an empty cache."""

    def __init__(self, gate, *names):
        super().__init__(**{name: EmulatedEngine(answer=gate) for name in names})
        self._deaths = {name: asyncio.Event() for name in names}

    async def handle_async_request(self, request):
        death = self._deaths[request.url.host]
        answer = asyncio.ensure_future(self._answer(request))
        dying = asyncio.ensure_future(death.wait())
        try:
            await asyncio.wait([answer, dying], return_when=asyncio.FIRST_COMPLETED)
            if death.is_set():
                raise httpx.ReadError("connection broken", request=request)
            return answer.result()
        finally:
            for task in (answer, dying):
                task.cancel()

    async def _answer(self, request):
        response = await super().handle_async_request(request)
        content = b"".join([part async for part in response.aiter_bytes()])
        return httpx.Response(response.status_code, headers=response.headers, content=content)

    def die(self, name):
        self.down.add(name)
        self._deaths[name].set()

    def come_back(self, name):
        self.engines[name].reset_prefix_cache()
        self._deaths[name] = asyncio.Event()
        self.down.discard(name)


names = st.sampled_from("abc")
steps = st.one_of(
    st.tuples(st.just("ask"), st.booleans()),
    st.tuples(st.just("ask"), st.booleans()),
    st.tuples(st.just("die"), names),
    st.tuples(st.just("break"), names),
    st.tuples(st.just("come back"), names),
    st.tuples(st.just("check"), st.just(None)),
    st.tuples(st.just("answer"), st.just(None)),
    st.tuples(st.just("go on"), st.integers(1, 30)),
    st.tuples(st.just("later"), st.integers(1, 20)),
)
AT_WORK = [("ask", True)] * 6 + [("go on", 30)]
FAILING = [("break", name) for name in "abc"] + [("ask", False)] * 3 + [("go on", 30)]
DYING = [("die", name) for name in "abc"] + [("go on", 9)]


@examples(60)
@example(AT_WORK + FAILING + [("answer", None), ("go on", 30)], 1)
@example(AT_WORK + FAILING + [("come back", "a"), ("later", 20), ("answer", None)], 1)
@example((AT_WORK + DYING) * 2, 3)
@given(st.lists(steps, max_size=30), st.integers(1, 3))
def test_what_an_engine_has_answered_since_it_failed_is_in_the_index(steps, failures):
    async def main():
        gate, clock = Gate(), Clock()
        network = MortalNetwork(gate, *"abc")
        async with pool_on(network, failures=failures, open_s=10, clock=clock) as pool:
            answered, tasks = Answered(pool), []
            for number, (step, value) in enumerate(steps):
                if step == "ask":
                    query = "slow?" if value else "quick?"
                    tasks.append(asyncio.create_task(answered.ask(number, query)))
                elif step == "die":
                    network.die(value)
                elif step == "break":  # it answers with errors, and finishes what it has begun
                    network.statuses[value, "/v1/chat/completions"] = 500
                elif step == "come back":
                    network.statuses.pop((value, "/v1/chat/completions"), None)
                    network.come_back(value)
                elif step == "check":
                    await answered.check()
                elif step == "answer":
                    gate.opened.set()
                    await asyncio.sleep(0)
                    gate.opened.clear()
                elif step == "later":
                    clock.now += value
                else:
                    for _ in range(value):
                        await asyncio.sleep(0)
            gate.opened.set()
            await asyncio.gather(*tasks)
            assert queues(pool) == IDLE
            assert pool.faults == 0
            assert answered.missing() == {}
            for status in pool.statistics():
                known = planner_of(pool, status.name).statistics().requests
                assert known <= status.answered

    asyncio.run(main())


async def test_what_was_on_its_way_when_a_circuit_opened_is_known_once_it_is_answered():
    gate = Gate()
    network = Network(a=EmulatedEngine(fail=[None, None, 500], answer=gate), b=EmulatedEngine())
    async with pool_on(network, failures=1, clock=Clock()) as pool:
        tasks = [asyncio.create_task(pool.complete(asking(n, "slow"), replica="a")) for n in "lm"]
        await until(lambda: gate.waiting == 2)
        assert (await pool.complete(asking("n"), replica="a")).replica == "b"
        assert (state_of(pool, "a"), index_tokens(pool)["a"]) == ("resting", 0)
        gate.opened.set()
        await asyncio.gather(*tasks)
        assert (state_of(pool, "a"), index_tokens(pool)["a"]) == ("up", 160)
        served = await pool.complete(asking("l"), replica="a")
        assert served.plan.expected_cached_tokens == 80
        assert served.completion.cached_tokens > 0


async def test_an_old_expectation_does_not_empty_the_index_of_an_engine_with_a_bounded_cache():
    """An answer that was planned for the lost cache is no measurement of the new one."""
    gate = Gate()
    engine = EmulatedEngine(capacity_tokens=16_000, fail=[None, None, 500], answer=gate)
    async with pool_on(Network(a=engine, b=EmulatedEngine()), failures=1, clock=Clock()) as pool:
        await pool.complete(asking("l"), replica="a")
        task = asyncio.create_task(pool.complete(asking("l", "slow"), replica="a"))
        await until(lambda: gate.waiting == 1)
        await pool.complete(asking("n"), replica="a")
        engine.reset_prefix_cache()
        gate.opened.set()
        assert (await task).plan.expected_cached_tokens == 80
        assert index_tokens(pool)["a"] == 80


async def test_an_engine_that_is_too_slow_for_a_probe_keeps_its_index_until_it_shows_a_loss():
    network = Network(a=EmulatedEngine(), b=EmulatedEngine())
    async with pool_on(network, clock=Clock()) as pool:
        for name in "lm":
            await pool.complete(asking(name), replica="a")
        network.silent.add("a")
        assert (await pool.check(limit_s=0.01))["a"] is False
        assert (state_of(pool, "a"), index_tokens(pool)["a"]) == ("resting", 160)
        network.silent.clear()
        assert (await pool.check())["a"] is True
        assert (await pool.complete(asking("l"), replica="a")).completion.cached_tokens > 0
        assert (pool.cache_epoch("a"), index_tokens(pool)["a"]) == (0, 160)
        network.silent.add("a")
        await pool.check(limit_s=0.01)
        network.silent.clear()
        await pool.check()
        network.engines["a"].reset_prefix_cache()
        assert (await pool.complete(asking("l"), replica="a")).completion.cached_tokens == 0
        assert (pool.cache_epoch("a"), index_tokens(pool)["a"]) == (1, 80)


async def test_a_probe_that_fails_while_requests_are_answered_proves_nothing():
    class SlowHealth(Network):
        async def handle_async_request(self, request):
            if request.url.path == "/health":
                await gate.wait()
                raise httpx.ConnectError("connection refused", request=request)
            return await super().handle_async_request(request)

    gate = asyncio.Event()
    async with pool_on(SlowHealth(a=EmulatedEngine()), clock=Clock()) as pool:
        probe = asyncio.create_task(pool.check())
        await until(lambda: len(pool._replicas["a"]._clients) == 1)
        await pool.complete(asking("l"))
        gate.set()
        assert await probe == {"a": True}
        assert (state_of(pool, "a"), index_tokens(pool)) == ("up", {"a": 80})


async def test_an_index_that_follows_the_engines_events_is_not_emptied_by_guesses():
    network = Network(a=EmulatedEngine(), b=EmulatedEngine())
    async with pool_on(network, failures=1, clock=Clock()) as pool:
        await pool.complete(asking("l"), replica="a")
        replica = pool._replicas["a"]
        replica.events = type("Events", (), {"stop": lambda self: None})()
        network.statuses["a", "/v1/chat/completions"] = 500
        await pool.complete(asking("m"), replica="a")
        assert (state_of(pool, "a"), index_tokens(pool)["a"]) == ("resting", 80)


async def test_nobody_waits_for_an_index_that_is_being_emptied(monkeypatch):
    network = Network(a=EmulatedEngine(), b=EmulatedEngine())
    async with pool_on(network) as pool:
        await pool.complete(asking("x"), replica="a")
        planner, is_emptying, go_on = planner_of(pool, "a"), threading.Event(), threading.Event()
        evict_tokens = planner.evict_tokens

        def slowly(tokens):
            is_emptying.set()
            assert go_on.wait(60)
            return evict_tokens(tokens)

        monkeypatch.setattr(planner, "evict_tokens", slowly)
        replica = pool._replica("a")
        replica._to_note.append(replica._reset)
        emptying = asyncio.get_running_loop().run_in_executor(None, replica._note_in_index)
        try:
            assert await asyncio.to_thread(is_emptying.wait, 60)
            for name in "aba":
                served = await asyncio.wait_for(pool.complete(asking("x"), replica=name), 60)
                assert served.replica == name
            assert pool.available() == ("a", "b")
            assert [one.answered for one in pool.statistics()] == [3, 1]
        finally:
            go_on.set()
        await emptying
        # what was answered while the index was emptied is in there again
        assert (pool.cache_epoch("a"), index_tokens(pool)) == (1, {"a": 80, "b": 80})
