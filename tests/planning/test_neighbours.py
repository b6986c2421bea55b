"""What a tenant's neighbours can and cannot change: ids, token counts, waiting, memory."""

import gc
import tracemalloc

import pytest
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st
from planning_helpers import STRATEGIES, big_request, request
from tenant_sizes import act, bounded, measured, steps

from ctxreuse import ContextBlock, ContextRequest, ReusePlanner
from ctxreuse.memory.prefix_index import Evicted, PartSize
from ctxreuse.memory.tenants import Bounds, Tenants
from ctxreuse.planning import savings_meter

pytestmark = pytest.mark.usefixtures("paper_words")

MODES = ("active", "shadow")


@pytest.mark.parametrize("mode", MODES)
def test_what_a_neighbour_says_of_the_same_id_leaves_a_tenants_request_alone(mode):
    planner = ReusePlanner(mode=mode)
    ours = planner.plan(big_request((1, 2), tenant="a"))
    for drop in (planner.evict, lambda ids, tenant=None: planner.trim(ids[0], 0, tenant)):
        planner.plan(big_request((1, 2), tenant="b", request_id=ours.request_id))
        assert drop([ours.request_id]) == Evicted(0, 0, (ours.request_id,)), "two tenants have it"
        assert drop([ours.request_id], tenant="b") == Evicted(1, 200, ())
        assert drop([ours.request_id], tenant="b").unknown == (ours.request_id,)
        assert drop([ours.request_id], tenant="c") == Evicted(0, 0, (ours.request_id,))
    assert planner.cached_tokens(big_request((1, 2), tenant="a")) == 200
    assert planner.evict([ours.request_id]) == Evicted(1, 200, ())


some_ids = st.lists(st.integers(0, 5), max_size=4, unique=True)
ours_and_theirs = st.lists(st.tuples(st.sampled_from("ab"), some_ids, st.booleans()), max_size=12)


@given(ours_and_theirs, st.sampled_from(STRATEGIES))
def test_counted_ids_do_not_show_how_many_requests_others_send(requests, strategy):
    def ids_of(planner, asked):
        return [
            planner.plan(big_request(ids, tenant=tenant), strategy).request_id
            if is_single
            else planner.plan_batch([big_request(ids, tenant=tenant)], strategy).plans[0].request_id
            for tenant, ids, is_single in asked
        ]

    ours = [one for one in requests if one[0] == "a"]
    mixed = ids_of(ReusePlanner(), requests)
    assert [
        name for name, (tenant, *_) in zip(mixed, requests, strict=True) if tenant == "a"
    ] == ids_of(ReusePlanner(), ours)


class AskedCounter:
    def __init__(self):
        self.asked = []

    def __call__(self, text):
        self.asked.append(text)
        return len(text)

    def take(self):
        asked, self.asked = self.asked, []
        return asked


def asked_by(calls, ours):
    counter = AskedCounter()
    planner = ReusePlanner(token_counter=counter)
    asked = []
    for tenant, kind, numbers in calls:
        new = ContextRequest([f"text {n}" for n in numbers], "Why?", tenant=tenant)
        call = {
            "plan": planner.plan,
            "batch": lambda one: planner.plan_batch([one, one]),
            "preview": planner.preview,
            "cached": planner.cached_tokens,
            "tokens": lambda one: planner.block_tokens(one.blocks, one.tenant),
        }[kind]
        call(new)
        if tenant == ours:
            asked.append(counter.take())
        counter.take()
    return asked


calls = st.lists(
    st.tuples(
        st.sampled_from("ab"),
        st.sampled_from(["plan", "batch", "preview", "cached", "tokens"]),
        some_ids,
    ),
    max_size=12,
)


@given(calls)
def test_what_is_counted_for_a_tenant_does_not_depend_on_its_neighbours(calls):
    alone = [one for one in calls if one[0] == "a"]
    assert asked_by(calls, "a") == asked_by(alone, "a")


def test_a_tenants_texts_are_counted_once():
    counter = AskedCounter()
    planner = ReusePlanner(token_counter=counter)
    for tenant in ("a", "b", "a", "b"):
        planner.plan(ContextRequest(["text"], tenant=tenant))
    assert counter.asked == ["text", "text"]


