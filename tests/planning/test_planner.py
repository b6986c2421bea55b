import dataclasses
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_helpers import (
    ODD_IDS,
    ODD_TEXTS,
    STRATEGIES,
    assert_keeps_the_promises,
    assistant,
    big_request,
    block,
    location_words,
    order_words,
    request,
    sent_ids,
    user,
    without_id,
)

from ctxreuse import BatchPlan, ContextBlock, ContextRequest, Evicted, ReusePlanner, Templates
from ctxreuse.errors import InvalidRequestError, UnknownStrategyError
from ctxreuse.index.radix_tree import IndexStatistics

all_strategies = pytest.mark.parametrize("strategy", STRATEGIES)


def first_turn(planner, block_ids, query="First?", conversation_id="c", **fields):
    """Plan a first turn; return its plan and the history that the second turn stands behind."""
    plan = planner.plan(
        request(block_ids, query, history=[], conversation_id=conversation_id, **fields)
    )
    return plan, [*plan.messages(), assistant("Yes.")]


def later_turn(planner, block_ids, history, query="Then?", conversation_id="c", **fields):
    return planner.plan(
        request(block_ids, query, history=history, conversation_id=conversation_id, **fields)
    )


# one request


@all_strategies
def test_a_prompt_is_system_then_blocks_then_question(strategy):
    plan = ReusePlanner().plan(request((3, 1), "Why?", system="Be brief."), strategy)
    assert plan.messages() == [
        {"role": "system", "content": "Be brief."},
        user("[Doc_1] text of 3\n\n[Doc_2] text of 1\n\nWhy?"),
    ]
    assert plan.labels == {"[Doc_1]": 3, "[Doc_2]": 1}


def test_moved_blocks_are_announced_before_the_question():
    planner = ReusePlanner()
    planner.plan(big_request((1, 2, 3)))
    plan = planner.plan(big_request((3, 9, 1, 2), "Why?"))

    assert plan.content == (
        "[Doc_1] text of 1\n\n[Doc_2] text of 2\n\n[Doc_3] text of 3\n\n[Doc_4] text of 9\n\n"
        "Please read the context in the following priority order: "
        "[Doc_3] > [Doc_4] > [Doc_1] > [Doc_2] and answer the question.\n\n"
        "Why?"
    )
    assert plan.expected_cached_tokens == 300


def test_the_order_annotation_can_stand_after_the_question():
    planner = ReusePlanner(templates=Templates(order_position="after_question"))
    planner.plan(big_request((1, 2)))
    plan = planner.plan(big_request((2, 1), "Why?"))
    assert plan.content == (
        f"[Doc_1] text of 1\n\n[Doc_2] text of 2\n\nWhy?\n\n{order_words(2, 1)}"
    )


@all_strategies
def test_an_unchanged_order_is_not_announced(strategy):
    planner = ReusePlanner()
    plans = [planner.plan(big_request(ids), strategy) for ids in ((1, 2), (1, 2), (1, 2, 3), (7,))]
    assert [plan.order_annotation for plan in plans] == [None] * 4


def test_strategy_none_keeps_the_retrievers_order_and_still_records_what_is_sent():
    planner = ReusePlanner()
    planner.plan(big_request((1, 2)), "none")
    assert sent_ids(planner.plan(big_request((2, 1)), "none")) == [2, 1]
    assert planner.plan(big_request((2, 1, 3)), "none").expected_cached_tokens == 200
    assert planner.statistics().requests == 3


@all_strategies
def test_a_block_counts_once_and_its_identity_is_id_type_and_text(strategy):
    blocks = [
        ContextBlock(id=1, text="one"),
        ContextBlock(id="1", text="one"),
        ContextBlock(id=1, text="one"),
        ContextBlock(id=1, text="one, updated"),
        "one",
        "one",
    ]
    plan = ReusePlanner().plan(ContextRequest(blocks), strategy)
    assert sent_ids(plan) == [1, "1", 1, ContextBlock(text="one").id]
    assert [type(i) for i in sent_ids(plan)] == [int, str, int, str]
    assert plan.content == "[Doc_1] one\n\n[Doc_2] one\n\n[Doc_3] one, updated\n\n[Doc_4] one"


@all_strategies
@pytest.mark.parametrize(
    ("blocks", "query", "content"),
    [
        ([], "Why?", "Why?"),
        ([], "", ""),
        ([""], "", "[Doc_1] "),
        (["\x00\n", "{text}"], "{order}", "[Doc_1] \x00\n\n\n[Doc_2] {text}\n\n{order}"),
        (["\ud800"], "\udfff", "[Doc_1] \ud800\n\n\udfff"),
    ],
)
def test_odd_contexts_are_legal(strategy, blocks, query, content):
    planner = ReusePlanner()
    asked = ContextRequest(blocks, query)
    assert planner.plan(asked, strategy).messages() == [user(content)]
    assert planner.plan_batch([asked], strategy).plans[0].messages() == [user(content)]


def test_system_texts_have_prefixes_of_their_own():
    planner = ReusePlanner()
    planner.plan(big_request((1, 2), system="A"))
    assert [
        planner.plan(big_request((1, 2), system=system)).expected_cached_tokens
        for system in ("B", None, "", "A")
    ] == [0, 0, 0, 200]


def test_request_ids_are_given_back_and_otherwise_counted():
    planner = ReusePlanner()
    asked = (None, "engine-7", None, 7, None)
    assert [planner.plan(request((1,), request_id=name)).request_id for name in asked] == [
        "request-0",
        "engine-7",
        "request-1",
        7,
        "request-2",
    ]


