import asyncio
import re
import threading
from dataclasses import replace

import httpx
import pytest
from pool_helpers import (
    IDLE,
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

from ctxreuse import ContextRequest, ReusePlanner
from ctxreuse.context.lru_map import PartSize
from ctxreuse.errors import EngineError, InvalidRequestError, UnknownStrategyError
from ctxreuse.memory.tenants import Bounds
from ctxreuse.serving import EmulatedEngine, EngineClient, EnginePool, EngineSpec, ReplicaStatus
from ctxreuse.serving.client.connection import EngineConnection
from ctxreuse.serving.pool import routing

pytestmark = pytest.mark.usefixtures("paper_words")


def engines(names="ab", **options):
    return Network(**{name: EmulatedEngine(**options) for name in names})


def sent_to(network, name):
    return [body["messages"] for body in network.engines[name].requests]


def shown(network, name):
    """The names of the blocks of each prompt that an engine got, in order."""
    contents = (messages[-1]["content"] for messages in sent_to(network, name))
    return ["".join(re.findall(r"\[Doc_\w\] (\w) ", content)) for content in contents]


@pytest.mark.parametrize(
    ("weight", "queued", "goes_to"),
    [(1, 0, "b"), (1, 159, "b"), (1, 161, "c"), (0.5, 319, "b"), (0.5, 321, "c"), (0, 10**9, "b")],
)
def test_a_request_goes_where_most_is_cached_less_the_weighted_queue(weight, queued, goes_to):
    pool = pool_on(engines("abc"), queue_weight=weight)
    planner_of(pool, "a").plan(asking("x"))
    planner_of(pool, "b").plan(asking("xy"))
    pool._replicas["a"].queued_tokens = pool._replicas["b"].queued_tokens = queued
    assert pool.route(asking("yx")) == goes_to


def test_what_nobody_has_read_goes_by_its_first_block_to_one_replica_in_every_process():
    requests = [asking(name) for name in "abcdefghijkl"] + [ContextRequest([], "Why?")]
    there = "".join(pool_on(engines("abc")).route(request) for request in requests)
    again = "".join(pool_on(engines("cab")).route(request) for request in requests)
    assert (there, again) == ("bccbbbbcbccbb", there)
    pool = pool_on(engines("abcdef"))
    assert {pool.route(asking("x" + rest, rest)) for rest in "abcdefgh"} == {
        pool.route(asking("x"))
    }


def test_routing_leaves_no_trace():
    pool = pool_on(engines())
    pool.route(asking("xy"))
    assert index_tokens(pool) == {"a": 0, "b": 0}
    assert queues(pool) == IDLE


def test_one_may_choose_among_some_replicas():
    pool = pool_on(engines("abc"))
    assert {pool.route(asking(name), among=["b"]) for name in "abcdef"} == {"b"}
    with pytest.raises(EngineError, match="no engine of the pool may be sent anything"):
        pool.route(asking("x"), among=["gone"])
    with pytest.raises(InvalidRequestError, match=r"among must be a list of .*, not 'a' \(str\)"):
        pool.route(asking("x"), among="a")


def test_a_plan_is_routed_by_its_own_order():
    pool = pool_on(engines())
    planner_of(pool, "a").plan(asking("xy"))
    planner_of(pool, "b").plan(asking("z"))
    plan = ReusePlanner().plan(asking("zxy"), "none")
    assert pool.route(asking("zxy")) == "a"
    assert pool.route(plan) == "b"


async def test_who_has_much_to_do_is_passed_over():
    gate = Gate()
    network = engines("ab", answer=gate)
    async with pool_on(network) as pool:
        first = pool.route(asking("x"))
        slow = asyncio.create_task(pool.complete(asking("x", "slow")))
        await until(lambda: gate.waiting == 1)
        status = next(one for one in pool.statistics() if one.name == first)
        assert (status.running, status.queued_tokens) == (
            1,
            80 + 1 + 144,
        )  # block, question, answer
        # 80 tokens are cached there, and 225 come first
        assert pool.route(asking("x")) != first
        gate.opened.set()
        assert (await slow).replica == first
        assert pool.route(asking("x")) == first
        assert queues(pool) == IDLE


async def test_a_conversation_goes_on_where_it_was_served():
    network = engines("abcde")
    async with pool_on(network) as pool:
        first = await pool.complete(asking("x", conversation_id="c"), replica="d")
        history = [*first.plan.messages(), {"role": "assistant", "content": "OK."}]
        later = [
            asking(name, "And?", history=history, conversation_id="c", tenant=tenant)
            for name in "qrstuv"
            for tenant in ("", "another")
        ]
        places = [pool.route(request) for request in later]
        assert set(places[::2]) == {"d"}
        assert set(places[1::2]) != {"d"}
        moved = await pool.complete(later[0], replica="e")
        assert moved.plan.messages()[:2] == history
        assert pool.route(later[2]) == "e"
        pool._replicas["e"]._reset()
        assert {pool.route(request) for request in later[::2]} != {"e"}


def test_a_history_counts_among_what_is_to_be_computed_where_it_is_not_cached():
    pool = pool_on(engines())
    history = [{"role": "user", "content": "word " * 400}]
    request = asking("x", history=history, conversation_id=1)
    pool._router.note(request, pool._replicas["a"])
    costs = [pool._router.to_compute(pool._replicas[name], request) for name in "ab"]
    assert costs[0] == 80 + 1 + 144  # block, question, answer
    assert costs[1] > costs[0] + 300


async def test_a_plan_is_sent_as_it_is_and_remembered_where_it_went():
    network = engines()
    async with pool_on(network) as pool:
        await pool.complete(asking("yx"), replica="a")  # would reorder "xy"
        plan = ReusePlanner().plan(asking("xy", "Which?"))
        served = await pool.complete(plan, replica="a", max_tokens=2)
        assert sent_to(network, "a")[1] == plan.messages() == served.plan.messages()
        assert (served.plan.parts, served.plan.labels) == (plan.parts, plan.labels)
        again = await pool.complete(plan, replica="a")
        assert [one.plan.expected_cached_tokens for one in (served, again)] == [0, 160]
        assert [one.plan.request_id for one in (served, again)] == ["request-1", "request-2"]
        assert index_tokens(pool) == {"a": 320, "b": 0}
        assert sent_to(network, "b") == []


@pytest.mark.parametrize(("strategy", "order"), [("reuse", "xyz"), ("none", "zxy")])
async def test_the_strategy_and_the_planners_settings_are_every_replicas(strategy, order):
    network = engines()
    planner = ReusePlanner(annotate=False)
    async with pool_on(network, strategy=strategy, planner=planner) as pool:
        for name in "ab":
            await pool.complete(asking("xy"), replica=name)
            await pool.complete(asking("zxy"), replica=name)
            assert shown(network, name)[1] == order
            assert "priority order" not in sent_to(network, name)[1][0]["content"]
    assert planner.statistics().requests == 0


async def test_parameters_reach_the_engine_and_tokens_the_caller():
    network = engines("a", answer="one two three")
    came = []
    async with pool_on(network) as pool:
        served = await pool.complete(
            asking("x"), max_tokens=1, temperature=0, on_first_token=lambda: came.append(1)
        )
    body = network.engines["a"].requests[0]
    assert (body["max_tokens"], body["temperature"]) == (1, 0)
    assert (served.completion.text, served.completion.finish_reason) == ("one", "length")
    assert (served.replica, served.tried, came) == ("a", (), [1])


async def test_tenants_get_salts_and_conversations_session_ids():
    network = engines("a")
    async with pool_on(network, cache_salt="tenant", session_id="conversation") as pool:
        await pool.complete(asking("x", tenant="t", conversation_id=1))
        await pool.complete(asking("x"))
        await pool.complete(asking("x"), session_id="mine")
        async with pool.stream(asking("x"), session_id="mine, too") as pieces:
            assert [piece async for piece in pieces] == ["OK."]
    salts = [body.get("cache_salt") for body in network.engines["a"].requests]
    sessions = [
        one.headers.get("x-session-id") for one in network.sent if one.url.path.endswith("ions")
    ]
    assert [salt is not None for salt in salts] == [True, False, False, False]
    assert sessions[0] is not None
    assert sessions[1:] == [None, "mine", "mine, too"]


async def test_the_index_is_cut_to_the_capacity_that_the_engine_tells():
    network = Network(a=EmulatedEngine(capacity_tokens=480), b=EmulatedEngine())
    async with pool_on(network) as pool:
        for name in "ab":
            for block in "mnopqrstuv":
                await pool.complete(asking(block), replica=name)
        tokens = index_tokens(pool)
    assert 0 < tokens["a"] < 480
    assert tokens["b"] == 800
    assert network.paths("a").count("/metrics") == 1


async def test_the_capacity_is_asked_for_again_where_the_engine_could_not_tell():
    network = engines("a", capacity_tokens=480)
    network.statuses["a", "/metrics"] = 503
    async with pool_on(network) as pool:
        await pool.complete(asking("x"))
        del network.statuses["a", "/metrics"]
        for block in "mnopqrstuv":
            await pool.complete(asking(block))
        assert index_tokens(pool)["a"] < 480
    assert network.paths("a").count("/metrics") == 2


async def test_engines_that_tell_no_metrics_or_nothing_are_not_asked_for_ever():
    network = engines("a")
    network.statuses["a", "/metrics"] = 404
    async with pool_on(network) as pool:
        for block in "mnopq":
            await pool.complete(asking(block))
        assert index_tokens(pool)["a"] == 400
    assert network.paths("a").count("/metrics") == 3

    network = engines()
    network.down.add("a")
    async with pool_on(network) as pool:
        assert (await pool.complete(asking("x"), replica="a")).replica == "b"
    assert network.paths("a") == ["/v1/chat/completions"]


async def test_a_capacity_that_is_given_is_not_asked_for():
    network = engines("a")
    engine = EngineSpec(base_url="http://a", name="first", capacity_tokens=200)
    http = httpx.AsyncClient(transport=network)
    async with EnginePool(engine, "emulated", window_s=0, http_client=http) as pool:
        for block in "mnopqrstuv":
            await pool.complete(asking(block))
        assert pool.names == ("first",)
        assert 0 < index_tokens(pool)["first"] < 200
    assert "/metrics" not in network.paths("a")


async def test_the_context_window_is_the_least_of_all_that_tell_one_also_later():
    lengths = {"a": None, "b": 800, "c": 700, "d": 900}
    network = Network(**{name: EmulatedEngine(max_model_len=n) for name, n in lengths.items()})
    network.down.add("b")
    http = httpx.AsyncClient(transport=network)
    async with EnginePool([f"http://{one}" for one in "abd"], http_client=http) as pool:
        windows = [await pool.context_window()]
        network.down.clear()
        windows.append(await pool.context_window())
        pool.add("http://c")
        windows.append(await pool.context_window())
        await pool.remove("c")
        windows.append(await pool.context_window())
    assert windows == [900, 800, 700, 800]
    assert [len(network.paths(name)) for name in "abcd"] == [1, 2, 1, 1]


async def test_an_engines_first_request_goes_by_the_client_that_has_checked_the_arguments(
    monkeypatch,
):
    made, connect = [], EngineConnection._connected

    def connected(connection):
        made.append(connection.host)
        return connect(connection)

    monkeypatch.setattr(EngineConnection, "_connected", connected)
    async with pool_on(engines()) as pool:
        await pool.complete(asking("x"))
    assert made == ["a", "b"]


async def test_a_draining_replica_gets_nothing_new_until_it_is_resumed():
    network = engines()
    async with pool_on(network) as pool:
        pool.drain("a")
        assert (state_of(pool, "a"), pool.available()) == ("draining", ("b",))
        served = [await pool.complete(asking(name), replica="a") for name in "mnop"]
        assert {one.replica for one in served} == {"b"}
        pool.drain("b")
        with pytest.raises(EngineError, match=r"all are draining; call resume\(\) or add\(\)"):
            await pool.complete(asking("x"))
        pool.resume("a")
        assert (await pool.complete(asking("x"))).replica == "a"


async def test_a_replica_is_removed_when_its_last_request_has_ended():
    gate = Gate()
    network = engines(answer=gate)
    async with pool_on(network, concurrency=1) as pool:
        tasks = [
            asyncio.create_task(pool.complete(asking(name, "slow"), replica="a")) for name in "xy"
        ]
        await until(lambda: gate.waiting == 1)
        removals = [asyncio.create_task(pool.remove("a")) for _ in range(2)]
        await until(lambda: state_of(pool, "a") == "draining")
        assert (await pool.complete(asking("x"))).replica == "b"
        assert pool.names == ("a", "b")
        gate.opened.set()
        assert [(await task).replica for task in tasks] == ["a", "a"]
        await asyncio.gather(*removals)
        assert pool.names == ("b",)
        assert [one.name for one in pool.statistics()] == ["b"]
        with pytest.raises(InvalidRequestError, match=r"no replica 'a' \(str\); there are b"):
            pool.cache_epoch("a")
        assert pool.add("http://a") == "a"
        assert pool.names == ("b", "a")
        assert index_tokens(pool)["a"] == 0


async def test_nothing_is_lost_while_engines_come_and_go():
    network = engines("abc")
    async with pool_on(network, concurrency=2) as pool:

        async def come_and_go():
            for name in "abcab":
                await pool.remove(name)
                pool.add(f"http://{name}")

        questions = [f"Question {number}?" for number in range(60)]
        change = asyncio.create_task(come_and_go())
        served = []
        for start in range(0, 60, 12):
            batch = [asking("xyz"[n % 3], questions[n]) for n in range(start, start + 12)]
            served += await asyncio.gather(*map(pool.complete, batch))
            await asyncio.sleep(0)
        await change
        assert queues(pool) == IDLE
    assert [one.plan.request.query for one in served] == questions
    asked = sorted(
        messages[0]["content"].split("\n\n")[-1]
        for name in "abc"
        for messages in sent_to(network, name)
    )
    assert asked == sorted(questions)


def followers():
    return [one for one in threading.enumerate() if one.name == "ctxreuse-kv-events"]


async def test_an_engines_events_are_followed_until_it_is_removed_or_the_pool_is_closed(tmp_path):
    engines = [
        EngineSpec(
            base_url=f"http://{name}", kv_events=f"ipc://{tmp_path}/{name}", capacity_tokens=9
        )
        for name in "ab"
    ]
    before = len(followers())
    async with EnginePool(engines) as pool:
        assert len(followers()) == before + 2
        await pool.remove("a")
        assert len(followers()) == before + 1
        planner_of(pool, "b").plan(asking("x"))
        assert pool.route(asking("x")) == "b"
    assert len(followers()) == before


def test_a_pool_that_cannot_be_made_follows_nobody(tmp_path):
    before = len(followers())
    good = EngineSpec(base_url="http://a", kv_events=f"ipc://{tmp_path}/a")
    with pytest.raises(InvalidRequestError):
        EnginePool([good, EngineSpec(base_url="http://b", kv_events="nonsense")])
    assert len(followers()) == before
    pool = EnginePool("http://a")
    with pytest.raises(InvalidRequestError):
        pool.add(EngineSpec(base_url="http://b", kv_events="nonsense"))
    assert pool.names == ("a",)


def test_one_pool_serves_event_loops_in_several_threads():
    network = engines("abc")
    pool = pool_on(network, concurrency=2)
    served = []

    async def ask(thread):
        requests = [asking("xyz"[n % 3], f"{thread} {n}") for n in range(20)]
        served.extend(await asyncio.gather(*map(pool.complete, requests)))
        await pool.disconnect()

    threads = [threading.Thread(target=asyncio.run, args=(ask(number),)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    queries = sorted(one.plan.request.query for one in served)
    assert queries == sorted(f"{thread} {n}" for thread in range(3) for n in range(20))
    assert sum(one.answered for one in pool.statistics()) == 60
    assert queues(pool) == IDLE
    assert pool.faults == 0


def test_clients_of_event_loops_that_are_closed_are_let_go():
    clients = []

    def connect():
        http = httpx.AsyncClient(transport=EmulatedEngine().transport())
        clients.append(EngineClient("http://a", http_client=http, retries=0))
        return clients[-1]

    pool = EnginePool({"a": connect})
    loops = []  # kept, as connections that are left open keep them
    for _ in range(3):
        loop = asyncio.new_event_loop()
        loops.append(loop)
        loop.run_until_complete(pool.complete(asking("x")))
        # as asyncio.run does; openai leaves a generator to the loop, and Python 3.13 says so
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
    assert len(clients) == 3
    assert len(pool._replicas["a"]._clients) == 1


async def test_a_pool_closes_its_own_connections_only():
    closed = []

    class Client(EngineClient):
        async def aclose(self):
            closed.append(1)

    http = httpx.AsyncClient(transport=EmulatedEngine().transport())
    async with EnginePool({"a": lambda: Client("http://a", http_client=http)}) as pool:
        await pool.complete(asking("x"))
    assert closed == [1]
    await pool.disconnect()
    assert (closed, http.is_closed) == ([1], False)
    await http.aclose()


async def test_a_tenants_many_conversations_take_no_other_tenants_away(monkeypatch):
    monkeypatch.setattr(routing, "_REMEMBERED_CONVERSATIONS", 8)
    async with pool_on(engines("abcd")) as pool:
        first = await pool.complete(asking("x", conversation_id="c", tenant="quiet"), replica="d")
        for number in range(30):
            name = f"{number}" * (number % 3 * 1_000)
            await pool.complete(asking("y", conversation_id=name, tenant="loud"), replica="a")
            entries, bound = pool.parts["conversations"]
            assert entries <= bound
        assert pool.parts == {"conversations": PartSize(8, 8)}
        history = [*first.plan.messages(), {"role": "assistant", "content": "Because."}]
        later = asking("y", "And?", history=history, conversation_id="c", tenant="quiet")
        assert pool.route(later) == "d"


async def test_each_replicas_status_says_what_is_remembered_of_it():
    async with pool_on(engines()) as pool:
        await pool.complete(asking("x"), replica="b")
        parts = {one.name: one.parts for one in pool.statistics()}
        assert parts["b"]["index_blocks"] == PartSize(1, Bounds().index_blocks)
        assert parts["a"]["index_blocks"].entries == parts["a"]["unconfirmed_plans"].entries == 0
        assert set(parts["b"]) > set(planner_of(pool, "b").statistics().parts)


async def test_statistics_tell_how_each_replica_is():
    async with pool_on(engines()) as pool:
        await pool.complete(asking("x"), replica="b")
        pool.drain("a")
        counts = ("running", "waiting", "queued_tokens", "answered", "failed", "cache_epoch")
        nothing = ReplicaStatus(name="a", state="draining", **dict.fromkeys(counts, 0))
        assert pool.statistics() == (nothing, replace(nothing, name="b", state="up", answered=1))
        assert (pool.faults, pool.cache_epoch("b"), nothing.cache_epoch) == (0, 0, 0)


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("http://h:8000/v1", "h:8000"),
        ("http://user:secret@h/v1", "h"),
        (EngineSpec(base_url="http://h", name="n"), "n"),
    ],
)
def test_an_engine_is_called_by_host_and_port_unless_it_has_a_name(url, name):
    pool = EnginePool("http://other")
    assert pool.add(url) == name
    assert pool.names == ("other", name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"engines": []}, "a pool needs at least one engine's address"),
        ({"engines": 5}, r"engines must be addresses, such as .*, not 5 \(int\)"),
        ({"engines": [5]}, r"an engine must be an address, not 5 \(int\)"),
        ({"engines": [EngineSpec(base_url=5)]}, "base_url must be the engine's address"),
        (
            {"engines": ["http://a", "http://a/v1"]},
            r"two engines called 'a' .*give EngineSpec\(..., n",
        ),
        ({"engines": {"a": "http://a"}}, "a mapping from names to functions that make one"),
        ({"engines": {"a": EngineClient}, "api_key": "k"}, "^api_key: give these to the clients"),
        ({"engines": {"a": EngineClient}, "model": "m"}, "^model: give these to the clients"),
        ({"planner": 5}, r"planner must be a ReusePlanner, not 5 \(int\)"),
        ({"attempts": 0}, r"attempts must be an integer from 1, not 0 \(int\)"),
        ({"failures": True}, "failures must be an integer from 1"),
        ({"queue_weight": -1}, r"queue_weight must be a number from 0, not -1 \(int\)"),
        ({"backoff_s": "1"}, "backoff_s must be a number from 0"),
        ({"open_s": float("inf")}, "open_s must be a number from 0"),
        ({"concurrency": 0}, "concurrency must be an integer from 1"),
        ({"window_s": -1}, "the micro-batch window is -1"),
        ({"cache_salt": "x"}, "cache_salt must be 'tenant' or None"),
        ({"strategy": "best"}, "best"),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments, message):
    with pytest.raises((InvalidRequestError, UnknownStrategyError), match=message):
        EnginePool(**{"engines": "http://a", **arguments})


