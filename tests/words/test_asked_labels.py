"""Whether blocks have labels: what requests and planners ask for, and what words refer to."""

from typing import Any

import pytest

from ctxreuse import PAPER_TEMPLATES, ContextBlock, ContextRequest, ReusePlanner, Templates
from ctxreuse.context.rendering import DEFAULT_TEMPLATES

TEXTS = ["A text that is long enough." * 12, "Another text that is long enough." * 12]
LABELS = [DEFAULT_TEMPLATES.label_of(ContextBlock(text=text)) for text in TEXTS]
LABELLED = f"{LABELS[0]} {TEXTS[0]}\n\n{LABELS[1]} {TEXTS[1]}\n\nq?"
PLAIN = f"{TEXTS[0]}\n\n{TEXTS[1]}\n\nq?"
SHOWN: Any = [{"role": "user", "content": PLAIN}, {"role": "assistant", "content": "So."}]


@pytest.mark.parametrize(
    ("of_request", "of_planner", "alone", "in_conversation"),
    [
        (None, None, PLAIN, LABELLED),
        (None, True, LABELLED, LABELLED),
        (None, False, PLAIN, PLAIN),
        (True, None, LABELLED, LABELLED),
        (True, False, LABELLED, LABELLED),
        (False, None, PLAIN, PLAIN),
        (False, True, PLAIN, PLAIN),
        (False, False, PLAIN, PLAIN),
    ],
)
def test_a_request_may_ask_for_labels_or_do_without(of_request, of_planner, alone, in_conversation):
    planner = ReusePlanner(labels=of_planner)
    for history, content in ((None, alone), ([], in_conversation)):
        plan = planner.plan(ContextRequest(TEXTS, "q?", history=history, labels=of_request))
        assert plan.content == content
        assert plan.is_labelled == (content == LABELLED)
        assert bool(plan.labels) == plan.is_labelled


@pytest.mark.parametrize(
    "planner",
    [
        ReusePlanner(templates=Templates(label="<{letters}>")),
        ReusePlanner(templates=Templates(block="{label}: {text}")),
    ],
)
def test_words_that_need_labels_have_them_unless_a_request_does_without(planner):
    assert planner.plan(ContextRequest(TEXTS, "q?")).is_labelled
    begins = TEXTS[0] + " And goes on."
    plan = planner.plan(ContextRequest([TEXTS[0], begins], "q?", labels=False))
    assert not plan.is_labelled
    assert plan.content == f"{TEXTS[0]}\n\n{begins}\n\nq?"


@pytest.mark.parametrize("of_planner", [None, False])
def test_a_ranking_names_labels_where_blocks_have_them_and_else_places(of_planner):
    planner = ReusePlanner(templates=PAPER_TEMPLATES, labels=of_planner)
    texts = [f"Text {number}. " * 50 for number in range(3)]
    planner.plan(ContextRequest(texts, "q?"))
    plan = planner.plan(ContextRequest(texts[::-1], "q?"))
    assert plan.is_labelled == (of_planner is None)
    labels = [PAPER_TEMPLATES.label_of(block) for block in plan.blocks]
    before = [f"{label} " if plan.is_labelled else "" for label in labels]
    first, second, third = labels if plan.is_labelled else "123"
    assert plan.content == (
        f"{before[0]}{texts[0]}\n\n{before[1]}{texts[1]}\n\n{before[2]}{texts[2]}\n\n"
        "Please read the context in the following priority order: "
        f"{third} > {second} > {first} and answer the question.\n\nq?"
    )


@pytest.mark.parametrize("asked", ["request", "planner", "neither"])
def test_what_stands_without_a_label_is_shown_again_under_one(asked):
    planner = ReusePlanner(labels=True if asked == "planner" else None)
    labels = True if asked == "request" else None
    request = ContextRequest(TEXTS, "q?", history=SHOWN, labels=labels)
    assert planner.plan(request).content == LABELLED


def test_a_turn_without_labels_leaves_out_what_stands_without_and_refuses_what_names_them():
    plan = ReusePlanner().plan(ContextRequest(TEXTS, "q?", history=SHOWN, labels=False))
    assert plan.content == "q?"
    assert len(plan.references) == 2
