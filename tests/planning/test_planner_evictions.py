import pytest
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st
from planning_helpers import (
    STRATEGIES,
    big_request,
    first_turn,
    later_turn,
    location_words,
    sent_ids,
    user,
)

from ctxreuse import ContextBlock, Evicted, ReusePlanner
from ctxreuse.errors import InvalidRequestError
from ctxreuse.index.radix_tree import IndexStatistics

pytestmark = pytest.mark.usefixtures("paper_words")

all_strategies = pytest.mark.parametrize("strategy", STRATEGIES)


def test_an_evicted_request_is_no_longer_expected_in_the_cache():
    planner = ReusePlanner()
    planner.plan(big_request((1, 2, 3), request_id="a"))
    planner.plan(big_request((1, 2, 4), request_id="b"))
    assert planner.statistics() == IndexStatistics(nodes=3, tokens=400, requests=2)

    assert planner.evict(["a", "ghost", 7, "ghost"]) == Evicted(1, 100, ("ghost", 7))
    assert planner.plan(big_request((3, 2, 1)), "none").expected_cached_tokens == 0
    assert sent_ids(planner.plan(big_request((2, 1)))) == [1, 2]
    assert planner.evict(["a"]) == Evicted(0, 0, ("a",))
    assert planner.evict([]) == Evicted(0, 0, ())


def test_a_trimmed_request_is_expected_in_the_cache_up_to_the_cut():
    planner = ReusePlanner()
    planner.plan(big_request((1, 2, 3), request_id="a"))
    planner.plan(big_request((1, 2, 4), request_id="b", tenant="t"))
    assert planner.trim("a", 3) == Evicted(1, 0, ())
    assert planner.trim("a", 1) == Evicted(1, 200, ())
    assert planner.plan(big_request((1, 2, 3)), "none").expected_cached_tokens == 100
    assert planner.plan(big_request((1, 2, 4), tenant="t"), "none").expected_cached_tokens == 300
    assert planner.trim("ghost", 1) == Evicted(0, 0, ("ghost",))
    with pytest.raises(InvalidRequestError, match="blocks must be an integer from 0, not -1"):
        planner.trim("a", -1)


def test_the_tokens_of_blocks_are_those_that_the_index_counts():
    planner = ReusePlanner(token_counter=lambda text: len(text))
    blocks = [ContextBlock(text=""), ContextBlock(text="abc"), ContextBlock(text="d", tokens=9)]
    assert planner.block_tokens(blocks[:2]) == 1 + 3  # a block without text still has a label
    assert planner.block_tokens(blocks[2:]) == 9
    assert planner.block_tokens([]) == 0


def test_token_evictions_take_whole_blocks_from_the_end_of_the_least_recently_used():
    planner = ReusePlanner()
    planner.plan(big_request((1, 2)), "none")
    planner.plan(big_request((3, 4)), "none")
    assert planner.evict_tokens(0) == Evicted(0, 0, ())
    assert planner.evict_tokens(1) == Evicted(0, 100, ())
    assert planner.evict_tokens(150) == Evicted(0, 200, ())
    assert planner.plan(big_request((3, 4)), "none").expected_cached_tokens == 100
    assert planner.evict_tokens(10**9) == Evicted(0, 200, ())
    assert planner.statistics() == IndexStatistics(0, 0, 0)


def test_token_evictions_take_from_all_tenants_for_the_engines_cache_is_one():
    planner = ReusePlanner()
    planner.plan(big_request((1,), tenant="a"))
    planner.plan(big_request((1,), tenant="b"))
    planner.plan(big_request((2,), tenant="a"))
    assert planner.evict_tokens(200) == Evicted(0, 200, ())
    cached = [
        planner.plan(big_request((1, 2), tenant=tenant), "none").expected_cached_tokens
        for tenant in ("a", "b")
    ]
    assert cached == [0, 0]
    assert planner.statistics().tokens == 500


