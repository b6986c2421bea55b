"""What engines report of prompts corrects how long their texts are thought to be."""

import random
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse import ContextBlock, ContextRequest, ReusePlanner
from ctxreuse.memory.tenants import TokenRatio

WORDS = 40


def table(number: int, rows: int) -> str:
    source = random.Random(number)
    return "\n".join(f"{source.randrange(10**6)};{source.random():.4f}" for _ in range(rows))


def in_engine(text: str) -> int:
    """Count each sign, each two digits and each four letters, as tokenizers do about."""
    signs = sum(one in string.punctuation or one == "\n" for one in text)
    digits = sum(one.isdigit() for one in text)
    return signs + -(-digits // 2) + (len(text) - signs - digits) // 4


def ask(planner: ReusePlanner, blocks: list[ContextBlock], system: str | None = None) -> int:
    plan = planner.plan(ContextRequest(blocks, "How much is it?", system=system))
    tokens = sum(in_engine(message["content"]) for message in plan.messages())
    planner.report_usage(plan, tokens + WORDS, 0)
    return plan.expected_cached_tokens


def tables(numbers: range) -> list[ContextBlock]:
    return [ContextBlock(id=one, text=table(one, 5 + one % 17)) for one in numbers]


def learn(planner: ReusePlanner, system: str | None = None) -> None:
    for first in range(0, 200, 4):
        ask(planner, tables(range(first, first + 2 + first % 3)), system)


def test_tables_are_thought_to_be_as_long_as_the_engine_says(planner):
    learn(planner, "You read tables.")
    again = tables(range(1_000, 1_004))
    ask(planner, again, "You read tables.")
    expected = ask(planner, again, "You read tables.")
    really = sum(in_engine(block.text) for block in again)
    assert planner.block_tokens(again) < 0.75 * really  # as estimated
    assert expected == pytest.approx(really, rel=0.15)


def test_prose_behind_another_system_text_is_not_thought_to_be_longer(planner):
    learn(planner, "You read tables.")
    prose = [ContextBlock(text="Porto lies in the north of Portugal, on the river Douro. " * 5)]
    ask(planner, prose)
    assert ask(planner, prose) == planner.block_tokens(prose)


def test_another_tenants_prompts_change_nothing():
    alone, beside = ReusePlanner(), ReusePlanner()
    for first in range(0, 200, 4):
        plan = beside.plan(ContextRequest(tables(range(first, first + 3)), tenant="other"))
        beside.report_usage(plan, 10 * first, 0)
    for first in (0, 0, 3):
        blocks = tables(range(first, first + 4))
        one, two = (planner.plan(ContextRequest(blocks)) for planner in (alone, beside))
        assert one.messages() == two.messages()
        assert one.expected_cached_tokens == two.expected_cached_tokens


def test_a_counter_of_the_users_and_counts_of_the_users_are_believed():
    planner = ReusePlanner(token_counter=len)
    learn(planner)
    blocks = tables(range(4))
    ask(planner, blocks)
    assert ask(planner, blocks) == sum(len(one.text) for one in blocks)
    planner = ReusePlanner()
    learn(planner)
    blocks = [ContextBlock(text=table(1, 30), tokens=77)]
    ask(planner, blocks)
    assert ask(planner, blocks) == 77


@pytest.mark.parametrize("spread", [0, 400])
def test_prompts_that_are_all_as_long_in_tokens_say_nothing(spread):
    ratio, source = TokenRatio(), random.Random(1)
    for _ in range(100):
        ratio.note(2_300 + source.randint(-spread, spread), 2_000 + source.randint(-60, 60))
    assert ratio.value == 1.0


@given(st.lists(st.tuples(st.integers(1, 10**9), st.integers(1, 10**9)), max_size=60))
def test_whatever_is_reported_the_ratio_stays_within_its_bounds(prompts):
    ratio = TokenRatio()
    for estimated, reported in prompts:
        ratio.note(estimated, reported)
        assert 0.25 <= ratio.value <= 4.0


def test_the_ratios_of_a_tenant_are_bounded(planner):
    for number in range(50):
        for length in range(1, 20):
            ask(planner, tables(range(length)), f"system {number}")
    learnt = planner._planning._tenants.state("").ratios.values()
    assert [ratio.value == 1.0 for ratio in learnt] == [False] * 16