def test_a_counted_request_id_is_never_one_that_was_given():
    planner = ReusePlanner()
    given = planner.plan(request((1,), request_id="request-0")).request_id
    counted = planner.plan(request((2,))).request_id
    assert given == "request-0"
    assert counted != given
    assert planner.evict([given, counted]).requests == 2


def test_a_plan_can_neither_be_changed_nor_change_with_the_callers_lists():
    asked_blocks = [block(1)]
    history = [user("Earlier."), user([{"type": "text", "text": "parts"}])]
    plan = ReusePlanner().plan(ContextRequest(asked_blocks, "Why?", history=history))
    expected = plan.messages()

    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.request_id = "other"
    asked_blocks.append(block(2))
    history[0]["content"] = "Changed."
    history.append(user("More."))
    plan.messages()[0]["content"] = "Changed."
    assert plan.messages() == expected


def test_the_parts_of_a_message_in_the_callers_history_are_copied_too():
    history = [user([{"type": "text", "text": "as it was"}])]
    plan = ReusePlanner().plan(ContextRequest([], "Why?", history=history))
    history[0]["content"][0]["text"] = "changed"
    plan.messages()[0]["content"].clear()
    assert plan.messages()[0] == user([{"type": "text", "text": "as it was"}])


def test_given_token_counts_win_over_the_counter_and_both_over_the_estimate():
    def words(text):
        return len(text.split())

    counted = ContextBlock(id="a", text="three words here")
    given = ContextBlock(id="b", text="three words here", tokens=50)
    planner = ReusePlanner(token_counter=words)
    planner.plan(ContextRequest([given, counted]))
    assert planner.plan(ContextRequest([given, counted])).expected_cached_tokens == 53
    estimating = ReusePlanner()
    estimating.plan(ContextRequest([given, counted]))
    assert estimating.plan(ContextRequest([given, counted])).expected_cached_tokens == 54


@all_strategies
def test_a_counter_that_fails_leaves_the_planner_as_it_was(strategy):
    def count(text):
        if text == "text of 3":
            raise LookupError("no such text")
        return 100

    planner = ReusePlanner(token_counter=count)
    planner.plan(request((1, 2)), strategy)
    before = planner.statistics()
    with pytest.raises(LookupError, match="no such text"):
        planner.plan(request((1, 3)), strategy)
    with pytest.raises(LookupError, match="no such text"):
        planner.plan_batch([request((1, 2)), request((1, 3))], strategy)
    assert planner.statistics() == before
    assert planner.plan(request((1, 2)), strategy).expected_cached_tokens == 200


# histories


@all_strategies
def test_without_a_history_nothing_is_left_out(strategy):
    planner = ReusePlanner()
    first_turn(planner, (1, 2))
    plan = planner.plan(request((2, 1), "Why?", conversation_id="c"), strategy)
    assert sorted(sent_ids(plan)) == [1, 2]
    assert plan.references == ()


def test_an_empty_history_is_a_first_turn_and_ordered_like_any_context():
    planner = ReusePlanner()
    planner.plan(big_request((1, 2)))
    plan = planner.plan(big_request((2, 1), "Why?", history=[], conversation_id="c"))
    assert (sent_ids(plan), plan.order_annotation) == ([1, 2], order_words(2, 1))


@all_strategies
def test_a_later_turn_keeps_the_retrievers_order(strategy):
    planner = ReusePlanner()
    planner.plan_batch([big_request((1, 2, 3))] * 3, strategy)
    later = big_request((3, 2, 1), history=[user("Hello."), assistant("Yes?")])
    for plan in (planner.plan(later, strategy), planner.plan_batch([later], strategy).plans[0]):
        assert (sent_ids(plan), plan.order_annotation) == ([3, 2, 1], None)
        assert plan.expected_cached_tokens == 0


def test_a_later_turn_is_no_prefix_for_other_requests():
    planner = ReusePlanner()
    for _ in range(3):
        planner.plan(big_request((1, 2), history=[user("Hello.")], conversation_id="c"))
    plan = planner.plan(big_request((3, 2, 1)))
    assert (sent_ids(plan), plan.expected_cached_tokens) == ([3, 2, 1], 0)


def test_blocks_that_were_cut_from_the_history_are_sent_again():
    planner = ReusePlanner()
    _, history = first_turn(planner, (1, 2))
    second = later_turn(planner, (3,), history)
    history = [*second.messages(), assistant("Yes.")]

    plan = later_turn(planner, (1, 3, 2), history[2:])
    assert plan.content == (
        f"[Doc_4] text of 1\n\n{location_words(3)}\n\n[Doc_5] text of 2\n\nThen?"
    )
    assert plan.labels == {"[Doc_3]": 3, "[Doc_4]": 1, "[Doc_5]": 2}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("text of 1", "text of 1!"),
        ("text of 1", "Text of 1"),
        ("text of 1", "ext of 1"),
        ("[Doc_1] ", ""),
        ("[Doc_1] ", "[Doc_7] "),
        ("[Doc_1] ", "As [Doc_1] "),
        ("[Doc_1] ", "[Doc_1]\n"),
    ],
)
def test_a_block_that_was_edited_in_the_history_is_sent_again(old, new):
    planner = ReusePlanner()
    _, history = first_turn(planner, (1, 2))
    edited = [user(history[0]["content"].replace(old, new)), history[1]]
    plan = later_turn(planner, (2, 1), edited)
    assert sent_ids(plan) == [1]
    assert plan.references == (2,)
    assert_keeps_the_promises(plan)


