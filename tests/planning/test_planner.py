import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
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
    later_turn,
    location_words,
    request,
    sent_ids,
    user,
)

from ctxreuse import ContextBlock, ContextRequest, ReusePlanner
from ctxreuse.errors import InvalidRequestError, UnknownStrategyError
from ctxreuse.memory import prefix_index

pytestmark = pytest.mark.usefixtures("paper_words")
all_strategies = pytest.mark.parametrize("strategy", STRATEGIES)


def test_moved_blocks_are_announced_before_the_question(planner):
    planner.plan(big_request((1, 2, 3)))
    plan = planner.plan(big_request((3, 9, 1, 2), "Why?"))

    assert plan.content == (
        "[Doc_1] text of 1\n\n[Doc_2] text of 2\n\n[Doc_3] text of 3\n\n[Doc_9] text of 9\n\n"
        "Please read the context in the following priority order: "
        "[Doc_3] > [Doc_9] > [Doc_1] > [Doc_2] and answer the question.\n\n"
        "Why?"
    )
    assert plan.expected_cached_tokens == 300


def test_strategy_none_keeps_the_retrievers_order_and_still_records_what_is_sent(planner):
    planner.plan(big_request((1, 2)), "none")
    assert sent_ids(planner.plan(big_request((2, 1)), "none")) == [2, 1]
    assert planner.plan(big_request((2, 1, 3)), "none").expected_cached_tokens == 200
    assert planner.statistics().requests == 3


def test_a_plan_cannot_be_changed(planner):
    history = [user([{"type": "text", "text": "parts"}])]
    plan = planner.plan(ContextRequest(["one"], "Why?", history=history))
    expected = plan.messages()
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.request_id = "other"
    plan.messages()[0]["content"].clear()
    plan.messages()[1]["content"] = "Changed."
    assert plan.messages() == expected


def test_a_counted_request_id_is_never_one_that_was_given(planner):
    given = planner.plan(request((1,), request_id="request-0")).request_id
    counted = planner.plan(request((2,))).request_id
    assert given == "request-0"
    assert counted != given
    assert planner.evict([given, counted]).requests == 2


@all_strategies
def test_a_counter_that_fails_leaves_the_planner_as_it_was(strategy):
    def count(text):
        if text == "text of 3":
            raise LookupError("no such text")
        return 100

    planner = ReusePlanner(token_counter=count)
    planner.plan(request((1, 2)), strategy)
    before = planner.statistics()
    with pytest.raises(LookupError, match="no such text"):
        planner.plan(request((1, 3)), strategy)
    with pytest.raises(LookupError, match="no such text"):
        planner.plan_batch([request((1, 2)), request((1, 3))], strategy)
    assert planner.statistics() == before
    assert planner.plan(request((1, 2)), strategy).expected_cached_tokens == 200


def test_a_text_is_counted_as_blocks_are():
    assert ReusePlanner().count_tokens("12345678") == 2  # estimated
    assert ReusePlanner(token_counter=len).count_tokens("12345678") == 8
    with pytest.raises(InvalidRequestError, match="it must return an integer from 0"):
        ReusePlanner(token_counter=lambda text: -1).count_tokens("a")


def test_a_planner_says_whether_it_counts_or_estimates():
    estimating, counting = ReusePlanner(), ReusePlanner(token_counter=len)
    assert not estimating.counts_tokens
    assert counting.counts_tokens
    for _ in range(2):
        estimating, counting = estimating.sibling(), counting.sibling()
        assert not estimating.counts_tokens
        assert counting.counts_tokens


def test_a_counter_is_asked_by_all_threads_that_wait_for_it():
    all_there = threading.Barrier(8, timeout=60)

    def count(text):
        all_there.wait()
        return 1

    planner = ReusePlanner(token_counter=count)
    work = [partial(planner.count_tokens, f"text {n}") for n in range(4)]
    work += [partial(planner.plan, request((n,))) for n in range(4)]
    with ThreadPoolExecutor(len(work)) as pool:
        for done in [pool.submit(one) for one in work]:
            done.result()


def test_a_planner_that_annotates_nothing_reorders_without_a_word():
    planner = ReusePlanner(annotate=False)
    planner.plan(big_request((1, 2)))
    plan = planner.plan(big_request((2, 1), "Why?"))
    assert plan.order_annotation is None
    assert plan.content == "[Doc_1] text of 1\n\n[Doc_2] text of 2\n\nWhy?"
    batch = planner.plan_batch([big_request((2, 1)), big_request((2, 1, 3))])
    assert [one.order_annotation for one in batch.plans] == [None, None]
    assert [sent_ids(one)[:2] for one in batch.plans] == [[1, 2], [1, 2]]


