import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_helpers import assistant, big_request, request

from ctxreuse import ReusePlanner
from ctxreuse.errors import InvalidRequestError

SETTINGS = [{}, {"mode": "shadow"}, {"deduplicate": False}, {"keep_best": True}]
contexts = st.lists(st.lists(st.integers(0, 6), unique=True, max_size=5), max_size=8)


def shows(plan):
    return plan.parts, plan.labels, plan.order_annotation, plan.messages()


@pytest.mark.parametrize("settings", SETTINGS)
@given(contexts=contexts, tried=contexts)
def test_a_preview_shows_what_a_plan_would_and_changes_no_later_plan(settings, contexts, tried):
    planner, plain = ReusePlanner(**settings), ReusePlanner(**settings)
    history = []
    for number, ids in enumerate(contexts):
        for other in tried[:2]:
            planner.preview(big_request(other, "Other?"))
        fields = {"history": history if number % 3 else [], "conversation_id": "c"}
        asked = big_request(ids, "Which?", **fields)
        preview, plan = planner.preview(asked), planner.plan(asked)
        assert shows(preview) == shows(plan)
        assert plan == plain.plan(asked)
        history = [*plan.messages(), assistant("Yes.")]
    assert planner.statistics() == plain.statistics()


def test_a_preview_has_no_request_id_and_expects_nothing_in_the_cache(planner):
    planner.plan(big_request((1, 2)))
    preview = planner.preview(big_request((1, 2), request_id="mine"))
    assert (preview.request_id, preview.expected_cached_tokens) == ("", 0)
    with pytest.raises(InvalidRequestError, match="only a planner knows"):
        preview.explain()


def test_a_preview_repeats_what_is_shown_if_told_so():
    planner = ReusePlanner(labels=True)
    first = planner.plan(request((1,), "?", history=[], conversation_id="c"))
    history = [*first.messages(), assistant("Yes.")]
    asked = request((1,), "?", history=history, conversation_id="c")
    assert planner.preview(asked).references == (1,)
    assert planner.preview(asked, deduplicate=False).references == ()