def test_a_block_that_moved_within_the_history_is_found_where_it_stands():
    planner = ReusePlanner()
    first_turn(planner, (1, 2))
    moved = [user("Earlier."), assistant("[Doc_2] text of 2"), user("So?\n[Doc_1] text of 1")]
    assert later_turn(planner, (1, 2), moved).references == (1, 2)
    assert later_turn(planner, (1, 2), moved[:2]).references == (2,)


def test_a_changed_text_under_an_old_id_is_sent():
    planner = ReusePlanner()
    _, history = first_turn(planner, (1, 2))
    updated = ContextBlock(id=1, text="text of 1, updated")
    plan = planner.plan(ContextRequest([updated, block(2)], history=history, conversation_id="c"))
    assert plan.content == f"[Doc_3] text of 1, updated\n\n{location_words(2)}"


def test_a_history_of_messages_in_parts_is_read_and_sent_as_it_is():
    planner = ReusePlanner()
    plan, _ = first_turn(planner, (1, 2))
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    history = [
        user([image, {"type": "text", "text": plan.content}]),
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "tool", "content": "[Doc_9] is free"},
    ]
    later = later_turn(planner, (2, 5), history)
    assert later.messages() == [
        *history,
        user(f"{location_words(2)}\n\n[Doc_10] text of 5\n\nThen?"),
    ]


def test_labels_in_texts_and_answers_are_never_given_out_again():
    planner = ReusePlanner()
    _, history = first_turn(planner, (1,))
    history += [user("Is [Doc_4] better?"), assistant("[Doc_3], [Doc_1000001] and [Doc_x2].")]
    plan = later_turn(planner, (5, 6), history)
    assert list(plan.labels) == ["[Doc_1]", "[Doc_5]", "[Doc_6]"]


def test_a_foreign_history_without_our_record_has_no_references_and_no_colliding_labels():
    planner = ReusePlanner()
    _, history = first_turn(planner, (1, 2))
    for conversation_id in (None, "other", 0):
        plan = later_turn(planner, (1, 3), history, conversation_id=conversation_id)
        assert plan.content == "[Doc_3] text of 1\n\n[Doc_4] text of 3\n\nThen?"


def test_a_forgotten_conversation_costs_reuse_and_never_content():
    planner = ReusePlanner()
    _, history = first_turn(planner, (1, 2))
    assert planner.end_conversation("c") is True
    assert planner.end_conversation("c") is False
    again = later_turn(planner, (1, 3), history)
    assert again.content == "[Doc_3] text of 1\n\n[Doc_4] text of 3\n\nThen?"
    history = [*again.messages(), assistant("Yes.")]
    assert later_turn(planner, (2, 1), history).content == (
        f"[Doc_5] text of 2\n\n{location_words(3)}\n\nThen?"
    )


def test_conversations_are_told_apart_by_tenant_and_by_the_type_of_their_id():
    planner = ReusePlanner()
    _, history = first_turn(planner, (1,), conversation_id=1, tenant="a")
    asked = [(1, "a"), ("1", "a"), (1, "b"), (1, "")]
    assert [
        later_turn(planner, (1,), history, conversation_id=name, tenant=tenant).references
        for name, tenant in asked
    ] == [(1,), (), (), ()]


def test_a_turn_that_is_planned_again_has_the_same_messages():
    planner = ReusePlanner()
    planner.plan(big_request((1, 2, 3)))
    asked = big_request((3, 2, 4), "Why?", history=[], conversation_id="c")
    first = planner.plan(asked)
    assert sent_ids(first) == [3, 2, 4]
    assert planner.plan(asked).messages() == first.messages()

    history = [*first.messages(), assistant("Yes.")]
    asked = big_request((5, 3), "And?", history=history, conversation_id="c")
    second = planner.plan(asked)
    again = planner.plan(asked)
    assert without_id(again) == without_id(second)
    assert again.messages() == second.messages()


def test_a_label_names_the_block_that_was_sent_under_it_even_after_a_turn_was_replaced():
    planner = ReusePlanner()
    short, long = ContextBlock(id="a", text="foo"), ContextBlock(id="b", text="foo\nbar")
    planner.plan(ContextRequest([short], "?", history=[], conversation_id="c"))
    sent = planner.plan(ContextRequest([long], "?", history=[], conversation_id="c"))
    plan = planner.plan(ContextRequest([long], "?", history=sent.messages(), conversation_id="c"))
    assert (plan.references, plan.labels) == (("b",), {"[Doc_1]": "b"})


def test_a_label_names_the_last_block_sent_under_it_where_a_replaced_one_had_the_same_text():
    planner = ReusePlanner()
    old, new = ContextBlock(id="a", text="foo"), ContextBlock(id="b", text="foo")
    planner.plan(ContextRequest([old], "?", history=[], conversation_id="c"))
    sent = planner.plan(ContextRequest([new], "?", history=[], conversation_id="c"))
    plan = planner.plan(ContextRequest([new], "?", history=sent.messages(), conversation_id="c"))
    assert (plan.references, plan.labels) == (("b",), {"[Doc_1]": "b"})


def test_deduplication_can_be_switched_off():
    planner = ReusePlanner(deduplicate=False)
    _, history = first_turn(planner, (1, 2))
    plan = later_turn(planner, (2, 3), history)
    assert plan.content == "[Doc_3] text of 2\n\n[Doc_4] text of 3\n\nThen?"


