from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse import ContextBlock, ContextRequest, ReusePlanner
from ctxreuse.cache import CapacityTracker, PrefixCacheMetrics, capacity_tracker
from ctxreuse.errors import InvalidRequestError


def plan_of(planner, ids, tokens=100, **fields):
    blocks = [ContextBlock(id=number, text=f"{number}", tokens=tokens) for number in ids]
    return planner.plan(ContextRequest(blocks, "?", **fields))


def test_the_index_keeps_the_share_of_the_capacity_that_blocks_take(planner):
    tracker = CapacityTracker(planner, capacity_tokens=1_000)
    assert tracker.block_share == 1.0
    for number in range(10):
        plan = plan_of(planner, [number])
        planner.report_usage(plan, prompt_tokens=180, cached_tokens=0, completion_tokens=20)
        assert tracker.block_share == 0.5
        assert planner.statistics().tokens == min(500, 100 * (number + 1))


def test_the_least_recently_used_goes_first_over_all_tenants(planner):
    CapacityTracker(planner, capacity_tokens=300)
    plans = []
    for number, tenant in ((1, "a"), (2, "b"), (1, "a"), (3, "b"), (4, "c")):
        plans.append(plan_of(planner, [number], tenant=tenant))
        cached = plans[-1].expected_cached_tokens
        planner.report_usage(plans[-1], prompt_tokens=100, cached_tokens=cached)
    unknown = [
        planner.evict([plan.request_id], plan.request.tenant).requests == 0 for plan in plans
    ]
    assert unknown == [False, True, False, False, False]


def test_the_share_is_that_of_the_requests_that_fill_the_cache(planner):
    tracker = CapacityTracker(planner, capacity_tokens=1_000)
    shares = []
    for number in range(7):
        plan = plan_of(planner, [number])
        planner.report_usage(plan, prompt_tokens=500 if number < 3 else 125, cached_tokens=0)
        shares.append(tracker.block_share)
    assert shares == [0.2, 0.2, 0.2, 300 / 1125, 400 / 1250, 500 / 1375, 500 / 1000]


def test_blocks_that_were_found_take_their_own_share_and_others_that_of_the_rest(planner):
    tracker = CapacityTracker(planner, capacity_tokens=1_000)
    shares = []
    for number in (1, 1, 2):
        plan = plan_of(planner, [number])
        planner.report_usage(plan, 200, plan.expected_cached_tokens)
        shares.append(tracker.block_share)
    assert shares == [0.5, 0.1, 0.25 + 0.75 * 0.1]


def test_cached_tokens_that_are_unknown_are_taken_as_planned():
    planners = [ReusePlanner(), ReusePlanner()]
    trackers = [CapacityTracker(planner, capacity_tokens=400) for planner in planners]
    for ids in ([1, 2], [1, 3], [1, 2], [4]):
        plans = [plan_of(planner, ids) for planner in planners]
        planners[0].report_usage(plans[0], 250, plans[0].expected_cached_tokens)
        planners[1].report_usage(plans[1], 250, None)
    assert trackers[0].block_share == trackers[1].block_share
    assert planners[0].statistics() == planners[1].statistics()


def test_tokens_are_those_of_the_index_whatever_they_are_counted_with():
    planner = ReusePlanner(token_counter=lambda text: 50)
    tracker = CapacityTracker(planner, capacity_tokens=1_000)
    plan = planner.plan(ContextRequest(["one", "two"]))
    planner.report_usage(plan, prompt_tokens=200, cached_tokens=0)
    assert (planner.block_tokens(plan.blocks), tracker.block_share) == (100, 0.5)


def test_what_is_no_answered_call_is_refused():
    tracker = CapacityTracker(ReusePlanner(), capacity_tokens=1_000)
    with pytest.raises(InvalidRequestError, match="call must be an AnsweredCall"):
        tracker.answered(["a"])


