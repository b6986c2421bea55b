from itertools import permutations

import pytest
from planning_helpers import (
    ODD_IDS,
    ODD_TEXTS,
    STRATEGIES,
    assert_keeps_the_promises,
    assistant,
    big_request,
    block,
    first_turn,
    location_words,
    request,
    sent_ids,
    user,
)

from ctxreuse import BatchPlan, ContextBlock, ContextRequest, ReusePlanner
from ctxreuse.index import path_search

pytestmark = pytest.mark.usefixtures("paper_words")

all_strategies = pytest.mark.parametrize("strategy", STRATEGIES)


@all_strategies
def test_an_empty_batch_has_no_plans(strategy):
    assert ReusePlanner().plan_batch([], strategy) == BatchPlan((), ())


@all_strategies
def test_a_batch_may_be_any_iterable_and_its_order_is_a_permutation(strategy):
    contexts = [(1, 2), (3,), (2, 4), (), (3, 5), (2, 1)]
    batch = ReusePlanner().plan_batch((big_request(ids) for ids in contexts), strategy)
    assert sorted(batch.order) == list(range(6))
    for position, plan in zip(batch.order, batch.plans, strict=True):
        assert plan.request == big_request(contexts[position])
    assert [plan.request for plan in batch.in_input_order()] == [*map(big_request, contexts)]


def test_strategy_none_runs_a_batch_as_it_is():
    batch = ReusePlanner().plan_batch([big_request(ids) for ids in ((2, 1), (3,), (1, 2))], "none")
    assert batch.order == (0, 1, 2)
    assert [sent_ids(plan) for plan in batch.plans] == [[2, 1], [3], [1, 2]]


def test_a_batch_goes_behind_what_is_cached_already():
    planner = ReusePlanner()
    planner.plan(big_request((1, 2)))
    batch = planner.plan_batch([big_request(ids) for ids in ((3, 4, 1), (4, 3, 2, 1), (5, 3, 4))])
    assert [sent_ids(plan) for plan in batch.in_input_order()] == [
        [1, 3, 4],
        [1, 2, 4, 3],
        [5, 3, 4],
    ]
    assert [plan.expected_cached_tokens for plan in batch.in_input_order()] == [100, 200, 0]


@all_strategies
def test_turns_of_one_conversation_keep_their_order_in_a_batch(strategy):
    planner = ReusePlanner()
    turns = [
        big_request((1,), "1", history=[], conversation_id="c"),
        big_request((9,), "x"),
        big_request((2,), "2", history=[user("1"), assistant("")], conversation_id="c"),
        big_request((9, 8), "y"),
        big_request((1, 8), "3", history=[user("2"), assistant("")], conversation_id="c"),
        big_request((8,), "late", history=[user("Hello.")], conversation_id="d"),
    ]
    batch = planner.plan_batch(turns, strategy)
    queries = [plan.request.query for plan in batch.plans]
    assert sorted(queries) == ["1", "2", "3", "late", "x", "y"]
    assert [query for query in queries if query in "123"] == ["1", "2", "3"]
    assert sorted(batch.order) == [0, 1, 2, 3, 4, 5]


def test_a_later_turn_in_a_batch_refers_to_what_its_history_shows():
    planner = ReusePlanner()
    _, history = first_turn(planner, (1, 2))
    batch = planner.plan_batch(
        [request((5, 6)), request((2, 5), "Then?", history=history, conversation_id="c")]
    )
    assert batch.order == (0, 1)
    assert batch.plans[1].content == f"{location_words(2)}\n\n[Doc_3] text of 5\n\nThen?"


@all_strategies
def test_an_odd_request_is_planned_at_every_position_of_a_batch(strategy):
    odd = [
        ContextRequest([]),
        ContextRequest([""]),
        ContextRequest(["x"] * 3),
        ContextRequest(ODD_TEXTS),
        ContextRequest([ContextBlock(id=name, text="same") for name in (*ODD_IDS, 10**5000)]),
        ContextRequest([ContextBlock(id=1, text=text, tokens=0) for text in ODD_TEXTS]),
        ContextRequest([], history=[]),
        ContextRequest(["x"], history=[user("[Doc_1] x")], conversation_id=1),
    ]
    plain = [request(ids) for ids in ((1, 2), (2, 1, 3), (4,))]
    for one in odd:
        for position in range(4):
            requests = [*plain[:position], one, *plain[position:]]
            batch = ReusePlanner().plan_batch(requests, strategy)
            assert [plan.request for plan in batch.in_input_order()] == requests
            for plan in batch.plans:
                assert_keeps_the_promises(plan)


