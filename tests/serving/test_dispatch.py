import asyncio

import pytest
from client_helpers import connected
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse import ContextBlock, ContextRequest, ReusePlanner
from ctxreuse.errors import EngineError, InvalidRequestError
from ctxreuse.memory.prefix_index import IndexStatistics
from ctxreuse.serving import EmulatedEngine, dispatch, progress_bar
from ctxreuse.serving.dispatch import leaders

BLOCKS = {name: ContextBlock(id=name, text=f"{name} " * 40, tokens=40) for name in "abcdefgh"}


def request(letters, query="", **fields):
    return ContextRequest([BLOCKS[letter] for letter in letters], query or letters, **fields)


def plans_of(*words, **fields):
    planner = ReusePlanner()
    return [planner.plan(request(word, **fields), "none") for word in words]


def query_of(body):
    return body["messages"][-1]["content"].rsplit("\n\n", 1)[-1]


async def dispatched(engine, plans, planner=None, **options):
    async with connected(engine, planner=planner) as client:
        return await dispatch(client, plans, **options)


def echo(body):
    return query_of(body)


class Gate:
    """Answers that wait until the test lets them go, each by its question."""

    def __init__(self):
        self.arrived = []
        self._open = {}
        self._news = asyncio.Event()

    def _gate(self, query):
        return self._open.setdefault(query, asyncio.Event())

    async def answer(self, body):
        query = query_of(body)
        self.arrived.append(query)
        self._news.set()
        await self._gate(query).wait()
        return query

    def let_go(self, query):
        self._gate(query).set()

    async def until_arrived(self, number):
        while len(self.arrived) < number:
            self._news.clear()
            await self._news.wait()
        for _ in range(20):  # whatever else could arrive without being let go
            await asyncio.sleep(0)
        return self.arrived[:]


async def test_a_batch_runs_in_the_planned_order_and_answers_in_the_callers(planner):
    words = ["ab", "cd", "abe", "cdf", "abg"]
    batch = planner.plan_batch([request(word) for word in words])
    engine = EmulatedEngine(answer=echo)
    outcomes = await dispatched(engine, batch, concurrency=1)
    assert [query_of(body) for body in engine.requests] == ["ab", "abe", "abg", "cd", "cdf"]
    assert [outcome.completion.text for outcome in outcomes] == words
    assert [outcome.plan for outcome in outcomes] == list(batch.in_input_order())
    assert all(outcome.error is None for outcome in outcomes)


async def test_a_list_of_plans_is_answered_in_its_order_and_an_empty_one_with_nothing():
    engine = EmulatedEngine(answer=echo)
    outcomes = await dispatched(engine, plans_of("c", "a", "b"), concurrency=1, max_tokens=50)
    assert [outcome.completion.text for outcome in outcomes] == ["c", "a", "b"]
    assert [body["max_tokens"] for body in engine.requests] == [50, 50, 50]
    assert await dispatched(EmulatedEngine(), []) == []
    assert await dispatched(EmulatedEngine(), ReusePlanner().plan_batch([])) == []


async def test_no_more_requests_than_allowed_are_under_way():
    gate = Gate()
    task = asyncio.create_task(
        dispatched(EmulatedEngine(answer=gate.answer), plans_of(*"abcde"), concurrency=2)
    )
    assert await gate.until_arrived(2) == ["a", "b"]
    gate.let_go("b")
    assert await gate.until_arrived(3) == ["a", "b", "c"]
    for query in "acde":
        gate.let_go(query)
    outcomes = await task
    assert [outcome.completion.text for outcome in outcomes] == list("abcde")


async def test_a_failed_request_does_not_stop_the_others_and_is_told_to_the_planner(planner):
    batch = planner.plan_batch([request(word) for word in "abc"])
    engine = EmulatedEngine(
        answer=echo, fail=lambda number, body: 400 if query_of(body) == "b" else None
    )
    outcomes = await dispatched(engine, batch, planner)
    assert [outcome.completion and outcome.completion.text for outcome in outcomes] == [
        "a",
        None,
        "c",
    ]
    assert [type(outcome.error) for outcome in outcomes] == [type(None), EngineError, type(None)]
    assert planner.evict([plan.request_id for plan in batch.plans]).requests == 2


