"""Prompts with labels and without share no block: what is expected is what the texts share."""

from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse import ContextBlock, ContextRequest, Plan, ReusePlanner
from ctxreuse.context.rendering import SentBlock, render_block
from ctxreuse.index.explain import Cause


def blocks(letters: str, tokens: int = 1_000) -> list[ContextBlock]:
    return [ContextBlock(id=one, text=f"The text of {one}.", tokens=tokens) for one in letters]


def alone(letters: str, **fields: Any) -> ContextRequest:
    return ContextRequest(blocks(letters, fields.pop("tokens", 1_000)), "Which?", **fields)


def opening(letters: str, conversation_id: str = "c", **fields: Any) -> ContextRequest:
    """Return the first turn of a conversation."""
    return alone(letters, history=[], conversation_id=conversation_id, **fields)


def test_labels_stand_where_later_turns_point_to_them():
    planner = ReusePlanner()
    assert not planner.plan(alone("ab")).is_labelled
    assert planner.plan(opening("cd")).is_labelled
    assert not planner.plan(opening("ef", labels=False)).is_labelled
    assert not planner.plan(opening("gh", tokens=63)).is_labelled, "to show it again costs little"
    assert not ReusePlanner().plan(opening("ab"), deduplicate=False).is_labelled
    assert not ReusePlanner(deduplicate=False).plan(opening("ab")).is_labelled


def test_a_request_that_needs_none_takes_labels_where_it_finds_more_so():
    planner = ReusePlanner()
    planner.plan(opening("ab", tokens=100))
    joined = planner.plan(alone("ba", tokens=100))
    assert joined.is_labelled
    assert joined.expected_cached_tokens == 200
    assert joined.content.startswith("[Doc_1] The text of a.\n\n[Doc_2] The text of b.\n\n")


@pytest.mark.parametrize("tokens", [100, 1_000])
def test_what_comes_again_keeps_the_form_in_which_it_was_sent(tokens):
    planner = ReusePlanner()
    first = planner.plan(alone("ab", tokens=tokens))
    planner.plan(opening("abc", tokens=tokens))
    joined = planner.plan(alone("cba", tokens=tokens))
    assert (first.is_labelled, joined.is_labelled) == (False, True)
    planner.plan(alone("abc", tokens=tokens, labels=False))
    for sent in (first, joined):
        again = planner.plan(sent.request)
        assert again.content == sent.content
        assert again.expected_cached_tokens == tokens * len(sent.blocks)


def test_short_blocks_that_find_nothing_get_no_labels():
    planner = ReusePlanner()
    planner.plan(opening("ab", tokens=100))
    assert not planner.plan(alone("cd", tokens=100)).is_labelled
    assert planner.plan(alone("ef")).is_labelled, "a label costs little there"
    assert not planner.plan(alone("gh", system="Another text.")).is_labelled


def test_what_is_sent_as_retrieved_depends_on_nothing_that_was_sent():
    planner = ReusePlanner()
    planner.plan(opening("ab"))
    assert not planner.plan(alone("ab"), "none").is_labelled
    assert not planner.plan_batch([alone("ab"), opening("cd")], "none").plans[0].is_labelled


def test_a_batch_has_one_form_for_each_system_text():
    requests = [alone("ba"), opening("ab"), alone("cd", system="Another text.")]
    plans = ReusePlanner().plan_batch(requests).in_input_order()
    assert [one.is_labelled for one in plans] == [True, True, False]
    assert [block.id for block in plans[0].blocks] == [block.id for block in plans[1].blocks]


def test_labels_alone_explain_why_blocks_are_computed_again():
    planner = ReusePlanner()
    planner.plan(alone("ab"))
    explained = planner.plan(opening("ab")).explain()
    assert (explained.cause, explained.lost_tokens) == (Cause.other_labels, 2_000)


def test_a_planner_that_starts_from_a_file_knows_which_prompts_had_labels(tmp_path):
    planner = ReusePlanner()
    asked = [opening("ab"), alone("cd", labels=False), alone("ba"), alone("dc", labels=False)]
    for one in asked:
        planner.plan(one)
    planner.save(tmp_path / "planner")
    loaded = ReusePlanner.load(tmp_path / "planner")
    for one in asked:
        expected, got = planner.preview(one), loaded.preview(one)
        assert (got.content, got.is_labelled) == (expected.content, expected.is_labelled)


def _cached_text(plan: Plan) -> str:
    """Return the beginning of a prompt that ends with the last block expected in the cache."""
    shown = [part for part in plan.parts if isinstance(part, SentBlock)]
    ends = list(accumulate(part.block.tokens or 0 for part in shown))
    number = ends.index(plan.expected_cached_tokens) + 1 if plan.expected_cached_tokens else 0
    texts = [
        render_block(part.label, part.block.text, plan.templates)
        if plan.is_labelled
        else part.block.text
        for part in shown[:number]
    ]
    return plan.templates.separator.join(texts)


requests = st.builds(
    lambda letters, labels, chat, system, tokens: alone(
        "".join(letters),
        tokens=tokens,
        labels=labels,
        system=system,
        **({"history": [], "conversation_id": "c"} if chat else {}),
    ),
    st.lists(st.sampled_from("abcde"), unique=True, min_size=1),
    st.sampled_from((None, None, True, False)),
    st.booleans(),
    st.sampled_from((None, "Be brief.")),
    st.sampled_from((40, 1_000)),
)


@given(st.lists(requests, max_size=12), st.sampled_from(("reuse", "paper", "none")), st.booleans())
def test_what_is_expected_in_the_cache_begins_an_earlier_prompt(asked, strategy, is_batch):
    planner, sent = ReusePlanner(), []
    plans = (
        planner.plan_batch(asked, strategy).plans
        if is_batch
        else (planner.plan(one, strategy) for one in asked)
    )
    for plan in plans:
        cached = _cached_text(plan)
        begins = [
            content
            for system, content in sent
            if system == plan.request.system and content.startswith(cached)
        ]
        assert begins or not cached
        sent.append((plan.request.system, plan.content))
