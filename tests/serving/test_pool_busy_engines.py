"""An engine that has too much to do is not one that is gone."""

import asyncio

import httpx
import pytest
from client_helpers import completed
from pool_helpers import Clock, Network, asking, index_tokens, pool_on, state_of

from ctxreuse import ContextBlock, ContextRequest
from ctxreuse.errors import EngineError
from ctxreuse.serving import EmulatedEngine


class BusyNetwork(Network):
    def __init__(self, **engines):
        super().__init__(**engines)
        self.busy = {}  # name -> status and headers of all its answers
        self.is_over = lambda: False

    async def handle_async_request(self, request):
        if request.url.host in self.busy and not self.is_over():
            self.sent.append(request)
            status, headers = self.busy[request.url.host]
            return httpx.Response(status, headers=headers)
        return await super().handle_async_request(request)

    def completions(self, name):
        return self.paths(name).count("/v1/chat/completions")


def network_of(*names):
    return BusyNetwork(**{name: EmulatedEngine() for name in names})


@pytest.fixture
def clock(monkeypatch):
    """A clock that sleeping moves on, and the only one there is."""
    clock, sleep = Clock(), asyncio.sleep

    async def move(seconds, result=None):
        clock.now += seconds
        return await sleep(0, result)

    monkeypatch.setattr(asyncio, "sleep", move)
    return clock


BUSY = [(429, {}), (429, {"retry-after": "0"}), (529, {}), (503, {"retry-after": "0"})]


@pytest.mark.parametrize(("status", "headers"), BUSY)
async def test_a_busy_engine_keeps_its_circuit_and_its_index(status, headers, clock):
    network = network_of("a", "b")
    async with pool_on(network, failures=3, clock=clock) as pool:
        await pool.complete(asking("x"), replica="a")
        network.busy["a"] = status, headers
        for name in "lmnop":
            served = await pool.complete(asking(name), replica="a")
            assert (served.replica, served.tried) == ("b", ("a",))
        assert (state_of(pool, "a"), pool.cache_epoch("a")) == ("up", 0)
        assert index_tokens(pool)["a"] == 80
        status_of_a = pool.statistics()[0]
        assert (status_of_a.busy, status_of_a.failed) == (5, 5)


async def test_requests_keep_away_from_a_busy_engine_for_as_long_as_it_asks(clock):
    network = network_of("a", "b")
    async with pool_on(network, clock=clock) as pool:
        await pool.complete(asking("x"), replica="a")
        network.busy["a"] = 429, {"retry-after": "5"}
        assert (await pool.complete(asking("x"))).replica == "b"
        network.busy.clear()
        network.engines["b"].reset_prefix_cache()
        for _ in range(3):
            assert (await pool.complete(asking("xy"))).replica == "b"
        assert (network.completions("a"), clock.now) == (2, 0)
        clock.now = 5
        await pool.complete(asking("z"), replica="a")
        assert network.completions("a") == 3


async def test_waiting_for_a_busy_engine_is_cheaper_than_computing_much_elsewhere(clock):
    network = network_of("a", "b")
    blocks = [ContextBlock(id=n, text=f"{n} " * 400, tokens=400) for n in range(30)]
    request = ContextRequest(blocks, "Why?")
    async with pool_on(network, clock=clock) as pool:
        await pool.complete(request, replica="a")
        network.busy["a"] = 429, {"retry-after": "0.5"}  # in which 5,000 of 12,000 are computed
        network.is_over = lambda: clock.now >= 0.5
        served = await pool.complete(request)
        assert (served.replica, served.tried) == ("a", ("a",))
        assert (clock.now, network.completions("b")) == (0.5, 0)


async def test_an_engine_that_is_alone_is_waited_for_as_long_as_it_asks(clock):
    network = network_of("a")
    async with pool_on(network, backoff_s=60, clock=clock) as pool:
        network.busy["a"] = 503, {"retry-after": "7"}
        with pytest.raises(EngineError, match="status 503") as info:
            await pool.complete(asking("x"))
        assert (info.value.attempts, info.value.retry_after_s) == (3, 7.0)
        assert clock.now == 14  # twice between three attempts


async def test_nobody_waits_longer_than_a_request_may_take(clock):
    network = network_of("a")
    async with pool_on(network, clock=clock) as pool:
        network.busy["a"] = 429, {"retry-after": "31"}
        with pytest.raises(EngineError, match="status 429"):
            await pool.complete(asking("x"), limit_s=30)
        with pytest.raises(EngineError, match="a is busy and asks to be left alone for 31 s"):
            await pool.complete(asking("x"), limit_s=30)
        assert (clock.now, network.completions("a")) == (0, 1)


