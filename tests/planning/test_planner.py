import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import permutations

import pytest
from planning_helpers import (
    STRATEGIES,
    assert_keeps_the_promises,
    big_request,
    block,
    request,
    sent_ids,
    user,
)

from ctxreuse import ContextRequest, ReusePlanner
from ctxreuse.errors import InvalidRequestError, UnknownStrategyError
from ctxreuse.memory import prefix_index

pytestmark = pytest.mark.usefixtures("paper_words")
all_strategies = pytest.mark.parametrize("strategy", STRATEGIES)


def test_a_plan_cannot_be_changed(planner):
    history = [user([{"type": "text", "text": "parts"}])]
    plan = planner.plan(ContextRequest(["one"], "Why?", history=history))
    expected = plan.messages()
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.request_id = "other"
    plan.messages()[0]["content"].clear()
    plan.messages()[1]["content"] = "Changed."
    assert plan.messages() == expected


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
    for _ in range(3):
        assert not estimating.counts_tokens
        assert counting.counts_tokens
        estimating, counting = estimating.sibling(), counting.sibling()


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
