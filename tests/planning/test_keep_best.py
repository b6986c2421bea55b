"""`keep_best=True`: the retriever's best block stays in front, and what follows is still shared."""

from copy import copy

import pytest
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st
from planning_helpers import big_request, first_turns, identity, plan_everything, sent_ids

from ctxreuse import ContextBlock, ContextRequest, ReusePlanner
from ctxreuse.rules.cache_rules import READY_PROFILES
from ctxreuse.sharing import SQLiteLog

CACHES = st.sampled_from([*sorted(READY_PROFILES), "anthropic(minimum=30)"])


@given(st.lists(first_turns, max_size=8), st.booleans(), CACHES)
@examples(200)
def test_no_block_is_moved_before_the_best_and_none_is_lost(requests, is_batch, cache):
    planner = ReusePlanner(cache=cache, keep_best=True)
    plan_everything(planner, requests[:2], "reuse", batch=False)
    for plan in plan_everything(planner, requests, "reuse", batch=is_batch):
        asked = list(dict.fromkeys(map(identity, plan.request.blocks)))
        sent = list(map(identity, plan.blocks))
        assert sorted(map(repr, sent)) == sorted(map(repr, asked))
        assert sent[:1] == asked[:1]


def test_what_is_cached_behind_the_best_block_is_shared():
    planner = ReusePlanner(keep_best=True)
    planner.plan(big_request("abcd"))
    assert sent_ids(planner.plan(big_request("adcb"))) == ["a", "b", "c", "d"]
    # without it, these would go behind what is cached
    assert sent_ids(planner.plan(big_request("dcba"))) == ["d", "c", "b", "a"]
    assert sent_ids(ReusePlanner().plan(big_request("dcba"))) == ["d", "c", "b", "a"]


def test_nothing_is_said_on_what_stands_behind_the_best_block_unless_that_is_wanted():
    said = {}
    for annotate in (None, False, True):
        planner = ReusePlanner(keep_best=True, annotate=annotate)
        for one in (planner, copy(planner)):
            one.plan(big_request("abcd"))
            said.setdefault(annotate, []).append(one.plan(big_request("adcb")).order_annotation)
    assert said[None] == said[False] == [None, None]
    assert said[True] == ["Read documents 1, 4, 3 first."] * 2
    moving = ReusePlanner()
    moving.plan(big_request("abcd"))
    assert moving.plan(big_request("adcb")).order_annotation is not None


@pytest.mark.parametrize("cache", ["vllm", "anthropic(minimum=100)", "openai"])
def test_a_batch_shares_what_stands_behind_the_same_best_block(cache):
    requests = [big_request(letters) for letters in ("abcx", "aycb", "bcaz", "bwca")]
    planner = ReusePlanner(cache=cache, keep_best=True)
    orders = [sent_ids(plan) for plan in planner.plan_batch(requests).in_input_order()]
    assert [order[0] for order in orders] == ["a", "a", "b", "b"]
    if cache != "openai":  # which keeps nothing as short
        assert orders[0][:3] == orders[1][:3]
        assert orders[2][:3] == orders[3][:3]


def test_nothing_is_moved_for_less_behind_the_best_block_than_the_words_on_it_take():
    def asked(letters):
        tokens = {"a": 100, "z": 5}
        return ContextRequest(
            [ContextBlock(id=one, text=one, tokens=tokens.get(one, 50)) for one in letters]
        )

    told = ReusePlanner(keep_best=True, annotate=True).plan_batch([asked("axz"), asked("ayz")])
    assert [sent_ids(plan) for plan in told.in_input_order()] == [["a", "x", "z"], ["a", "y", "z"]]
    untold = ReusePlanner(keep_best=True).plan_batch([asked("axz"), asked("ayz")])
    assert [sent_ids(plan)[:2] for plan in untold.in_input_order()] == [["a", "z"], ["a", "z"]]


def test_an_order_of_another_process_that_moves_the_best_block_is_not_taken_over(tmp_path):
    logs = [SQLiteLog(tmp_path / "log.sqlite") for _ in range(2)]
    moving = ReusePlanner(shared_log=logs[0])
    keeping = ReusePlanner(shared_log=logs[1], keep_best=True)
    moving.plan(big_request("abc"))
    assert sent_ids(moving.plan(big_request("cab"))) == ["a", "b", "c"]
    for planner in (moving, keeping):
        assert planner.catch_up()
    assert sent_ids(keeping.plan(big_request("cab")))[0] == "c"
    batch = keeping.plan_batch([big_request("cab"), big_request("bac")]).in_input_order()
    assert [sent_ids(plan)[0] for plan in batch] == ["c", "b"]


def test_the_papers_and_the_retrievers_order_are_as_without():
    for strategy in ("paper", "none"):
        plans = []
        for keep_best in (True, False):
            planner = ReusePlanner(keep_best=keep_best)
            planner.plan(big_request("abc"), strategy)
            plans.append(sent_ids(planner.plan(big_request("cab"), strategy)))
            batch = planner.plan_batch([big_request("bac"), big_request("cba")], strategy)
            plans[-1] += [sent_ids(plan) for plan in batch.in_input_order()]
        assert plans[0] == plans[1]


def test_a_copy_keeps_it_and_shadow_mode_counts_with_it():
    requests = [big_request("abc"), big_request("cab")]
    copied = copy(ReusePlanner(keep_best=True))
    assert [sent_ids(copied.plan(one))[0] for one in requests] == ["a", "c"]
    saved = []
    for keep_best in (False, True):
        shadow = ReusePlanner(mode="shadow", keep_best=keep_best)
        for one in requests:
            shadow.plan(one)
        saved.append(shadow.savings.saved_tokens)
    assert saved[0] > saved[1] == 0