@all_strategies
def test_token_counts_of_any_size_are_planned(strategy):
    huge = [ContextBlock(id=i, text=f"text {i}", tokens=10**30 + i) for i in range(4)]
    contexts = [[huge[i] for i in ids] for ids in ((0, 1, 2), (2, 1), (3, 0), (1, 2, 3))]
    planner = ReusePlanner()
    for plan in planner.plan_batch([ContextRequest(blocks) for blocks in contexts], strategy).plans:
        assert_keeps_the_promises(plan)
    assert sent_ids(planner.plan(ContextRequest(huge), "none")) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "contexts",
    [
        [(3 * i, 3 * i + 1, 3 * i + 2) for i in range(5000)],
        [(1, 2, 3)] * 5000,
        [(i + 1, 0, -i - 1) for i in range(5000)],
        [range(i, i + 3) for i in range(5000)],
        [range(i) for i in range(0, 300, 3)],
        [range(5000), range(5000, 0, -1)],
    ],
    ids=["disjoint", "identical", "one shared", "a chain", "nested", "long"],
)
def test_extreme_batches_are_planned_without_trouble(contexts):
    blocks = {i: block(i, 20) for context in contexts for i in context}
    requests = [ContextRequest([blocks[i] for i in context]) for context in contexts]
    planner = ReusePlanner()
    batch = planner.plan_batch(requests)
    assert sorted(batch.order) == list(range(len(contexts)))
    for plan in batch.plans:
        assert sorted(sent_ids(plan)) == sorted(set(sent_ids(plan)))
        assert set(plan.blocks) == set(plan.request.blocks)
    assert planner.plan(requests[0]).expected_cached_tokens == 20 * len(contexts[0])


def many_orders(planner, tenant=""):
    """Send the same blocks in many orders, so that a look-up visits many paths."""
    for ids in list(permutations(range(5)))[:100]:
        planner.plan(big_request(ids, tenant=tenant), "none")


def limits(planner):
    return planner.statistics().limits_reached["cached_paths"]


def test_the_look_ups_of_a_batch_share_a_bound_on_their_work_which_is_counted(monkeypatch):
    planner = ReusePlanner()
    many_orders(planner)
    planner.plan_batch([big_request((4, 3, 2, 0, 1)) for _ in range(50)])
    assert limits(planner) == 0
    requests = [big_request((4, 3, 2, 1, 0)) for _ in range(50)]
    monkeypatch.setattr(path_search, "_STEPS_A_BATCH", 0)
    for one in requests:
        planner.cached_tokens(one)
    assert limits(planner) == 0, "each alone is within the bound"
    batch = planner.plan_batch(requests)
    assert limits(planner) == 50
    for plan in batch.plans:
        assert_keeps_the_promises(plan)


def test_what_one_tenant_has_looked_up_in_a_batch_leaves_anothers_look_ups_alone(monkeypatch):
    monkeypatch.setattr(path_search, "_STEPS_A_BATCH", 500)
    together, alone = ReusePlanner(), ReusePlanner()
    for planner in (together, alone):
        for tenant in ("loud", "quiet"):
            many_orders(planner, tenant)
    quiet = big_request((4, 3, 2, 1), tenant="quiet")
    batch = together.plan_batch([*[big_request((4, 3, 2, 1, 0), tenant="loud")] * 50, quiet])
    assert limits(together) > 0
    expected = alone.plan_batch([quiet]).plans[0]
    assert limits(alone) == 0
    assert next(plan for plan in batch.plans if plan.request is quiet) == expected


def test_what_a_look_up_leaves_of_its_share_the_next_may_use(monkeypatch):
    monkeypatch.setattr(path_search, "_STEPS_A_BATCH", 0)
    planner = ReusePlanner()
    many_orders(planner)
    new = [big_request(range(100 * number, 100 * number + 50)) for number in range(1, 9)]
    planner.plan_batch([*new, big_request(range(5))])
    assert limits(planner) == 0
