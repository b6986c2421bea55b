"""Shadow mode: everything goes out as it came, and what planning would have saved is counted."""

import dataclasses
import json

import pytest
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st
from planning_helpers import (
    STRATEGIES,
    assistant,
    big_request,
    first_turns,
    plan_everything,
    requests_of_any_kind,
)

from ctxreuse import ContextBlock, ContextRequest, ReusePlanner, cache_profile
from ctxreuse.context.rendering import DEFAULT_TEMPLATES, word_tokens
from ctxreuse.errors import InvalidRequestError
from ctxreuse.measure.replay.policies import AS_SENT, OURS_BATCH, OURS_ONLINE
from ctxreuse.measure.replay.simulate import Replay, Run
from ctxreuse.measure.traces.trace_files import TraceRequest

strategies = st.sampled_from(STRATEGIES)


@examples(150)
@given(requests_of_any_kind, strategies, st.booleans())
def test_a_shadow_planner_sends_what_a_planner_without_strategy_sends(requests, strategy, batch):
    shadow, plain = ReusePlanner(mode="shadow"), ReusePlanner(deduplicate=False)
    sent = plan_everything(shadow, requests, strategy, batch=batch)
    assert sent == plan_everything(plain, requests, "none", batch=batch)
    assert shadow.statistics() == plain.statistics()
    assert shadow.savings.requests == len(requests)
    assert shadow.savings.cached_as_sent <= shadow.savings.block_tokens


@examples(150)
@given(st.lists(first_turns, max_size=8), strategies, st.booleans(), st.sampled_from((None, 60)))
def test_what_it_counts_is_what_a_planner_reaches(requests, strategy, batch, capacity):
    shadow = ReusePlanner(capacity_tokens=capacity, mode="shadow")
    active = ReusePlanner(capacity_tokens=capacity)
    sent = plan_everything(shadow, requests, strategy, batch=batch)
    plans = plan_everything(active, requests, strategy, batch=batch)
    savings = shadow.savings
    assert savings.cached_as_sent == sum(plan.expected_cached_tokens for plan in sent)
    assert savings.cached_if_planned == sum(plan.expected_cached_tokens for plan in plans)
    changed = [plan.blocks != was.blocks for plan, was in zip(plans, sent, strict=True)]
    assert savings.changed == sum(changed)


@pytest.mark.parametrize("labels", [None, True, False])
def test_blocks_that_a_conversation_shows_stay_and_are_counted(labels):
    planner = ReusePlanner(mode="shadow", labels=labels)

    def asked(numbers, history):
        texts = {number: f"the whole text of block {number}" for number in numbers}
        blocks = [ContextBlock(id=n, text=text, tokens=100) for n, text in texts.items()]
        return ContextRequest(blocks, "Which?", history=history, conversation_id="c")

    first = planner.plan(asked((1, 2), []))
    again = planner.plan(asked((2, 4), [*first.messages(), assistant("Yes.")]))
    assert [block.id for block in again.blocks] == [2, 4]
    assert again.references == ()
    assert planner.savings.left_out == 100
    assert planner.savings.changed == 1
    assert planner.savings.prefilled_if_planned == 300
    words = 3 * DEFAULT_TEMPLATES.label_tokens + word_tokens("See also [BCDF] above.")
    assert planner.savings.word_tokens == (0 if labels is False else words)


def test_what_the_engine_drops_would_not_have_been_served_either():
    planner = ReusePlanner(mode="shadow")
    planner.plan(dataclasses.replace(big_request((1, 2, 3)), request_id="first"))
    assert planner.evict(["first"]).requests == 1
    planner.plan(big_request((3, 1, 2)))
    assert planner.savings.cached_if_planned == 0


def test_a_sibling_is_a_shadow_too():
    planner = ReusePlanner(mode="shadow")
    planner.plan(big_request((1, 2)))
    assert planner.sibling().savings.requests == 0
    assert planner.sibling().savings.mode == "shadow"
    with pytest.raises(InvalidRequestError, match="there is no mode 'quiet'"):
        ReusePlanner(mode="quiet")


def test_a_router_expects_what_will_be_sent():
    planner = ReusePlanner(mode="shadow")
    planner.plan(big_request((1, 2, 3)))
    assert planner.cached_tokens(big_request((3, 2, 1))) == 0
    assert planner.cached_tokens(big_request((1, 2, 9))) == 200


