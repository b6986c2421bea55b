"""The papers' worked examples, through the public door."""

import pytest
from planning_helpers import big_request, block, order_words, request, sent_ids

from ctxreuse import ContextRequest, ReusePlanner
from ctxreuse.cache import BlockLevelCache

pytestmark = pytest.mark.usefixtures("paper_words")

BATCH = (("C1", (2, 1, 3)), ("C2", (2, 6, 1)), ("C3", (4, 1, 0)))
ARRIVING = (("C6", (2, 1, 4)), ("C3", (4, 1, 0)), ("C7", (5, 7, 8)), ("C8", (1, 2, 9)))


def ask(name_and_ids, make=request):
    name, block_ids = name_and_ids
    return make(block_ids, request_id=name)


def reused_blocks(orders, capacity_blocks):
    cache = BlockLevelCache(capacity_blocks)
    return [
        cache.serve([block(i).key for i in order], [1] * len(order)).cached_tokens
        for order in orders
    ]


both_strategies = pytest.mark.parametrize("strategy", ["reuse", "paper"])


def short(block_ids, **fields):
    """Return a request of blocks that are just long enough to be kept."""
    return ContextRequest([block(one, 8) for one in block_ids], **fields)


any_length = pytest.mark.parametrize("make", [short, big_request], ids=["short", "long"])


@both_strategies
@any_length
def test_the_papers_batch_is_ordered_by_what_its_contexts_share(strategy, make):
    batch = ReusePlanner().plan_batch([ask(entry, make) for entry in BATCH], strategy)

    assert batch.order == (0, 1, 2)
    assert [plan.request_id for plan in batch.plans] == ["C1", "C2", "C3"]
    assert [sent_ids(plan) for plan in batch.plans] == [[1, 2, 3], [1, 2, 6], [1, 4, 0]]
    assert [plan.order_annotation for plan in batch.plans] == [
        order_words(2, 1, 3),
        order_words(2, 6, 1),
        order_words(4, 1, 0),
    ]


@both_strategies
@any_length
def test_contexts_that_arrive_after_the_batch_follow_its_cached_paths(strategy, make, planner):
    planner.plan_batch([ask(entry, make) for entry in BATCH], strategy)

    arriving = [(2, 1, 4), (5, 7, 8), (1, 2, 9)]
    plans = [planner.plan(make(block_ids), strategy) for block_ids in arriving]

    assert [sent_ids(plan) for plan in plans] == [[1, 2, 4], [5, 7, 8], [1, 2, 9]]
    assert [plan.order_annotation for plan in plans] == [order_words(2, 1, 4), None, None]
    blocks_1_and_2 = 2 * (8 if make is short else 100)
    assert [plan.expected_cached_tokens for plan in plans] == [blocks_1_and_2, 0, blocks_1_and_2]


@both_strategies
@any_length
def test_figure_7_the_scheduled_order_reuses_three_blocks_where_arrival_reuses_one(strategy, make):
    planner = ReusePlanner()
    planner.plan_batch([ask(entry, make) for entry in BATCH], strategy)
    ordered = {
        name: sent_ids(planner.plan(ask((name, block_ids), make), strategy))
        for name, block_ids in ARRIVING
    }
    assert list(ordered.values()) == [[1, 2, 4], [1, 4, 0], [5, 7, 8], [1, 2, 9]]
    assert reused_blocks(ordered.values(), capacity_blocks=3) == [0, 1, 0, 0]
    scheduled = [ordered[name] for name in ("C6", "C8", "C3", "C7")]
    assert reused_blocks(scheduled, capacity_blocks=3) == [0, 2, 1, 0]

    batch = ReusePlanner().plan_batch([ask(entry, make) for entry in ARRIVING], strategy)
    assert sum(reused_blocks([sent_ids(plan) for plan in batch.plans], capacity_blocks=3)) == 3


@any_length
def test_figure_7_this_packages_batch_runs_in_the_papers_order(make):
    batch = ReusePlanner().plan_batch([ask(entry, make) for entry in ARRIVING])

    assert [plan.request_id for plan in batch.plans] == ["C6", "C8", "C3", "C7"]
    assert batch.order == (0, 3, 1, 2)
    assert [sent_ids(plan) for plan in batch.plans] == [[1, 2, 4], [1, 2, 9], [1, 4, 0], [5, 7, 8]]