def test_a_planner_with_a_capacity_forgets_the_least_recently_used():
    planner = ReusePlanner(capacity_tokens=400)
    for ids in ((1, 2), (3, 4), (5,)):
        planner.plan(big_request(ids))
    assert planner.statistics().tokens == 400
    assert sent_ids(planner.plan(big_request((2, 1), system="other"))) == [2, 1]
    assert planner.statistics().tokens == 400
    assert planner.plan(big_request((3, 4)), "none").expected_cached_tokens == 100


@all_strategies
def test_a_capacity_of_zero_expects_nothing(strategy):
    planner = ReusePlanner(capacity_tokens=0)
    for _ in range(2):
        plan = planner.plan(big_request((1, 2), history=[], conversation_id="c"), strategy)
        assert plan.expected_cached_tokens == 0
    later = big_request((1, 2), history=plan.messages(), conversation_id="c")
    assert planner.plan(later, strategy).references == (1, 2)
    assert planner.statistics().tokens == 0


def test_a_conversation_goes_on_after_its_turns_were_evicted():
    planner = ReusePlanner()
    plan, history = first_turn(planner, (1, 2))
    planner.evict([plan.request_id])
    assert later_turn(planner, (2, 3), history).content == (
        f"{location_words(2)}\n\n[Doc_3] text of 3\n\nThen?"
    )
    planner.evict_tokens(10**6)
    assert planner.statistics().tokens == 0


some_ids = st.lists(st.integers(0, 6), max_size=5, unique=True)
some_systems = st.sampled_from((None, "Be brief."))


@examples(100)
@given(st.lists(st.tuples(some_ids, some_systems), max_size=6), some_ids, some_systems)
def test_cached_tokens_are_those_that_planning_finds_and_recording_none(sent, asked, system):
    planner, twin = ReusePlanner(), ReusePlanner()
    for ids, its_system in sent:
        for one in (planner, twin):
            one.plan(big_request(ids, system=its_system), "none")
    new = big_request(asked, system=system)
    before = planner.statistics()
    best, in_order = planner.cached_tokens(new), planner.cached_tokens(new, in_order=True)
    assert planner.cached_tokens(new) == best >= in_order
    assert planner.statistics() == before
    plan = planner.plan(new, "none")
    assert plan == twin.plan(new, "none")  # asking has changed nothing
    assert plan.expected_cached_tokens == in_order
    assert twin.cached_tokens(new, in_order=True) == 100 * len(asked)


def test_cached_tokens_count_the_best_order_or_the_one_given():
    planner = ReusePlanner()
    planner.plan(big_request((1, 2, 3)))
    reordered = big_request((2, 9, 1))
    assert planner.cached_tokens(reordered) == 200
    assert planner.cached_tokens(reordered, in_order=True) == 0
    assert planner.cached_tokens(big_request((1, 9, 2)), in_order=True) == 100
    assert planner.cached_tokens(big_request((1, 2, 3, 1)), in_order=True) == 300
    assert planner.cached_tokens(big_request(())) == 0


def test_cached_tokens_are_none_for_another_tenant_or_system_text_and_make_nobody_known():
    planner = ReusePlanner()
    planner.plan(big_request((1, 2), tenant="a", system="s"))
    for other in (big_request((1, 2), system="s"), big_request((1, 2), tenant="a")):
        assert planner.cached_tokens(other) == planner.cached_tokens(other, in_order=True) == 0
    assert list(planner._planning._tenants._states) == ["a"]
    assert planner.cached_tokens(big_request((2, 1), tenant="a", system="s")) == 200


def test_a_later_turn_has_no_cached_tokens_and_a_first_one_has():
    planner = ReusePlanner()
    planner.plan(big_request((1, 2)))
    assert planner.cached_tokens(big_request((1, 2), history=[], conversation_id="c")) == 200
    later = big_request((1, 2), history=[user("Hello.")], conversation_id="c")
    assert planner.cached_tokens(later) == planner.cached_tokens(later, in_order=True) == 0


def test_evicted_blocks_are_no_cached_tokens():
    planner = ReusePlanner()
    plan = planner.plan(big_request((1, 2)))
    planner.trim(plan.request_id, 1)
    assert planner.cached_tokens(big_request((1, 2))) == 100
    planner.evict([plan.request_id])
    assert planner.cached_tokens(big_request((1, 2))) == 0