@pytest.mark.parametrize("default", [True, False])
@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("deduplicate", [None, True, False])
def test_one_call_may_leave_out_repeated_blocks_or_not(default, batch, strategy, deduplicate):
    planner = ReusePlanner(deduplicate=default)
    _, history = first_turn(planner, (1, 2))
    asked = request((2, 3, 1), "Then?", history=history, conversation_id="c")
    options = {} if deduplicate is None else {"deduplicate": deduplicate}
    if batch:
        plans = planner.plan_batch([asked, request((7,))], strategy, **options).in_input_order()
        assert sent_ids(plans[1]) == [7]
    else:
        plans = [planner.plan(asked, strategy, **options)]
    assert_keeps_the_promises(plans[0])
    if default if deduplicate is None else deduplicate:
        assert plans[0].references == (2, 1)
        assert plans[0].content == (
            f"{location_words(2)}\n\n[Doc_3] text of 3\n\n{location_words(1)}\n\nThen?"
        )
    else:
        assert plans[0].references == ()
        assert plans[0].content == (
            "[Doc_3] text of 2\n\n[Doc_4] text of 3\n\n[Doc_5] text of 1\n\nThen?"
        )
        assert plans[0].labels == {
            "[Doc_1]": 1,
            "[Doc_2]": 2,
            "[Doc_3]": 2,
            "[Doc_4]": 3,
            "[Doc_5]": 1,
        }


def test_a_call_that_repeats_blocks_changes_nothing_for_the_next_one():
    planner = ReusePlanner()
    _, history = first_turn(planner, (1, 2))
    asked = request((2, 1), "Then?", history=history, conversation_id="c")
    repeated = planner.plan(asked, deduplicate=False)
    assert (sent_ids(repeated), repeated.references) == ([2, 1], ())
    assert planner.plan(asked).references == (2, 1)
    assert later_turn(planner, (1, 2), [*repeated.messages(), assistant("Yes.")]).references == (
        1,
        2,
    )


@all_strategies
def test_without_a_history_there_is_nothing_to_leave_out_either_way(strategy):
    asked = [big_request(ids, "?") for ids in ((1, 2), (2, 1, 3), (3, 1))]
    plans = [
        [planner.plan(one, strategy, deduplicate=deduplicate).messages() for one in asked]
        for planner, deduplicate in ((ReusePlanner(), True), (ReusePlanner(), False))
    ]
    assert plans[0] == plans[1]
    batches = [
        ReusePlanner().plan_batch(asked, strategy, deduplicate=deduplicate)
        for deduplicate in (None, True, False)
    ]
    assert batches[0] == batches[1] == batches[2]


@pytest.mark.parametrize(
    "templates",
    [
        Templates(label="<{ordinal}>", block="{label}: {text};", location="See {label}."),
        Templates(label="{ordinal}", block="Source {label}\n{text}\n---", separator="\n"),
        Templates(separator=" | "),
    ],
    ids=["marks", "lines", "one line"],
)
def test_references_work_with_other_templates(templates):
    planner = ReusePlanner(templates=templates)
    first, history = first_turn(planner, (1, 2))
    label_1, label_2 = first.labels
    plan = later_turn(planner, (2, 3, 1), history)
    assert plan.references == (2, 1)
    assert plan.location_annotations == (
        templates.location_annotation(label_2),
        templates.location_annotation(label_1),
    )
    assert plan.labels == {label_1: 1, label_2: 2, templates.block_label(3): 3}


# batches


@all_strategies
def test_an_empty_batch_has_no_plans(strategy):
    assert ReusePlanner().plan_batch([], strategy) == BatchPlan((), ())


@all_strategies
def test_a_batch_may_be_any_iterable_and_its_order_is_a_permutation(strategy):
    contexts = [(1, 2), (3,), (2, 4), (), (3, 5), (2, 1)]
    batch = ReusePlanner().plan_batch((big_request(ids) for ids in contexts), strategy)
    assert sorted(batch.order) == list(range(6))
    for position, plan in zip(batch.order, batch.plans, strict=True):
        assert plan.request == big_request(contexts[position])
    assert [plan.request for plan in batch.in_input_order()] == [*map(big_request, contexts)]


def test_strategy_none_runs_a_batch_as_it_is():
    batch = ReusePlanner().plan_batch([big_request(ids) for ids in ((2, 1), (3,), (1, 2))], "none")
    assert batch.order == (0, 1, 2)
    assert [sent_ids(plan) for plan in batch.plans] == [[2, 1], [3], [1, 2]]


@pytest.mark.parametrize("strategy", ["reuse", "paper"])
def test_requests_that_share_a_prefix_run_back_to_back(strategy):
    contexts = [(1, 2), (7, 8), (2, 1), (9,), (8, 7), (3, 2, 1)]
    batch = ReusePlanner().plan_batch([big_request(ids) for ids in contexts], strategy)
    orders = [sent_ids(plan) for plan in batch.plans]
    assert sorted(orders[:3]) == [[1, 2], [1, 2], [1, 2, 3]]
    assert orders[3:] == [[7, 8], [7, 8], [9]]
    assert sum(plan.expected_cached_tokens for plan in batch.plans) == 600


def test_a_batch_goes_behind_what_is_cached_already():
    planner = ReusePlanner()
    planner.plan(big_request((1, 2)))
    batch = planner.plan_batch([big_request(ids) for ids in ((3, 4, 1), (4, 3, 2, 1), (5, 3, 4))])
    assert [sent_ids(plan) for plan in batch.in_input_order()] == [
        [1, 3, 4],
        [1, 2, 4, 3],
        [5, 3, 4],
    ]
    assert [plan.expected_cached_tokens for plan in batch.in_input_order()] == [100, 200, 0]