BLOCKS = {name: ContextBlock(id=name, text=f"{name} text", tokens=12) for name in "abcdef"}
SPECS = ["openai(minimum=24)", "anthropic(minimum=24, life=1h)", "gemini(minimum=24)"]

contexts = st.lists(
    st.tuples(
        st.lists(st.sampled_from("abcdef"), max_size=5, unique=True),
        st.sampled_from([0, 1, 299, 300, 1_800, 3_600]),
    ),
    max_size=12,
)


@examples(80)
@given(contexts, st.sampled_from(SPECS[:2]), st.booleans(), st.booleans())
def test_it_is_what_the_simulator_reckons(given_contexts, spec, is_batch, has_system):
    planner, now, trace = ReusePlanner(mode="shadow", cache=spec), 0.0, []
    system = "Be brief. " * 10 if has_system else None
    requests = []
    for number, (names, later) in enumerate(given_contexts):
        now += 0 if is_batch else later
        blocks = tuple(BLOCKS[name] for name in names)
        trace.append(
            TraceRequest(number, f"{number}?", blocks, system=system, timestamp_ms=now * 1e3)
        )
        requests.append(ContextRequest(blocks, f"{number}?", system=system))
        if not is_batch:
            plan = planner.plan(requests[-1], now=now)
            assert (plan.marks, plan.expected_cached_tokens) == ((), 0)
    if is_batch:
        planner.plan_batch(requests)
    replay = Replay(trace, BLOCKS, cache=cache_profile(spec))
    ours = OURS_BATCH if is_batch else OURS_ONLINE
    bill = planner.savings.bill
    runs = [Run(policy, trace, deduplicate=False) for policy in (AS_SENT, ours)]
    expected = [replay.measure(run).billed for run in runs]
    assert [bill.as_retrieved, bill.if_planned] == expected


def test_without_marks_what_is_read_follows_from_the_order():
    planner = ReusePlanner(mode="shadow", cache="gemini(minimum=24)")
    bill = planner.savings.bill  # before the first request
    assert (bill.factor_as_retrieved, bill.factor_if_planned) == (1.0, 1.0)
    for names in ("abc", "cab", "bca"):
        planner.plan(ContextRequest([BLOCKS[name] for name in names], "?"))
    bill = planner.savings.bill
    assert (bill.as_retrieved.read, bill.if_planned.read) == (0, 72)
    assert bill.factor_as_retrieved == 1.0
    words = planner.savings.word_tokens
    assert words == 2 * DEFAULT_TEMPLATES.order_tokens(3)
    assert bill.factor_if_planned == pytest.approx((36 + words + 0.1 * 72) / 108)


def test_each_class_has_its_own_and_all_is_json():
    classes = {"one": "free", "two": "paid"}
    planner = ReusePlanner(mode="shadow", cache="openai(minimum=24)", tenant_class=classes)
    for tenant in ("one", "two", "two", "two"):
        planner.plan(ContextRequest([BLOCKS["a"], BLOCKS["b"]], "?", tenant=tenant))
    savings = planner.savings
    parts = [one.bill.if_planned for one in savings.by_class.values()]
    assert sum(parts[1:], parts[0]) == savings.bill.if_planned
    said = json.loads(json.dumps(savings.as_json()))["bill"]
    assert said["cache"] == "openai(minimum=24)"
    assert said["if_planned"]["uncached"] == savings.bill.if_planned.uncached
    assert said["factor_if_planned"] == savings.bill.factor_if_planned


@pytest.mark.parametrize(("mode", "cache"), [("shadow", "vllm"), ("active", "openai")])
def test_engines_and_active_planners_have_none(mode, cache):
    planner = ReusePlanner(mode=mode, cache=cache)
    planner.plan(ContextRequest([BLOCKS["a"]], "?"))
    assert planner.savings.bill is planner.savings.as_json()["bill"] is None


def test_the_end_of_a_turn_is_written_for_the_next_one():
    planner = ReusePlanner(cache="openai(minimum=24)")
    request = ContextRequest([BLOCKS["a"], BLOCKS["b"]], "?", conversation_id="c", history=[])
    assert planner.plan(request).expected_bill.written == {"30m": 24}
    alone = ContextRequest([BLOCKS["c"], BLOCKS["d"]], "?")
    assert planner.plan(alone).expected_bill.written == {}