async def test_cancelling_cancels_all_and_tells_the_planner():
    gate, planner = Gate(), ReusePlanner()
    plans = [planner.plan(request(word)) for word in "abcde"]
    engine = EmulatedEngine(answer=gate.answer)
    task = asyncio.create_task(dispatched(engine, plans, planner, concurrency=2))
    await gate.until_arrived(2)
    gate.let_go("a")
    await gate.until_arrived(3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert gate.arrived == ["a", "b", "c"]
    assert planner.evict([plan.request_id for plan in plans]).unknown == tuple(
        plan.request_id for plan in plans[1:]
    )


async def test_a_wrong_argument_stops_everything_and_tells_the_planner(planner):
    plans = [planner.plan(request(word)) for word in "abc"]
    engine = EmulatedEngine()
    with pytest.raises(InvalidRequestError, match="n must be 1"):
        await dispatched(engine, plans, planner, n=2)
    assert engine.requests == []
    assert planner.statistics() == IndexStatistics()


async def test_progress_is_told_after_each_request_also_to_a_bar():
    told = []
    await dispatched(
        EmulatedEngine(fail=[None, 400]),
        plans_of(*"abc"),
        concurrency=1,
        progress=lambda ended, total: told.append((ended, total)),
    )
    assert told == [(1, 3), (2, 3), (3, 3)]
    with progress_bar("answers") as progress:
        await dispatched(EmulatedEngine(), plans_of(*"ab"), progress=progress)


async def test_followers_wait_for_their_leaders_first_token():
    gate, engine_tokens = Gate(), asyncio.Event()

    async def slowly(body):
        yield await gate.answer(body)
        await engine_tokens.wait()  # first tokens are out, no answer is complete

    plans = plans_of("ab", "abc", "abd", "e", "abcf")
    task = asyncio.create_task(
        dispatched(EmulatedEngine(answer=slowly), plans, concurrency=9, leader_first=True)
    )
    assert await gate.until_arrived(2) == ["ab", "e"]
    gate.let_go("ab")
    assert await gate.until_arrived(4) == ["ab", "e", "abc", "abd"]
    gate.let_go("abc")
    assert await gate.until_arrived(5) == ["ab", "e", "abc", "abd", "abcf"]
    engine_tokens.set()
    for query in ("e", "abd", "abcf"):
        gate.let_go(query)
    outcomes = await task
    assert [outcome.completion.text for outcome in outcomes] == ["ab", "abc", "abd", "e", "abcf"]


async def test_followers_of_a_leader_that_fails_go_on():
    engine = EmulatedEngine(answer=echo, fail=[400])
    outcomes = await dispatched(engine, plans_of("a", "ab", "ac"), leader_first=True)
    assert [outcome.error is None for outcome in outcomes] == [False, True, True]


async def test_without_leader_first_all_start_at_once():
    gate = Gate()
    task = asyncio.create_task(
        dispatched(EmulatedEngine(answer=gate.answer), plans_of("a", "ab", "abc"))
    )
    assert await gate.until_arrived(3) == ["a", "ab", "abc"]
    for query in ("a", "ab", "abc"):
        gate.let_go(query)
    await task


def test_requests_follow_the_first_of_their_system_text_or_the_turn_before():
    assert leaders(plans_of("a", "b", "c", system="Be brief.")) == [None, 0, 0]
    one, two = plans_of("a", system="s"), plans_of("a", system="s", tenant="t")
    assert leaders(one + two + plans_of("a", system="s2") + two) == [None, None, None, 1]

    history = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    first = plans_of("a", conversation_id=1)
    later = plans_of("a", conversation_id=1, history=history)
    other = plans_of("a", conversation_id="1", history=history)
    unnamed = plans_of("a", history=history)
    assert leaders(first + later + later + other + unnamed) == [None, 0, 1, None, None]


@given(st.lists(st.text("abc", max_size=4), max_size=12))
def test_leaders_share_the_longest_prefix_that_any_earlier_one_shares(words):
    words = ["".join(dict.fromkeys(word)) for word in words]

    def shared(one, two):
        pairs = zip(one, two, strict=False)
        return next((n for n, (x, y) in enumerate(pairs) if x != y), min(len(one), len(two)))

    for position, leader in enumerate(leaders(plans_of(*words))):
        lengths = [shared(words[position], earlier) for earlier in words[:position]]
        best = max(lengths, default=0)
        assert leader == (lengths.index(best) if best else None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plans": "ab"}, "plans must be a BatchPlan or a list, not 'ab'"),
        ({"plans": 3}, "plans must be a BatchPlan or a list, not 3"),
        ({"plans": [3]}, "a plan must be a Plan, not 3"),
        ({"concurrency": 0}, "concurrency must be an integer from 1, not 0"),
        ({"client": None}, "client must be an EngineClient, not None"),
    ],
)
async def test_wrong_arguments_are_named(options, message):
    async with connected(EmulatedEngine()) as client:
        arguments = {"client": client, "plans": [], **options}
        with pytest.raises(InvalidRequestError, match=message):
            await dispatch(**arguments)
