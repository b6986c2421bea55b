import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_helpers import given_turn

from ctxreuse.context.blocks import ContextBlock, ContextRequest
from ctxreuse.context.rendering import DEFAULT_TEMPLATES, Reference, SentBlock, Templates
from ctxreuse.planning.plan import BatchPlan, Plan

A, B, C = (ContextBlock(id=name, text=f"text {name}") for name in "abc")
HISTORY = ({"role": "user", "content": "[Doc_1] text b"}, {"role": "assistant", "content": "OK."})


def plan_of(*parts, query="Why?", order_annotation=None, templates=DEFAULT_TEMPLATES, **fields):
    request = ContextRequest([B, A, C], query, **fields)
    shown = given_turn(request, parts, templates, order_annotation)
    return Plan(request, "r", shown, expected_cached_tokens=0)


SECOND_TURN = plan_of(
    Reference("[Doc_1]", "b", "See [Doc_1]."),
    SentBlock("[Doc_2]", A),
    Reference("[Doc_9]", 9, "See [Doc_9]."),
    SentBlock("[Doc_3]", C),
    system="Be brief.",
    history=HISTORY,
)


def test_a_plan_tells_sent_blocks_from_references_in_order():
    assert SECOND_TURN.blocks == (A, C)
    assert SECOND_TURN.references == ("b", 9)
    assert SECOND_TURN.location_annotations == ("See [Doc_1].", "See [Doc_9].")


def test_every_block_of_the_request_has_its_label():
    plan = plan_of(
        Reference("[Doc_1]", "b", "See [Doc_1]."), SentBlock("[Doc_2]", C), SentBlock("[Doc_3]", A)
    )
    assert plan.label_of == {B.key: "[Doc_1]", A.key: "[Doc_3]", C.key: "[Doc_2]"}


def test_the_messages_are_system_history_and_this_turn():
    content = "See [Doc_1].\n\n[Doc_2] text a\n\nSee [Doc_9].\n\n[Doc_3] text c\n\nWhy?"
    assert SECOND_TURN.content == content
    assert SECOND_TURN.messages() == [
        {"role": "system", "content": "Be brief."},
        *HISTORY,
        {"role": "user", "content": content},
    ]


def test_the_order_annotation_stands_where_the_templates_put_it():
    sent = SentBlock("[Doc_1]", A)
    assert plan_of(sent, order_annotation="Order.").content == "[Doc_1] text a\n\nOrder.\n\nWhy?"
    behind = Templates(order_position="after_question")
    assert plan_of(sent, order_annotation="Order.", templates=behind).content == (
        "[Doc_1] text a\n\nWhy?\n\nOrder."
    )


def test_messages_may_be_edited_without_changing_the_plan():
    before = SECOND_TURN.messages()
    edited = SECOND_TURN.messages()
    edited[1]["content"] = "edited"
    del edited[0]
    assert SECOND_TURN.messages() == before


def test_a_plan_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SECOND_TURN.shown = ()


@given(st.permutations(range(5)))
def test_a_batchs_plans_come_back_in_input_order(order):
    plans = [dataclasses.replace(SECOND_TURN, request_id=position) for position in order]
    batch = BatchPlan(tuple(plans), tuple(order))
    assert [plan.request_id for plan in batch.in_input_order()] == [0, 1, 2, 3, 4]