@pytest.mark.parametrize("strategy", ["reuse", "paper"])
def test_a_batch_shares_nothing_across_tenants_and_system_texts(strategy):
    groups = [("", None), ("t", None), ("", "Be brief."), ("", None), ("t", None)]
    requests = [big_request((1, 2), tenant=tenant, system=system) for tenant, system in groups]
    batch = ReusePlanner().plan_batch(requests, strategy)
    assert batch.order == (0, 3, 1, 4, 2)
    assert [plan.expected_cached_tokens for plan in batch.plans] == [0, 200, 0, 200, 0]


@all_strategies
def test_turns_of_one_conversation_keep_their_order_in_a_batch(strategy):
    planner = ReusePlanner()
    turns = [
        big_request((1,), "1", history=[], conversation_id="c"),
        big_request((9,), "x"),
        big_request((2,), "2", history=[user("1"), assistant("")], conversation_id="c"),
        big_request((9, 8), "y"),
        big_request((1, 8), "3", history=[user("2"), assistant("")], conversation_id="c"),
        big_request((8,), "late", history=[user("Hello.")], conversation_id="d"),
    ]
    batch = planner.plan_batch(turns, strategy)
    queries = [plan.request.query for plan in batch.plans]
    assert sorted(queries) == ["1", "2", "3", "late", "x", "y"]
    assert [query for query in queries if query in "123"] == ["1", "2", "3"]
    assert sorted(batch.order) == [0, 1, 2, 3, 4, 5]


@all_strategies
def test_a_conversations_turns_keep_their_order_where_a_larger_group_runs_first(strategy):
    batch = ReusePlanner().plan_batch(
        [
            big_request((1,), "1", history=[], conversation_id="c"),
            big_request((9,), "2", history=[], conversation_id="c"),
            *[big_request((9, 8), "x")] * 3,
            big_request((1,), "3", history=[user("Hello.")], conversation_id="c"),
        ],
        strategy,
    )
    queries = [plan.request.query for plan in batch.plans]
    assert [query for query in queries if query != "x"] == ["1", "2", "3"]
    assert sorted(queries) == ["1", "2", "3", "x", "x", "x"]


def test_a_later_turn_in_a_batch_refers_to_what_its_history_shows():
    planner = ReusePlanner()
    _, history = first_turn(planner, (1, 2))
    batch = planner.plan_batch(
        [request((5, 6)), request((2, 5), "Then?", history=history, conversation_id="c")]
    )
    assert batch.order == (0, 1)
    assert batch.plans[1].content == f"{location_words(2)}\n\n[Doc_3] text of 5\n\nThen?"


@all_strategies
def test_an_odd_request_is_planned_at_every_position_of_a_batch(strategy):
    odd = [
        ContextRequest([]),
        ContextRequest([""]),
        ContextRequest(["x"] * 3),
        ContextRequest(ODD_TEXTS),
        ContextRequest([ContextBlock(id=name, text="same") for name in (*ODD_IDS, 10**5000)]),
        ContextRequest([ContextBlock(id=1, text=text, tokens=0) for text in ODD_TEXTS]),
        ContextRequest([], history=[]),
        ContextRequest(["x"], history=[user("[Doc_1] x")], conversation_id=1),
    ]
    plain = [request(ids) for ids in ((1, 2), (2, 1, 3), (4,))]
    for one in odd:
        for position in range(4):
            requests = [*plain[:position], one, *plain[position:]]
            batch = ReusePlanner().plan_batch(requests, strategy)
            assert [plan.request for plan in batch.in_input_order()] == requests
            for plan in batch.plans:
                assert_keeps_the_promises(plan)


@all_strategies
def test_token_counts_of_any_size_are_planned(strategy):
    huge = [ContextBlock(id=i, text=f"text {i}", tokens=10**30 + i) for i in range(4)]
    contexts = [[huge[i] for i in ids] for ids in ((0, 1, 2), (2, 1), (3, 0), (1, 2, 3))]
    planner = ReusePlanner()
    for plan in planner.plan_batch([ContextRequest(blocks) for blocks in contexts], strategy).plans:
        assert_keeps_the_promises(plan)
    assert sent_ids(planner.plan(ContextRequest(huge), "none")) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "contexts",
    [
        [(3 * i, 3 * i + 1, 3 * i + 2) for i in range(5000)],
        [(1, 2, 3)] * 5000,
        [(i + 1, 0, -i - 1) for i in range(5000)],
        [range(i, i + 3) for i in range(5000)],
        [range(i) for i in range(0, 300, 3)],
        [range(5000), range(5000, 0, -1)],
    ],
    ids=["disjoint", "identical", "one shared", "a chain", "nested", "long"],
)
def test_extreme_batches_are_planned_without_trouble(contexts):
    blocks = {i: block(i, 20) for context in contexts for i in context}
    requests = [ContextRequest([blocks[i] for i in context]) for context in contexts]
    planner = ReusePlanner()
    batch = planner.plan_batch(requests)
    assert sorted(batch.order) == list(range(len(contexts)))
    for plan in batch.plans:
        assert sorted(sent_ids(plan)) == sorted(set(sent_ids(plan)))
        assert set(plan.blocks) == set(plan.request.blocks)
    assert planner.plan(requests[0]).expected_cached_tokens == 20 * len(contexts[0])


# evictions and bounds


