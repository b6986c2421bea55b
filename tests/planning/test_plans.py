import dataclasses

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


def test_every_block_of_the_request_has_its_label():
    plan = plan_of(
        Reference("[Doc_1]", "b", "See [Doc_1]."), SentBlock("[Doc_2]", C), SentBlock("[Doc_3]", A)
    )
    assert plan.label_of == {B.key: "[Doc_1]", A.key: "[Doc_3]", C.key: "[Doc_2]"}


def test_the_order_annotation_stands_where_the_templates_put_it():
    sent = SentBlock("[Doc_1]", A)
    assert plan_of(sent, order_annotation="Order.").content == "[Doc_1] text a\n\nOrder.\n\nWhy?"
    behind = Templates(order_position="after_question")
    assert plan_of(sent, order_annotation="Order.", templates=behind).content == (
        "[Doc_1] text a\n\nWhy?\n\nOrder."
    )


@given(st.permutations(range(5)))
def test_a_batchs_plans_come_back_in_input_order(order):
    plans = [dataclasses.replace(SECOND_TURN, request_id=position) for position in order]
    batch = BatchPlan(tuple(plans), tuple(order))
    assert [plan.request_id for plan in batch.in_input_order()] == [0, 1, 2, 3, 4]