def test_it_takes_its_size_from_the_engines_metrics(planner):
    page = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="101"} 1\n'
    for metrics in (page, PrefixCacheMetrics.parse(page)):
        assert CapacityTracker.from_metrics(planner, metrics).capacity_tokens == 1600
    with pytest.raises(InvalidRequestError, match="do not tell the size of the cache"):
        CapacityTracker.from_metrics(planner, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("p", 1), "planner must be a ReusePlanner, not 'p'"),
        ((None, -1), "capacity_tokens must be an integer from 0, not -1"),
        ((None, "1"), "capacity_tokens must be an integer from 0, not '1'"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(InvalidRequestError, match=message):
        CapacityTracker(arguments[0] or ReusePlanner(), arguments[1])


answers = st.tuples(
    st.lists(st.integers(0, 6), min_size=1, max_size=4),
    st.integers(0, 900),
    st.none() | st.integers(0, 900),
    st.integers(0, 300),
)


@given(st.lists(answers, max_size=15), st.integers(0, 2_000))
def test_the_index_never_holds_more_than_the_engine_can(answers, capacity):
    planner = ReusePlanner()
    tracker = CapacityTracker(planner, capacity)
    for ids, prompt, cached, completion in answers:
        planner.report_usage(plan_of(planner, ids), prompt, cached, completion_tokens=completion)
        assert 0 <= tracker.block_share <= 1
        assert planner.statistics().tokens <= capacity * tracker.block_share


def shares_and_expectations(answers, first_of_b):
    """Return after each answer what was expected, and the share; B's blocks count from a number."""
    planner = ReusePlanner()
    tracker = CapacityTracker(planner, capacity_tokens=1_500)
    seen = []
    for tenant, (ids, prompt, cached, completion) in answers:
        first = first_of_b if tenant == "b" else 0
        plan = plan_of(planner, [first + number for number in ids], tenant=tenant)
        planner.report_usage(plan, prompt, cached, completion_tokens=completion)
        seen.append((plan.expected_cached_tokens, tracker.block_share, planner.statistics().tokens))
    return seen


@given(st.lists(st.tuples(st.sampled_from("ab"), answers), max_size=15))
def test_whether_a_tenant_has_the_same_blocks_as_another_changes_nothing(answers):
    assert shares_and_expectations(answers, 0) == shares_and_expectations(answers, 100)


@pytest.mark.parametrize("salted", [False, True])
def test_what_several_tenants_find_stays_in_each_ones_index(salted, planner):
    """Salted, the engine holds it once for each tenant; else once, and each of them finds it."""
    CapacityTracker(planner, capacity_tokens=2_000)
    held = set()
    for number in range(60):
        tenant = "abc"[number % 3]
        plan = plan_of(planner, [1], tokens=200, tenant=tenant)
        cached = 200 if (tenant if salted else "") in held else 0
        held.add(tenant if salted else "")
        planner.report_usage(plan, prompt_tokens=240, cached_tokens=cached, completion_tokens=10)
    assert [planner.cached_tokens(plan.request)] == [200]
    assert planner.statistics().tokens == 600, "every tenant's"


def test_contexts_of_one_prompt_share_its_tokens(planner):
    tracker = CapacityTracker(planner, capacity_tokens=1_000)
    plans = [plan_of(planner, [1, 2]), plan_of(planner, [3])]
    planner.report_usage(plans, 500, 0, completion_tokens=100)
    assert tracker.block_share == 0.5


def test_the_last_tracker_of_a_planner_is_the_one_that_hears(planner):
    trackers = [CapacityTracker(planner, capacity_tokens=1_000) for _ in range(2)]
    planner.report_usage(plan_of(planner, [1]), 200, 0)
    planner.report_usage([], 700, 0)  # a prompt without a context
    assert [tracker.block_share for tracker in trackers] == [1.0, 0.5]


def test_threads_share_it(planner):
    CapacityTracker(planner, capacity_tokens=3_000)

    def run(number):
        planner.report_usage(plan_of(planner, [number % 40]), prompt_tokens=150, cached_tokens=None)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(run, range(400)))
    assert planner.statistics().tokens <= 3_000


def test_blocks_that_the_engine_had_lost_and_stored_anew_stay_in_the_index(planner):
    plan_of(planner, [1])
    tracker = CapacityTracker(planner, capacity_tokens=1_000)
    plan = plan_of(planner, [1])
    assert plan.expected_cached_tokens == 100
    planner.report_usage(plan, prompt_tokens=200, cached_tokens=0)
    assert (tracker.block_share, planner.statistics().tokens) == (0.5, 100)


NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize("count", [-5, "ten", NAN, INFINITE, -INFINITE, True, 1.5, 10**400, [1]])
def test_counts_that_cannot_be_right_are_unknown(count, planner):
    tracker = CapacityTracker(planner, capacity_tokens=1_000)
    for prompt, cached, completion in ((count, 0, 0), (200, count, 0), (200, 0, count)):
        planner.report_usage(plan_of(planner, [1]), prompt, cached, completion_tokens=completion)
    assert len(tracker._recent) == 2
    for number in range(10, 40):  # it goes on as if nothing had been
        plan = plan_of(planner, [number])
        planner.report_usage(plan, prompt_tokens=180, cached_tokens=0, completion_tokens=20)
    assert tracker.block_share == 0.5
    assert planner.statistics().tokens == 500


def test_what_it_looks_back_on_is_bounded_however_little_is_stored(planner):
    tracker = CapacityTracker(planner, capacity_tokens=10**9)
    plan = plan_of(planner, [1])
    for _ in range(5_000):
        planner.report_usage(plan, prompt_tokens=100, cached_tokens=100)
    assert len(tracker._recent) <= 4_096
    assert len(tracker._uses) == 1


def test_the_blocks_that_it_looks_back_on_are_bounded_and_told(monkeypatch):
    monkeypatch.setattr(capacity_tracker, "_MOST_BLOCKS", 20)
    planner = ReusePlanner()
    tracker = CapacityTracker(planner, capacity_tokens=10**9)
    for number in range(30):
        plan = plan_of(planner, range(number, 2 * number + 1), tokens=1, tenant="abc"[number % 3])
        planner.report_usage(plan, prompt_tokens=200, cached_tokens=0)
        parts = tracker.parts
        assert not any(part.entries > part.bound for part in parts.values())
        assert parts["measured_blocks"].entries == sum(len(one.blocks) for one in tracker._recent)
        assert len(tracker._uses) <= 20