def test_an_evicted_request_is_no_longer_expected_in_the_cache():
    planner = ReusePlanner()
    planner.plan(big_request((1, 2, 3), request_id="a"))
    planner.plan(big_request((1, 2, 4), request_id="b"))
    assert planner.statistics() == IndexStatistics(nodes=3, tokens=400, requests=2)

    assert planner.evict(["a", "ghost", 7, "ghost"]) == Evicted(1, 100, ("ghost", 7))
    assert planner.plan(big_request((3, 2, 1)), "none").expected_cached_tokens == 0
    assert sent_ids(planner.plan(big_request((2, 1)))) == [1, 2]
    assert planner.evict(["a"]) == Evicted(0, 0, ("a",))
    assert planner.evict([]) == Evicted(0, 0, ())


def test_evicting_everything_leaves_an_empty_index():
    planner = ReusePlanner()
    plans = [planner.plan(big_request(ids, tenant=str(len(ids)))) for ids in ((1,), (1, 2), (1, 3))]
    assert planner.evict(plan.request_id for plan in plans) == Evicted(3, 400, ())
    assert planner.statistics() == IndexStatistics(0, 0, 0)
    assert planner.plan(big_request((1, 2))).expected_cached_tokens == 0


def test_a_request_id_that_is_used_again_stands_for_what_was_sent_last():
    planner = ReusePlanner()
    planner.plan(big_request((1,), request_id="a"))
    planner.plan(big_request((2,), request_id="a"))
    assert planner.evict(["a"]).requests == 1
    assert planner.plan(big_request((2,))).expected_cached_tokens == 0


def test_a_trimmed_request_is_expected_in_the_cache_up_to_the_cut():
    planner = ReusePlanner()
    planner.plan(big_request((1, 2, 3), request_id="a"))
    planner.plan(big_request((1, 2, 4), request_id="b", tenant="t"))
    assert planner.trim("a", 3) == Evicted(1, 0, ())
    assert planner.trim("a", 1) == Evicted(1, 200, ())
    assert planner.plan(big_request((1, 2, 3)), "none").expected_cached_tokens == 100
    assert planner.plan(big_request((1, 2, 4), tenant="t"), "none").expected_cached_tokens == 300
    assert planner.trim("ghost", 1) == Evicted(0, 0, ("ghost",))
    with pytest.raises(InvalidRequestError, match="blocks must be an integer from 0, not -1"):
        planner.trim("a", -1)


def test_the_tokens_of_blocks_are_those_that_the_index_counts():
    planner = ReusePlanner(token_counter=lambda text: len(text))
    blocks = [ContextBlock(text=""), ContextBlock(text="abc"), ContextBlock(text="d", tokens=9)]
    assert planner.block_tokens(blocks[:2]) == 1 + 3  # a block without text still has a label
    assert planner.block_tokens(blocks[2:]) == 9
    assert planner.block_tokens([]) == 0


def test_token_evictions_take_whole_blocks_from_the_end_of_the_least_recently_used():
    planner = ReusePlanner()
    planner.plan(big_request((1, 2)), "none")
    planner.plan(big_request((3, 4)), "none")
    assert planner.evict_tokens(0) == Evicted(0, 0, ())
    assert planner.evict_tokens(1) == Evicted(0, 100, ())
    assert planner.evict_tokens(150) == Evicted(0, 200, ())
    assert planner.plan(big_request((3, 4)), "none").expected_cached_tokens == 100
    assert planner.evict_tokens(10**9) == Evicted(0, 200, ())
    assert planner.statistics() == IndexStatistics(0, 0, 0)


def test_token_evictions_take_from_all_tenants_for_the_engines_cache_is_one():
    planner = ReusePlanner()
    planner.plan(big_request((1,), tenant="a"))
    planner.plan(big_request((1,), tenant="b"))
    planner.plan(big_request((2,), tenant="a"))
    assert planner.evict_tokens(200) == Evicted(0, 200, ())
    cached = [
        planner.plan(big_request((1, 2), tenant=tenant), "none").expected_cached_tokens
        for tenant in ("a", "b")
    ]
    assert cached == [0, 0]
    assert planner.statistics().tokens == 500


def test_a_request_that_lost_its_last_blocks_can_still_be_evicted():
    planner = ReusePlanner()
    planner.plan(big_request((1, 2, 3), request_id="a"))
    planner.plan(big_request((1, 2, 4), request_id="b"))
    assert planner.evict_tokens(200) == Evicted(0, 200, ())
    assert planner.statistics().tokens == 200
    planner.evict(["a", "b"])
    assert planner.statistics() == IndexStatistics(0, 0, 0)
    assert planner.plan(big_request((1, 2))).expected_cached_tokens == 0


def test_a_planner_with_a_capacity_forgets_the_least_recently_used():
    planner = ReusePlanner(capacity_tokens=400)
    for ids in ((1, 2), (3, 4), (5,)):
        planner.plan(big_request(ids))
    assert planner.statistics().tokens == 400
    assert sent_ids(planner.plan(big_request((2, 1), system="other"))) == [2, 1]
    assert planner.statistics().tokens == 400
    assert planner.plan(big_request((3, 4)), "none").expected_cached_tokens == 100


def test_a_later_turn_keeps_its_conversations_first_turn_in_the_cache():
    planner = ReusePlanner(capacity_tokens=500)
    plan = planner.plan(big_request((1, 2), history=[], conversation_id="c"))
    planner.plan(big_request((3, 4)))
    planner.plan(big_request((5,), history=plan.messages(), conversation_id="c"))
    planner.plan(big_request((6,)))
    assert planner.statistics().tokens == 500
    assert planner.plan(big_request((1, 2)), "none").expected_cached_tokens == 200
    assert planner.plan(big_request((3, 4)), "none").expected_cached_tokens == 100


