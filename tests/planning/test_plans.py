from planning_helpers import given_turn

from ctxreuse.context.blocks import ContextBlock, ContextRequest
from ctxreuse.context.rendering import DEFAULT_TEMPLATES, Reference, SentBlock
from ctxreuse.planning.plan import Plan

A, B, C = (ContextBlock(id=name, text=f"text {name}") for name in "abc")


def plan_of(*parts, query="Why?", order_annotation=None, templates=DEFAULT_TEMPLATES, **fields):
    request = ContextRequest([B, A, C], query, **fields)
    shown = given_turn(request, parts, templates, order_annotation)
    return Plan(request, "r", shown, expected_cached_tokens=0)


def test_every_block_of_the_request_has_its_label():
    plan = plan_of(
        Reference("[Doc_1]", "b", "See [Doc_1]."), SentBlock("[Doc_2]", C), SentBlock("[Doc_3]", A)
    )
    assert plan.label_of == {B.key: "[Doc_1]", A.key: "[Doc_3]", C.key: "[Doc_2]"}
