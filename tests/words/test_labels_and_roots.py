"""Prompts with labels and without share no block: what is expected is what the texts share."""

from itertools import accumulate
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ctxreuse import ContextBlock, ContextRequest, Plan, ReusePlanner
from ctxreuse.context.rendering import SentBlock, render_block
from ctxreuse.memory.explanations import Cause


def blocks(letters: str, tokens: int = 1_000) -> list[ContextBlock]:
    return [ContextBlock(id=one, text=f"The text of {one}.", tokens=tokens) for one in letters]


def alone(letters: str, **fields: Any) -> ContextRequest:
    return ContextRequest(blocks(letters, fields.pop("tokens", 1_000)), "Which?", **fields)


def opening(letters: str, conversation_id: str = "c", **fields: Any) -> ContextRequest:
    return alone(letters, history=[], conversation_id=conversation_id, **fields)


def test_labels_stand_where_later_turns_point_to_them(planner):
    assert not planner.plan(alone("ab")).is_labelled
    assert planner.plan(opening("cd")).is_labelled
    assert not planner.plan(opening("ef", labels=False)).is_labelled
    assert not planner.plan(opening("gh", tokens=63)).is_labelled, "to show it again costs little"
    assert not ReusePlanner().plan(opening("ab"), deduplicate=False).is_labelled
    assert not ReusePlanner(deduplicate=False).plan(opening("ab")).is_labelled


def test_labels_alone_explain_why_blocks_are_computed_again(planner):
    planner.plan(alone("ab"))
    explained = planner.plan(opening("ab")).explain()
    assert (explained.cause, explained.lost_tokens) == (Cause.other_labels, 2_000)


def test_a_planner_that_starts_from_a_file_knows_which_prompts_had_labels(tmp_path, planner):
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