@all_strategies
def test_a_capacity_of_zero_expects_nothing(strategy):
    planner = ReusePlanner(capacity_tokens=0)
    for _ in range(2):
        plan = planner.plan(big_request((1, 2), history=[], conversation_id="c"), strategy)
        assert plan.expected_cached_tokens == 0
    later = big_request((1, 2), history=plan.messages(), conversation_id="c")
    assert planner.plan(later, strategy).references == (1, 2)
    assert planner.statistics().tokens == 0


def test_a_conversation_goes_on_after_its_turns_were_evicted():
    planner = ReusePlanner()
    plan, history = first_turn(planner, (1, 2))
    planner.evict([plan.request_id])
    assert later_turn(planner, (2, 3), history).content == (
        f"{location_words(2)}\n\n[Doc_3] text of 3\n\nThen?"
    )
    planner.evict_tokens(10**6)
    assert planner.statistics().tokens == 0


# what is expected in the cache, without planning


some_ids = st.lists(st.integers(0, 6), max_size=5, unique=True)
some_systems = st.sampled_from((None, "Be brief."))


@settings(max_examples=100)
@given(st.lists(st.tuples(some_ids, some_systems), max_size=6), some_ids, some_systems)
def test_cached_tokens_are_those_that_planning_finds_and_recording_none(sent, asked, system):
    planner, twin = ReusePlanner(), ReusePlanner()
    for ids, its_system in sent:
        for one in (planner, twin):
            one.plan(big_request(ids, system=its_system), "none")
    new = big_request(asked, system=system)
    before = planner.statistics()
    best, in_order = planner.cached_tokens(new), planner.cached_tokens(new, in_order=True)
    assert planner.cached_tokens(new) == best >= in_order
    assert planner.statistics() == before
    plan = planner.plan(new, "none")
    assert plan == twin.plan(new, "none")  # asking has changed nothing
    assert plan.expected_cached_tokens == in_order
    assert twin.cached_tokens(new, in_order=True) == 100 * len(asked)


def test_cached_tokens_count_the_best_order_or_the_one_given():
    planner = ReusePlanner()
    planner.plan(big_request((1, 2, 3)))
    reordered = big_request((2, 9, 1))
    assert planner.cached_tokens(reordered) == 200
    assert planner.cached_tokens(reordered, in_order=True) == 0
    assert planner.cached_tokens(big_request((1, 9, 2)), in_order=True) == 100
    assert planner.cached_tokens(big_request((1, 2, 3, 1)), in_order=True) == 300
    assert planner.cached_tokens(big_request(())) == 0


def test_cached_tokens_are_none_for_another_tenant_or_system_text_and_make_nobody_known():
    planner = ReusePlanner()
    planner.plan(big_request((1, 2), tenant="a", system="s"))
    for other in (big_request((1, 2), system="s"), big_request((1, 2), tenant="a")):
        assert planner.cached_tokens(other) == planner.cached_tokens(other, in_order=True) == 0
    assert list(planner._planning._tenants._states) == ["a"]
    assert planner.cached_tokens(big_request((2, 1), tenant="a", system="s")) == 200


def test_a_later_turn_has_no_cached_tokens_and_a_first_one_has():
    planner = ReusePlanner()
    planner.plan(big_request((1, 2)))
    assert planner.cached_tokens(big_request((1, 2), history=[], conversation_id="c")) == 200
    later = big_request((1, 2), history=[user("Hello.")], conversation_id="c")
    assert planner.cached_tokens(later) == planner.cached_tokens(later, in_order=True) == 0


def test_evicted_blocks_are_no_cached_tokens():
    planner = ReusePlanner()
    plan = planner.plan(big_request((1, 2)))
    planner.trim(plan.request_id, 1)
    assert planner.cached_tokens(big_request((1, 2))) == 100
    planner.evict([plan.request_id])
    assert planner.cached_tokens(big_request((1, 2))) == 0


def test_cached_tokens_are_of_a_request():
    with pytest.raises(InvalidRequestError) as caught:
        ReusePlanner().cached_tokens(["text"])
    assert str(caught.value) == (
        "a request must be a ContextRequest, not ['text'] (list); "
        "build one with ContextRequest(blocks=[...], query='...')"
    )


# counting


def test_a_text_is_counted_as_blocks_are():
    assert ReusePlanner().count_tokens("12345678") == 2  # estimated
    assert ReusePlanner(token_counter=len).count_tokens("12345678") == 8
    with pytest.raises(InvalidRequestError, match="it must return an integer from 0"):
        ReusePlanner(token_counter=lambda text: -1).count_tokens("a")


def test_a_planner_says_whether_it_counts_or_estimates():
    estimating, counting = ReusePlanner(), ReusePlanner(token_counter=len)
    assert not estimating.counts_tokens
    assert counting.counts_tokens
    for _ in range(2):
        estimating, counting = estimating.sibling(), counting.sibling()
        assert not estimating.counts_tokens
        assert counting.counts_tokens


