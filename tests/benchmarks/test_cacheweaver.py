"""CacheWeaver's greedy walk, and the policy that plans in its order."""

import os
from pathlib import Path

import pytest
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st
from planning_helpers import assistant, block, user

from ctxreuse import ContextRequest
from ctxreuse.cache import BlockLevelCache, CacheUsage
from ctxreuse.context.rendering import DEFAULT_TEMPLATES
from ctxreuse.measure.replay.plan_file import plan_under
from ctxreuse.measure.replay.policies import AS_SENT
from ctxreuse.measure.replay.simulate import Replay, Run, simulate_blocks
from ctxreuse.measure.traces.trace_files import TraceRequest, read_corpus, read_trace
from public_data.peers.cacheweaver import CACHEWEAVER, CacheWeaverPlanner

CORPUS = {name: block(name, 10) for name in "abcdefgh"}
DATA = Path(os.environ.get("CTXREUSE_DATA", "absent"))


def request(names, **fields):
    return ContextRequest([CORPUS[name] for name in names], "Which?", **fields)


def sent(planner, *contexts, **fields):
    """Plan one context after the other; return what is sent of each."""
    plans = [planner.plan(request(names, **fields)) for names in contexts]
    return ["".join(one.id for one in plan.blocks) for plan in plans]


def test_the_variant_takes_what_most_requests_had_there():
    served = ("ab", "ab", "ac", "cd")
    first, variant = CacheWeaverPlanner(), CacheWeaverPlanner(prefers_most_served=True)
    assert sent(first, *served) == sent(variant, *served) == list(served)
    assert sent(first, "cab") == ["cab"]
    assert sent(variant, "cab") == ["abc"]


def test_no_other_tenant_and_system_text_is_walked():
    planner = CacheWeaverPlanner()
    assert sent(planner, "ab") == ["ab"]
    assert sent(planner, "ba", tenant="t") == ["ba"]
    assert sent(planner, "ba", system="s") == ["ba"]
    assert sent(planner, "ba") == ["ab"]


def test_what_the_cache_no_longer_holds_is_not_walked():
    # blocks have 10 tokens; the least recently used request goes first, its last block first
    def sent_with(capacity, *contexts):
        return sent(CacheWeaverPlanner(capacity_tokens=capacity), *contexts)

    assert sent_with(40, "abh", "cd", "hba") == ["abh", "cd", "abh"]
    assert sent_with(20, "ab", "c", "ba") == ["ab", "c", "ab"]
    assert sent_with(20, "ab", "cd", "ba") == ["ab", "cd", "ba"]
    assert sent_with(0, "ab", "ba") == ["ab", "ba"]


def test_a_later_turn_keeps_the_retrievers_order_and_takes_room():
    planner = CacheWeaverPlanner(capacity_tokens=40)
    assert sent(planner, "ef") == ["ef"]
    assert sent(planner, "ab", conversation_id="c", history=[]) == ["ab"]
    told = [user("Which?"), assistant("This.")]
    assert sent(planner, "dc", conversation_id="c", history=told) == ["dc"]
    assert sent(planner, "cd") == ["cd"]  # d stands behind a history
    assert sent(planner, "fe") == ["fe"]  # the turn has taken the room of these


def test_a_request_that_was_not_served_is_taken_out():
    planner = CacheWeaverPlanner()
    plans = [planner.plan(request("ab", tenant=tenant, request_id=1)) for tenant in ("", "t")]
    evicted = planner.evict([plans[0].request_id, "unknown"], "")
    assert (evicted.requests, evicted.unknown) == (1, ("unknown",))
    assert sent(planner, "ba") == ["ba"]
    assert sent(planner, "ba", tenant="t") == ["ab"]


def test_it_says_nothing_of_the_order_and_plans_for_a_cache_of_a_size():
    planner = CacheWeaverPlanner()
    planner.plan(request("ab"))
    plan = planner.plan(request("cba"))
    assert [one.id for one in plan.blocks] == ["a", "b", "c"]
    assert plan.order_annotation is None
    assert plan.expected_cached_tokens == 20
    planner = CACHEWEAVER.planner(deduplicate=False, capacity_tokens=20)
    assert sent(planner, "ab", "cd", "ba") == ["ab", "cd", "ba"]