@pytest.mark.parametrize(
    "header", ["-5", "nan", "inf", "1e400", "9" * 5_000, "soon", "", "\x00", "Thu, 99 Foo 9999 x"]
)
async def test_nonsense_after_retry_after_counts_as_none(header, clock):
    network = network_of("a", "b")
    async with pool_on(network, clock=clock) as pool:
        network.busy["a"] = 429, [(b"retry-after", header.encode())]
        for name in "lmn":
            assert (await pool.complete(asking(name), replica="a")).replica == "b"
        assert (clock.now, pool.statistics()[0].busy) == (0, 3)


async def test_an_engine_that_asks_for_ages_is_asked_again_after_five_minutes(clock):
    network = network_of("a", "b")
    async with pool_on(network, clock=clock) as pool:
        network.busy["a"] = 429, {"retry-after": "999999999"}
        assert (await pool.complete(asking("x"), replica="a")).replica == "b"
        network.busy.clear()
        clock.now = 300
        assert (await pool.complete(asking("x"), replica="a")).replica == "a"


async def test_a_wanted_engine_that_is_busy_is_not_waited_for_while_another_is_free(clock):
    network = network_of("a", "b")
    async with pool_on(network, clock=clock, timeout_s=30) as pool:
        network.busy["a"] = 429, {"retry-after": "999999999"}
        await pool.complete(asking("x"), replica="a")
        for name in "lmn":  # its time is longer than a request may take
            served = await pool.complete(asking(name), replica="a")
            assert (served.replica, served.tried) == ("b", ())
            async with pool.stream(asking(name), replica="a") as pieces:
                assert "".join([piece async for piece in pieces])
            assert pieces.served.replica == "b"
        assert clock.now == 0
        assert network.completions("a") == 1


async def test_a_wanted_engine_is_waited_for_where_that_takes_less_than_computing_anew(clock):
    network = network_of("a", "b")
    request = ContextRequest([ContextBlock(id="long", text="word " * 40_000, tokens=40_000)], "?")
    async with pool_on(network, clock=clock) as pool:
        await pool.complete(request, replica="a")
        network.busy["a"] = 429, {"retry-after": "2"}
        network.is_over = lambda: clock.now >= 2
        await pool.complete(asking("x"), replica="a")
        assert (await pool.complete(request, replica="a")).replica == "a"
        assert clock.now == 2


async def test_a_busy_engine_is_ready_and_a_busy_trial_leaves_the_way_to_another(clock):
    network = network_of("a", "b")
    async with pool_on(network, failures=1, open_s=10, clock=clock) as pool:
        await pool.complete(asking("x"), replica="a")
        network.busy["a"] = 503, {"retry-after": "3"}
        assert await pool.check() == {"a": True, "b": True}
        assert (state_of(pool, "a"), index_tokens(pool)["a"]) == ("up", 80)
        network.busy["a"] = 500, {}
        await pool.complete(asking("x"), replica="a")
        clock.now = 10
        assert state_of(pool, "a") == "on trial"
        network.busy["a"] = 429, {}
        await pool.complete(asking("x"), replica="a")
        assert state_of(pool, "a") == "on trial"
        network.busy.clear()
        assert (await pool.complete(asking("x"), replica="a")).replica == "a"


async def test_a_client_waits_until_the_date_that_an_engine_names_by_its_own_clock(clock):
    names = ("date", "retry-after")
    dates = [[f"Sat, 08 Sep 2001 12:00:{s:02} GMT" for s in pair] for pair in ((20, 40), (40, 20))]
    answers = [httpx.Response(429, headers=zip(names, pair, strict=True)) for pair in dates]
    emulated = EmulatedEngine().transport()

    async def answer(request):
        return answers.pop(0) if answers else await emulated.handle_async_request(request)

    options = {"model": "emulated"}
    completion = await completed(httpx.MockTransport(answer), options=options)
    assert completion.attempts == 3
    assert clock.now == 20


async def test_a_client_gives_up_at_once_where_it_would_have_to_wait_too_long():
    refuse = httpx.MockTransport(lambda _: httpx.Response(429, headers={"retry-after": "31"}))
    with pytest.raises(EngineError, match="status 429, it asks to be left alone for 31 s") as e:
        await completed(refuse, options={"model": "m", "timeout_s": 30})
    assert (e.value.attempts, e.value.retry_after_s) == (1, 31.0)