def test_a_counter_is_never_asked_by_two_threads_at_a_time():
    busy, clashes = threading.Lock(), []

    def count(text):
        if not busy.acquire(blocking=False):
            clashes.append(text)
            return 1
        threading.Event().wait(0.0005)
        busy.release()
        return 1

    planner = ReusePlanner(token_counter=count)
    threads = [
        threading.Thread(target=planner.count_tokens, args=(f"text {n}",)) for n in range(4)
    ] + [threading.Thread(target=planner.plan, args=(request((n,)),)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clashes == []


# siblings


def test_a_sibling_has_the_same_settings_and_has_seen_nothing():
    templates = Templates(order_position="after_question")
    planner = ReusePlanner(
        0.5,
        len,
        1_000,
        templates=templates,
        deduplicate=False,
        annotate=False,
        trim_overlaps=True,
    )
    planner.plan(big_request((1, 2)))
    sibling = planner.sibling()
    assert sibling.statistics() == IndexStatistics(0, 0, 0)
    assert sibling.templates is templates
    assert sibling.count_tokens("four") == 4
    settings = [dataclasses.replace(one._settings, count_tokens=len) for one in (planner, sibling)]
    assert settings[0] == settings[1]
    assert dataclasses.asdict(settings[1]) | {"templates": templates} == {
        "alpha": 0.5,
        "count_tokens": len,
        "capacity_tokens": 1_000,
        "templates": templates,
        "deduplicate": False,
        "annotate": False,
        "trim_overlaps": True,
    }
    assert planner._mode == sibling._mode == "active"


def test_siblings_do_not_learn_from_each_other():
    planner = ReusePlanner()
    planner.plan(big_request((1, 2)))
    sibling = planner.sibling()
    plan = sibling.plan(big_request((2, 1)))
    assert (sent_ids(plan), plan.expected_cached_tokens, plan.request_id) == (
        [2, 1],
        0,
        "request-0",
    )
    assert planner.cached_tokens(big_request((2, 1)), in_order=True) == 0


def test_a_planner_that_annotates_nothing_reorders_without_a_word():
    planner = ReusePlanner(annotate=False)
    planner.plan(big_request((1, 2)))
    plan = planner.plan(big_request((2, 1), "Why?"))
    assert plan.order_annotation is None
    assert plan.content == "[Doc_1] text of 1\n\n[Doc_2] text of 2\n\nWhy?"
    batch = planner.plan_batch([big_request((2, 1)), big_request((2, 1, 3))])
    assert [one.order_annotation for one in batch.plans] == [None, None]
    assert [sent_ids(one)[:2] for one in batch.plans] == [[1, 2], [1, 2]]


def test_a_planner_that_annotates_nothing_still_refers_to_what_was_shown():
    planner = ReusePlanner(annotate=False)
    _, history = first_turn(planner, (1,))
    plan = later_turn(planner, (1, 2), history)
    assert plan.references == (1,)
    assert plan.location_annotations == (location_words(1),)


# errors


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda planner: planner.plan({"blocks": []}),
            "a request must be a ContextRequest, not {'blocks': []} (dict); "
            "build one with ContextRequest(blocks=[...], query='...')",
        ),
        (
            lambda planner: planner.plan_batch([request((1,)), None]),
            "a request at position 1 must be a ContextRequest, not None (NoneType); "
            "build one with ContextRequest(blocks=[...], query='...')",
        ),
        (
            lambda planner: planner.plan_batch(7),
            "requests must be a list of ContextRequest, not 7 (int); use plan() for a single one",
        ),
        (
            lambda planner: planner.evict("request-1"),
            "request_ids must be a list of ids, not 'request-1' (str)",
        ),
        (
            lambda planner: planner.evict(None),
            "request_ids must be a list of ids, not None (NoneType)",
        ),
        (
            lambda planner: planner.evict_tokens(-1),
            "tokens must be an integer from 0, not -1 (int)",
        ),
        (
            lambda planner: planner.evict_tokens(1.5),
            "tokens must be an integer from 0, not 1.5 (float)",
        ),
        (
            lambda planner: ReusePlanner(alpha=float("nan")),
            "alpha must be a number from 0, not nan (float)",
        ),
        (
            lambda planner: ReusePlanner(capacity_tokens=-1),
            "capacity_tokens must be an integer from 0 or None, not -1 (int)",
        ),
        (
            lambda planner: ReusePlanner(templates={}),
            "templates must be ctxreuse.Templates, not {} (dict)",
        ),
        (
            lambda planner: ReusePlanner(token_counter=4),
            "token_counter must be a function or a tokenizer, not 4 (int)",
        ),
    ],
)
def test_errors_name_the_value_and_the_remedy(call, message):
    planner = ReusePlanner()
    with pytest.raises(InvalidRequestError) as caught:
        call(planner)
    assert str(caught.value) == message
    assert planner.statistics() == IndexStatistics(0, 0, 0)


def test_a_single_request_is_no_batch():
    with pytest.raises(InvalidRequestError, match=r"use plan\(\) for a single one$"):
        ReusePlanner().plan_batch(request((1,)))


def test_an_id_that_cannot_be_one_is_unknown_or_refused_by_name():
    with pytest.raises(InvalidRequestError, match=r"not \['a'\] \(list\)"):
        ReusePlanner().evict([["a"]])


@pytest.mark.parametrize("strategy", ["Reuse", "", None, 1, ["reuse"]])
def test_an_unknown_strategy_is_refused(strategy):
    planner = ReusePlanner()
    for call in (
        lambda: planner.plan(request((1,)), strategy=strategy),
        lambda: planner.plan_batch([request((1,))], strategy=strategy),
    ):
        with pytest.raises(UnknownStrategyError) as caught:
            call()
        assert str(caught.value) == (
            f"there is no strategy {strategy!r} ({type(strategy).__name__}); "
            "choose one of 'reuse', 'paper', 'none'"
        )


@pytest.mark.parametrize("strategy", ["Reuse", None])
def test_an_unknown_strategy_is_refused_for_an_empty_batch_too(strategy):
    with pytest.raises(UnknownStrategyError):
        ReusePlanner().plan_batch([], strategy=strategy)
