"""Shadow mode: everything goes out as it came, and what planning would have saved is counted."""

import dataclasses

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

from ctxreuse import ContextBlock, ContextRequest, ReusePlanner
from ctxreuse.context.rendering import DEFAULT_TEMPLATES, word_tokens
from ctxreuse.errors import InvalidRequestError

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
    assert savings.changed == sum(
        plan.blocks != was.blocks for plan, was in zip(plans, sent, strict=True)
    )


@pytest.mark.parametrize("labels", [None, True])
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
    assert planner.savings.word_tokens == words


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