@pytest.mark.parametrize("limit_s", [0, -1, float("nan"), "1"])
async def test_a_limit_that_is_no_time_is_refused(limit_s):
    async with pool_on(engines()) as pool:
        with pytest.raises(InvalidRequestError, match="limit_s must be"):
            await pool.complete(asking("x"), limit_s=limit_s)
        with pytest.raises(InvalidRequestError, match="limit_s must be"):
            pool.stream(asking("x"), limit_s=limit_s)
        with pytest.raises(InvalidRequestError, match="limit_s must be"):
            await pool.check(limit_s=limit_s)


async def test_a_prompt_that_is_none_is_refused():
    async with pool_on(engines()) as pool:
        message = r"must be a ContextRequest or a Plan, not \[\] \(list\)"
        for send in (pool.complete, pool.route, pool.stream):
            with pytest.raises(InvalidRequestError, match=message):
                await send([])


async def test_parameters_that_cannot_be_are_refused_and_harm_nobody():
    network = engines("a")
    async with pool_on(network) as pool:
        with pytest.raises(InvalidRequestError, match="n must be 1"):
            await pool.complete(asking("x"), n=2)
        with pytest.raises(InvalidRequestError, match="messages is set by the client"):
            async for _ in pool.stream(asking("x"), messages=[]):
                pass
        assert index_tokens(pool) == {"a": 0}
        assert queues(pool) == IDLE
        assert (state_of(pool, "a"), pool.statistics()[0].failed) == ("up", 0)
    assert network.sent == []


@pytest.mark.parametrize("call", ["drain", "resume", "cache_epoch", "remove"])
async def test_a_replica_that_is_not_there_is_named(call):
    async with pool_on(engines()) as pool:
        message = r"there is no replica 'q' \(str\); there are a, b"
        with pytest.raises(InvalidRequestError, match=message):
            await getattr(pool, call)("q")
