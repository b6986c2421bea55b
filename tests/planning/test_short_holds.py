"""Nothing but short steps under a tenant's lock, whatever an eviction takes out."""

import gc
import sys
from collections import Counter

import pytest
from example_counts import examples
from helpers import check_index, nodes_of
from hold_meter import MeteredLock
from hypothesis import example, given
from hypothesis import strategies as st
from planning_helpers import big_request, block, user

from ctxreuse import ContextRequest, ReusePlanner
from ctxreuse.index import radix_tree
from ctxreuse.index.radix_tree import Evicted, IndexStatistics

SHORT = 15_000
"""Steps; a hold that grows with what is evicted takes several times as many in these tests."""


def one_prompt(planner, size):
    """Plan one prompt under as many ids."""
    for number in range(size):
        planner.plan(big_request((1, 2), request_id=number), "none")


def many_behind_one_block(planner, size):
    for number in range(1, size):
        planner.plan(big_request((0, number), request_id=number), "none")


def many_behind_two_blocks(planner, size):
    for number in range(1, size):
        planner.plan(big_request((-1, 0, number), request_id=number), "none")


def deep_conversation(planner, size):
    history = [user("Why?")]
    for number in range(size):
        later = big_request((number,), history=history, conversation_id="c", request_id=number)
        planner.plan(later, "none")


def conversation_of_one_id(planner, size):
    history = [user("Why?")]
    for number in range(size):
        planner.plan(big_request((number,), history=history, conversation_id="c", request_id=0))


def abandoned_branches(planner, size):
    """Plan a context from each block of which another one branched off."""
    for number in range(size):
        planner.plan(big_request([*range(number), -1], request_id=number + 1), "none")
    planner.plan(big_request(range(size), request_id=0), "none")
    planner.evict(range(1, size + 1))


EVICTIONS = {
    "a wide subtree": (many_behind_one_block, lambda one: one.trim(1, 0)),
    "a wide subtree behind a kept block": (many_behind_two_blocks, lambda one: one.trim(1, 1)),
    "a deep subtree": (deep_conversation, lambda one: one.trim(0, 0)),
    "all requests of a prompt": (one_prompt, lambda one: one.trim(0, 0)),
    "the end of all requests of a prompt": (one_prompt, lambda one: one.trim(0, 1)),
    "the turns of a conversation": (conversation_of_one_id, lambda one: one.evict([0])),
    "a path of many nodes": (abandoned_branches, lambda one: one.evict([0])),
    "many requests": (many_behind_one_block, lambda one: one.evict(range(10**4))),
    "the tokens of a prompt of many requests": (one_prompt, lambda one: one.evict_tokens(10**6)),
    "many tokens": (many_behind_one_block, lambda one: one.evict_tokens(10**6)),
}


TAKE_LONG = ("a deep subtree", "the turns of a conversation")


@pytest.mark.parametrize(
    "eviction",
    [pytest.param(one, marks=pytest.mark.slow if one in TAKE_LONG else ()) for one in EVICTIONS],
)
def test_an_eviction_takes_short_holds_however_much_it_takes_out(eviction):
    prepare, evict = EVICTIONS[eviction]
    planner = ReusePlanner()
    prepare(planner, 100 if prepare is abandoned_branches else 3_000)
    held = planner.statistics().tokens
    lock = MeteredLock(planner)
    evicted = lock.during(lambda: evict(planner))
    assert lock.longest < SHORT
    assert evicted.tokens == held - planner.statistics().tokens
    check_index(planner._planning._tenants.known("").index)


@pytest.mark.slow
def test_forgetting_what_many_tenants_have_sent_frees_a_little_of_it_at_once():
    planner = ReusePlanner()
    tenants = [f"tenant {number}" for number in range(30)]
    for tenant in tenants:
        many = [big_request((n,), tenant=tenant, request_id=0) for n in range(1_000)]
        planner.plan_batch(many, "none")
    gc.collect()
    gc.disable()  # so that only what is forgotten is freed
    try:
        before = sys.getallocatedblocks()
        evicted = planner.evict_tokens(10**9)
        freed_at_once = before - sys.getallocatedblocks()
        for _ in range(1_000):
            planner.plan(big_request((1,), tenant=tenants[0]), "none")
        freed_with_plans = before - sys.getallocatedblocks()
    finally:
        gc.enable()
    assert evicted.tokens == 30 * 1_000 * 100
    assert freed_at_once < SHORT
    assert freed_with_plans > 30 * 1_000


def test_a_plan_that_needs_the_room_of_many_others_takes_short_holds():
    planner = ReusePlanner(capacity_tokens=100 * 3_000)
    many = [big_request((number,), request_id=number) for number in range(3_000)]
    for request in many:
        planner.plan(request, "none")
    lock = MeteredLock(planner)
    large = ContextRequest([block("large", 100 * 2_900)])
    lock.during(lambda: planner.plan(large))
    assert lock.longest < SHORT
    assert planner.statistics().tokens == 100 * 3_000
    assert [planner.cached_tokens(one) for one in many[2_899:2_901]] == [0, 100]
    check_index(planner._planning._tenants.known("").index)


some_ids = st.lists(st.integers(0, 4), min_size=1, max_size=4, unique=True).map(sorted)
some_plans = st.lists(st.tuples(some_ids, st.booleans()), min_size=5, max_size=12)
evictions = st.one_of(
    st.tuples(st.just("trim"), st.integers(0, 6), st.integers(0, 2)),
    st.tuples(st.just("evict"), st.integers(0, 6)),
)
calls = st.one_of(
    evictions,
    st.tuples(st.just("plan"), some_ids),
    st.tuples(st.just("plan again"), some_ids),
    st.tuples(st.just("turn"), some_ids),
    st.tuples(st.just("evict tokens"), st.integers(0, 900)),
)