contexts = st.lists(st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=8), max_size=25)


@examples(200)
@given(contexts)
def test_it_is_algorithm_1_over_all_that_was_served(drawn):
    served = set()
    expected = []
    for context in drawn:
        order, remaining = "", list(context)
        while True:
            follower = next((one for one in remaining if order + one in served), None)
            if follower is None:
                break
            order += follower
            remaining.remove(follower)
        order += "".join(remaining)
        served.update(order[: end + 1] for end in range(len(order)))
        expected.append(order)
    assert sent(CacheWeaverPlanner(), *drawn) == expected


@examples(50)
@given(contexts, st.integers(0, 120), st.booleans())
def test_plans_hold_the_requests_blocks_whatever_the_cache_holds(drawn, capacity, variant):
    planner = CacheWeaverPlanner(capacity_tokens=capacity, prefers_most_served=variant)
    for context, order in zip(drawn, sent(planner, *drawn), strict=True):
        assert sorted(order) == sorted(context)


def test_a_long_context_is_walked_through_nodes_of_many_children():
    planner = CacheWeaverPlanner()
    blocks = [block(name, 1) for name in range(400)]
    for one in blocks[1:]:
        planner.plan(ContextRequest([blocks[0], one], "Which?"))
    plan = planner.plan(ContextRequest(blocks[::-1], "Which?"))
    assert [one.id for one in plan.blocks] == [0, *range(399, 0, -1)]
    assert plan.expected_cached_tokens == 2


# the policy


def test_a_replay_measures_it():
    trace = [
        TraceRequest(name, "Which?", tuple(CORPUS[one] for one in names))
        for name, names in (("x", "abc"), ("y", "cab"), ("z", "fba"))
    ]
    replay = Replay(trace, CORPUS)
    result = replay.measure(Run(CACHEWEAVER, trace))
    assert (result.policy, result.strategy, result.mode) == (
        "CacheWeaver, online",
        "none",
        "online",
    )
    block = 10 + DEFAULT_TEMPLATES.label_tokens
    assert result.cached_tokens == (0, 3 * block, 2 * block)
    assert replay.measure(Run(AS_SENT, trace)).cached_tokens == (0, 0, 0)
    small = replay.measure(Run(CACHEWEAVER, trace, capacity_tokens=2 * block))
    assert small.cached_tokens == (0, 2 * block, 2 * block)


@pytest.mark.slow
@pytest.mark.skipif(not (DATA / "xquad").is_dir(), reason="needs CTXREUSE_DATA")
@pytest.mark.parametrize(
    ("capacity", "as_sent", "ratio", "variant"),
    [(None, 0.2566, 0.3987, 0.4134), (20_000, 0.0518, 0.2026, 0.2074)],
)
def test_what_it_reaches_on_xquad(capacity, as_sent, ratio, variant):
    corpus = read_corpus(str(DATA / "xquad" / "corpus.jsonl"))
    trace = read_trace(str(DATA / "xquad" / "trace_k5.jsonl"), corpus)

    def reached(policy, planner):
        planned = plan_under(policy, trace, planner)
        return sum(
            simulate_blocks(planned, corpus, BlockLevelCache(capacity)), CacheUsage()
        ).hit_ratio

    sizes = {"deduplicate": True, "capacity_tokens": capacity}
    assert reached(AS_SENT, AS_SENT.planner(**sizes)) == pytest.approx(as_sent, abs=5e-5)
    assert reached(CACHEWEAVER, CACHEWEAVER.planner(**sizes)) == pytest.approx(ratio, abs=5e-5)
    most_served = CacheWeaverPlanner(capacity_tokens=capacity, prefers_most_served=True)
    assert reached(CACHEWEAVER, most_served) == pytest.approx(variant, abs=5e-5)