def test_a_noisy_tenant_does_not_push_out_counts_of_those_that_have_less_than_their_share():
    counter = AskedCounter()
    planner = ReusePlanner(token_counter=counter)
    planner._planning._tenants = Tenants(None, Bounds(token_counts=10))
    quiet = ContextRequest([f"quiet {n}" for n in range(4)], tenant="quiet")
    planner.plan(quiet)
    for number in range(100):
        planner.plan(ContextRequest([f"noise {number}"], tenant="noisy"))
    counter.take()
    planner.plan(quiet)
    assert counter.take() == []
    assert planner.statistics().parts["token_counts"] == PartSize(10, 10)


@examples(200)
@given(steps(30))
def test_every_part_stays_within_its_bound_and_the_statistics_say_how_large_it_is(steps):
    planner = bounded()
    tenants = planner._planning._tenants
    for number, step in enumerate(steps):
        act(planner, step, number)
        parts = planner.statistics().parts
        assert {name: size.entries for name, size in parts.items() if name != "tenants"} == (
            measured(tenants)
        )
        assert not any(size.entries > size.bound for size in parts.values())
        assert parts["tenants"] == PartSize(len(tenants._states), 3)


def test_the_statistics_name_every_bound():
    parts = ReusePlanner().statistics().parts
    bounds = Bounds()
    assert {name: size.bound for name, size in parts.items()} == {
        name: getattr(bounds, name) for name in Bounds.__dataclass_fields__
    }
    assert {size.entries for size in parts.values()} == {0}
    shadow = ReusePlanner(mode="shadow")
    shadow.plan(request((1, 2), conversation_id="c"))
    parts = shadow.statistics().parts
    assert parts["tenants"] == PartSize(2, 2 * bounds.tenants)  # it runs two planners
    assert parts["shown_blocks"] == PartSize(4, 2 * bounds.shown_blocks)


def test_long_ids_count_by_their_length():
    planner = bounded()
    long = "x" * 64 * 3
    planner.plan(
        ContextRequest(
            [ContextBlock(id=long, text="text")], request_id=long, conversation_id=long, history=[]
        )
    )
    parts = planner.statistics().parts
    for name in ("request_ids", "conversations", "shown_blocks"):
        assert parts[name].entries == 4
    assert parts["logged_blocks"].entries == 8  # the request's and the block's


@pytest.mark.slow
@pytest.mark.parametrize(
    "send",
    [
        lambda planner, n: planner.plan(
            ContextRequest(blocks_of(n), tenant="a", conversation_id=n, history=[])
        ),
        lambda planner, n: planner.plan(ContextRequest(blocks_of(n), tenant=f"tenant {n}")),
        lambda planner, n: planner.plan(ContextRequest(blocks_of(n), system=f"{n} system" * 99)),
        lambda planner, n: planner.plan(ContextRequest([], system=f"{n} system" * 99)),
        lambda planner, n: planner.plan(ContextRequest([], request_id=f"{n} id" * 99)),
        lambda planner, n: planner.plan_batch([ContextRequest(blocks_of(n)) for _ in range(2)]),
    ],
    ids=["conversations", "tenants", "system texts", "no blocks", "request ids", "batches"],
)
def test_memory_stops_growing(send, monkeypatch):
    monkeypatch.setattr(savings_meter, "MOST_BLOCKS", 200)
    bounds = Bounds(
        tenants=10,
        index_nodes=100,
        index_blocks=500,
        request_ids=100,
        recent_blocks=200,
        conversations=50,
        shown_blocks=200,
        logged_blocks=200,
        sent_messages=200,
        token_counts=200,
    )
    planner = bounded(bounds)

    def many(numbers):
        for number in numbers:
            send(planner, number)

    tracemalloc.start()
    try:
        held = []
        for first in range(0, 4800, 400):
            many(range(first, first + 400))
            gc.collect()
            held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    grown = max(held) - max(held[:4])
    assert grown < 300_000, f"3,200 requests more take more bytes: {held}"


def blocks_of(number):
    return [ContextBlock(id=f"{number} {i}", text=f"text {number} {i}") for i in range(10)]
