"""Blocks are moved only where that saves more than words on it cost; histories are recognised."""

from typing import Any

import pytest

from ctxreuse import ContextBlock, ContextRequest, ReusePlanner, Templates
from ctxreuse.context.rendering import DEFAULT_TEMPLATES

LONG_WORDS = Templates(order="Most relevant first: {order}", most_ranked=5)
"""Longer than an engine block, which is what a path must fill to save anything."""
WORDS = LONG_WORDS.order_tokens(5)


def block(letter: str, tokens: int) -> ContextBlock:
    return ContextBlock(id=letter, text=f"The whole text of {letter}.", tokens=tokens)


def asked(letters: str, tokens: int, **fields: Any) -> ContextRequest:
    return ContextRequest([block(one, tokens) for one in letters], "Which?", **fields)


def order(plan: Any) -> str:
    return "".join(str(block.id) for block in plan.blocks)


@pytest.mark.parametrize(("tokens", "sent"), [(WORDS + 1, "a"), (WORDS, "edcba")])
def test_a_cached_block_comes_first_where_it_saves_more_than_the_words_cost(tokens, sent):
    planner = ReusePlanner(templates=LONG_WORDS)
    planner.plan(asked("a", tokens))
    plan = planner.plan(asked("edcba", tokens))
    assert order(plan).startswith(sent)
    assert (plan.order_annotation is None) == (sent == "edcba")


def test_what_is_cached_in_the_retrievers_order_stays_in_it(planner):
    planner.plan(asked("ab", 100))
    planner.plan(asked("cd", 100))
    plan = planner.plan(asked("abdc", 100))
    assert (order(plan), plan.order_annotation) == ("abdc", None)
    longer = planner.plan(asked("xdc", 100))
    assert (order(longer), longer.expected_cached_tokens) == ("cdx", 200)


def test_without_words_every_saving_counts():
    planner = ReusePlanner(annotate=False)
    planner.plan(asked("a", 17))
    plan = planner.plan(asked("cba", 17))
    assert (order(plan)[0], plan.order_annotation) == ("a", None)


def test_a_batch_moves_blocks_only_where_enough_is_shared_by_it():
    for tokens, is_moved in ((WORDS, False), (WORDS + 1, True)):
        planner = ReusePlanner(templates=LONG_WORDS)
        batch = planner.plan_batch([asked("uvxya", tokens), asked("stzwa", tokens)])
        orders = [order(plan) for plan in batch.in_input_order()]
        assert (orders[0][0] == orders[1][0] == "a") == is_moved
        assert is_moved or orders == ["uvxya", "stzwa"]


def test_a_ranking_names_the_best_by_their_places_unless_they_stand_first():
    planner = ReusePlanner()
    planner.plan(asked("gfedcba", 100))
    plan = planner.plan(asked("abcdefg", 100))
    assert order(plan) == "gfedcba"
    assert plan.content.endswith("\n\nRead documents 7, 6, 5 first.\n\nWhich?")

    planner = ReusePlanner()
    planner.plan(asked("abced", 100))
    plan = planner.plan(asked("abcde", 100))
    assert (order(plan), plan.order_annotation) == ("abced", None)
    every = ReusePlanner(templates=Templates(most_ranked=None))
    every.plan(asked("abced", 100))
    assert every.plan(asked("abcde", 100)).order_annotation == "Read documents 1, 2, 3, 5, 4 first."


@pytest.mark.parametrize("name", ["c", None])
def test_another_process_leaves_out_what_a_history_shows(name):
    first = ReusePlanner().plan(asked("ab", 100, history=[], conversation_id="c"))
    history = [*first.messages(), {"role": "assistant", "content": "That one."}]
    later = ReusePlanner().plan(asked("bca", 100, history=history, conversation_id=name))
    a, b, c = (DEFAULT_TEMPLATES.label_of(block(one, 100)) for one in "abc")
    line = f"See also {b}, {a} above."
    assert later.content == f"{c} The whole text of c.\n\n{line}\n\nWhich?"
    assert (later.references, later.location_annotations) == (("b", "a"), (line,))


def test_what_the_assistant_repeats_or_others_altered_is_shown_again():
    text = "The whole text of a."
    for message in (
        {"role": "assistant", "content": text},
        {"role": "user", "content": f"{text} Or not."},
        {"role": "user", "content": f"So: {text}"},
    ):
        plan = ReusePlanner().plan(asked("a", 100, history=[message], labels=False))
        assert plan.content == f"{text}\n\nWhich?"
    shown = {"role": "user", "content": f"Before.\n\n{text}\n\nBehind."}
    plan = ReusePlanner().plan(asked("a", 100, history=[shown], labels=False))
    assert plan.content == "Which?"