def test_a_planner_that_annotates_nothing_still_refers_to_what_was_shown():
    planner = ReusePlanner(annotate=False)
    _, history = first_turn(planner, (1,))
    plan = later_turn(planner, (1, 2), history)
    assert plan.references == (1,)
    assert plan.location_annotations == (location_words(1),)


@pytest.mark.parametrize("strategy", ["Reuse", "", None, 1, ["reuse"]])
def test_an_unknown_strategy_is_refused(strategy, planner):
    for call in (
        lambda: planner.plan(request((1,)), strategy=strategy),
        lambda: planner.plan_batch([request((1,))], strategy=strategy),
        lambda: planner.plan_batch([], strategy=strategy),
    ):
        with pytest.raises(UnknownStrategyError) as caught:
            call()
        assert str(caught.value) == (
            f"there is no strategy {strategy!r} ({type(strategy).__name__}); "
            f"choose one of {', '.join(map(repr, STRATEGIES))}"
        )


def test_strategy_none_runs_a_batch_as_it_is():
    any_iterable = (big_request(ids) for ids in ((2, 1), (3,), (1, 2)))
    batch = ReusePlanner().plan_batch(any_iterable, "none")
    assert batch.order == (0, 1, 2)
    assert [sent_ids(plan) for plan in batch.plans] == [[2, 1], [3], [1, 2]]


def test_a_batch_goes_behind_what_is_cached_already(planner):
    planner.plan(big_request((1, 2)))
    batch = planner.plan_batch([big_request(ids) for ids in ((3, 4, 1), (4, 3, 2, 1), (5, 3, 4))])
    assert [sent_ids(plan) for plan in batch.in_input_order()] == [
        [1, 3, 4],
        [1, 2, 4, 3],
        [5, 3, 4],
    ]
    assert [plan.expected_cached_tokens for plan in batch.in_input_order()] == [100, 200, 0]


@all_strategies
def test_turns_of_one_conversation_keep_their_order_in_a_batch(strategy, planner):
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
def test_token_counts_of_any_size_are_planned(strategy, planner):
    huge = [ContextBlock(id=i, text=f"text {i}", tokens=10**30 + i) for i in range(4)]
    contexts = [[huge[i] for i in ids] for ids in ((0, 1, 2), (2, 1), (3, 0), (1, 2, 3))]
    for plan in planner.plan_batch([ContextRequest(blocks) for blocks in contexts], strategy).plans:
        assert_keeps_the_promises(plan)
    assert sent_ids(planner.plan(ContextRequest(huge), "none")) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "contexts",
    [
        [(3 * i, 3 * i + 1, 3 * i + 2) for i in range(2000)],
        [(1, 2, 3)] * 2000,
        [(i + 1, 0, -i - 1) for i in range(2000)],
        [range(i, i + 3) for i in range(2000)],
        [range(i) for i in range(0, 300, 3)],
        [range(2000), range(2000, 0, -1)],
    ],
    ids=["disjoint", "identical", "one shared", "a chain", "nested", "long"],
)
def test_extreme_batches_are_planned_without_trouble(contexts, planner):
    blocks = {i: block(i, 20) for context in contexts for i in context}
    requests = [ContextRequest([blocks[i] for i in context]) for context in contexts]
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


def test_the_look_ups_of_a_batch_share_a_bound_on_their_work_which_is_counted(monkeypatch, planner):
    many_orders(planner)
    planner.plan_batch([big_request((4, 3, 2, 0, 1)) for _ in range(50)])
    assert limits(planner) == 0
    requests = [big_request((4, 3, 2, 1, 0)) for _ in range(50)]
    monkeypatch.setattr(prefix_index, "_STEPS_A_BATCH", 0)
    for one in requests:
        planner.cached_tokens(one)
    assert limits(planner) == 0, "each alone is within the bound"
    batch = planner.plan_batch(requests)
    assert limits(planner) == 50
    for plan in batch.plans:
        assert_keeps_the_promises(plan)


def test_what_one_tenant_has_looked_up_in_a_batch_leaves_anothers_look_ups_alone(monkeypatch):
    monkeypatch.setattr(prefix_index, "_STEPS_A_BATCH", 500)
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