def do(planner, number, call):
    """Do something as a user; return what is seen of it."""
    match call:
        case "plan", ids:
            return planner.plan(big_request(ids, request_id=number)).expected_cached_tokens
        case "plan again", ids:
            return planner.plan(big_request(ids, request_id=number % 5)).expected_cached_tokens
        case "turn", ids:
            turn = {"history": [user("Why?")], "conversation_id": "c", "request_id": number}
            return planner.plan(big_request(ids, **turn)).expected_cached_tokens
        case "trim", request_id, blocks:
            return planner.trim(request_id, blocks)
        case "evict", request_id:
            return planner.evict([request_id])
        case "evict tokens", tokens:
            planner.evict_tokens(tokens)  # counts what others take out at the same time, or not
    return None


def contents(index):
    """Return the nodes, each with the edges that lead there and the requests that end there.

    The number of a node is not looked at: it is another one where one was free at the time.
    """
    found = Counter()
    for node in nodes_of(index):
        edges, above = [], node
        while above is not None:
            edges.append(("turn", above.run) if isinstance(above.edge, tuple) else above.edge)
            above = above.parent
        found[(*edges, node.run, frozenset(node.ids))] += 1
    return found


@examples(300)
@example(  # the end of a cut is made a leaf in the middle, and what is freed behind it is younger
    [([0], False), ([0, 1], True), ([0], False), ([0], False), ([0], True)],
    None,
    ("trim", 1, 1),
    [("plan again", [0])],
    1,
)
@example(
    [([0], False), ([0, 1], True), ([0], False), ([0], False), ([0], True)],
    None,
    ("trim", 1, 1),
    [("plan again", [1])],
    1,
)
@example([([0], False)] * 5, None, ("trim", 0, 0), [("evict tokens", 100)], 1)
@example([([0], False)] * 5, None, ("trim", 0, 0), [("turn", [0])], 1)
@given(
    some_plans,
    st.none() | st.integers(0, 12),
    evictions,
    st.lists(calls, max_size=4),
    st.integers(1, 3),
)
def test_what_is_evicted_is_out_at_once_and_whatever_others_do_meanwhile_comes_behind_it(
    sent, capacity, eviction, meanwhile, steps
):
    planner, twin = (
        ReusePlanner(capacity_tokens=None if capacity is None else 100 * capacity) for _ in range(2)
    )
    for number, (ids, is_turn) in enumerate(sent):
        for one in (planner, twin):
            do(one, number, ("turn" if is_turn else "plan", ids))
    expected = [do(twin, number, call) for number, call in enumerate([eviction, *meanwhile], 100)]
    seen, waiting = [], list(enumerate(meanwhile, 101))

    def act():
        if waiting:
            seen.append(do(planner, *waiting.pop(0)))

    lock = MeteredLock(planner, between=act)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(radix_tree, "_STEPS", steps)
        patch.setattr(radix_tree, "_LEAVES", 1)
        evicted = lock.during(lambda: do(planner, 100, eviction))
    while waiting:
        act()
    assert [evicted, *seen] == expected
    index, other = (one._planning._tenants.known("").index for one in (planner, twin))
    check_index(index)
    assert contents(index) == contents(other)
    assert planner.statistics() == twin.statistics()
    assert planner.statistics().parts == twin.statistics().parts


def test_what_is_cut_off_is_expected_by_no_plan_from_the_first_hold_on():
    planner = ReusePlanner()
    many_behind_two_blocks(planner, 3_000)
    seen = []

    def look():
        seen.append([planner.cached_tokens(big_request(ids)) for ids in ((-1, 0), (-1, 0, 999))])

    lock = MeteredLock(planner, between=look)
    assert lock.during(lambda: planner.trim(1, 1)).tokens == 100 * 3_000
    assert len(seen) > 10
    assert all(one == [100, 100] for one in seen)
    assert planner.statistics() == IndexStatistics(1, 100, 2_999)


def test_what_a_plan_records_while_much_is_taken_out_stays():
    planner = ReusePlanner()
    many_behind_one_block(planner, 1_000)
    again = iter(range(2_000, 2_005))

    def plan():
        number = next(again, None)
        if number is not None:
            planner.plan(big_request((0, number), request_id=number), "none")

    MeteredLock(planner, between=plan).during(lambda: planner.trim(1, 0))
    assert next(again, None) is None
    assert planner.statistics() == IndexStatistics(6, 600, 5)
    assert planner.evict([1, 999, *range(2_000, 2_005)]) == Evicted(5, 600, (1, 999))


def test_a_plan_does_not_make_the_room_that_another_one_needs():
    planner = ReusePlanner(capacity_tokens=100 * 1_000)
    for number in range(1_000):
        planner.plan(big_request((number,)), "none")
    holds = []

    def plan():
        before = lock.holds
        planner.plan(big_request((-1,)))
        holds.append(lock.holds - before)

    lock = MeteredLock(planner, between=plan)
    lock.during(lambda: planner.plan(ContextRequest([block("large", 100 * 900)])))
    assert len(holds) > 5
    assert set(holds) == {1}
    assert planner.statistics().tokens == 100 * 1_000


def test_an_eviction_that_is_broken_off_goes_on_with_the_next_calls():
    planner = ReusePlanner()
    many_behind_one_block(planner, 1_000)

    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        MeteredLock(planner, between=stop).during(lambda: planner.trim(1, 0))
    index = planner._planning._tenants.known("").index
    assert index.is_removing
    last = big_request((0, 1), request_id="last")
    for _ in range(100):
        planner.plan(last)
    check_index(index)
    assert planner.statistics() == IndexStatistics(1, 200, 1)
    assert planner.trim("last", 0) == Evicted(1, 200, ())
