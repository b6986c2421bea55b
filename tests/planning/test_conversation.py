"""Conversations, the histories of later turns, and what of them is expected in the cache."""

import dataclasses
import gc
from functools import partial
from types import FunctionType, ModuleType

import pytest
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st
from planning_helpers import (
    STRATEGIES,
    assert_keeps_the_promises,
    assistant,
    big_request,
    block,
    first_turn,
    later_turn,
    location_words,
    request,
    sent_ids,
    user,
)

from ctxreuse import ContextBlock, ContextRequest, Conversation, Evicted, ReusePlanner
from ctxreuse.errors import ConversationError, InvalidBlockError, InvalidRequestError
from ctxreuse.memory.prefix_index import IndexStatistics

pytestmark = pytest.mark.usefixtures("paper_words")

NO_TEXTS = (None, 7, [{"type": "text", "text": "Yes."}])
SYSTEM = {"role": "system", "content": "Be brief."}


def blocks(*ids):
    return [block(i) for i in ids]


def test_a_conversation_replays_its_messages_byte_for_byte():
    chat = ReusePlanner().conversation("c", system="Be brief.")
    assert isinstance(chat, Conversation)
    assert chat.messages() == [SYSTEM]

    first = chat.plan(blocks(1, 2, 4), query="First?")
    sent = [SYSTEM, user("[Doc_1] text of 1\n\n[Doc_2] text of 2\n\n[Doc_4] text of 4\n\nFirst?")]
    assert first.messages() == chat.messages() == sent
    chat.record("One.")
    sent.append(assistant("One."))
    assert chat.messages() == sent

    second = chat.plan(blocks(1, 5, 2), query="Second?")
    sent.append(user(f"{location_words(1)}\n\n[Doc_5] text of 5\n\n{location_words(2)}\n\nSecond?"))
    assert second.messages() == chat.messages() == sent
    chat.record("Two.")
    sent.append(assistant("Two."))

    third = chat.plan(blocks(5, 6), query="Third?")
    sent.append(user(f"{location_words(5)}\n\n[Doc_6] text of 6\n\nThird?"))
    assert third.messages() == chat.messages() == sent
    assert third.labels == {f"[Doc_{n}]": n for n in (1, 2, 4, 5, 6)}


def test_after_compaction_blocks_that_are_no_longer_shown_are_sent_again():
    chat = ReusePlanner().conversation("c", system="Be brief.")
    chat.plan(blocks(1, 2), "First?")
    chat.record("Yes.")
    chat.compact("They asked about 1 and 2. [Doc_2] matters.\n[Doc_2] text of 2")
    plan = chat.plan(blocks(1, 2), "Second?")
    assert plan.messages() == [
        SYSTEM,
        user("They asked about 1 and 2. [Doc_2] matters.\n[Doc_2] text of 2"),
        user(f"[Doc_1] text of 1\n\n{location_words(2)}\n\nSecond?"),
    ]
    chat.record("Yes.")
    chat.compact("Nothing of note.")
    assert chat.plan(blocks(1, 2), "Third?").content == (
        "[Doc_1] text of 1\n\n[Doc_2] text of 2\n\nThird?"
    )


def test_two_conversations_of_one_name_never_refer_to_each_others_messages(planner):
    one, two = planner.conversation("c"), planner.conversation("c")
    one.plan(blocks(1), "First?")
    two.plan(blocks(2), "First?")
    one.record("Yes.")
    two.record("Yes.")
    assert two.plan(blocks(1, 2)).content == f"[Doc_1] text of 1\n\n{location_words(2)}"
    assert one.plan(blocks(1, 2)).content == f"{location_words(1)}\n\n[Doc_2] text of 2"


def test_recording_without_a_planned_turn_is_an_error():
    chat = ReusePlanner().conversation("c")
    problem = r"^conversation 'c'.* has no turn that waits for an answer; call plan\(\) first$"
    with pytest.raises(ConversationError, match=problem):
        chat.record("Yes.")
    chat.plan([], "Why?")
    chat.record("Yes.")
    with pytest.raises(ConversationError):
        chat.record("Yes.")
    assert chat.messages() == [user("Why?"), assistant("Yes.")]


@pytest.mark.parametrize(
    "act",
    [
        lambda chat: chat.plan("a text", "Why?"),
        lambda chat: chat.plan([1], "Why?"),
        lambda chat: chat.plan(["a text"], None),
        *(partial(Conversation.record, answer=one) for one in NO_TEXTS),
        *(partial(Conversation.compact, summary=one) for one in NO_TEXTS),
    ],
)
def test_what_is_refused_leaves_the_conversation_as_it_was(act):
    chat = ReusePlanner().conversation("c")
    chat.plan(blocks(1), "First?")
    with pytest.raises((InvalidBlockError, InvalidRequestError), match="not"):
        act(chat)
    assert chat.messages() == [user("[Doc_1] text of 1\n\nFirst?")]


def test_a_planner_keeps_no_text_of_documents_or_histories(planner):
    said = [f"Only these words, 7f3a, are looked for: {number}." for number in range(3)]
    history = []
    for text in said:
        request = ContextRequest([ContextBlock(id=text[-2], text=text)], history=history)
        plan = planner.plan(dataclasses.replace(request, conversation_id="c"))
        history = [*history, user(plan.content), assistant("This one.")]
    del history, request, plan
    seen, stack = {}, [planner]
    while stack:
        one = stack.pop()
        assert not (isinstance(one, str) and "7f3a" in one)
        if id(one) not in seen and not isinstance(one, type | ModuleType | FunctionType):
            seen[id(one)] = one
            stack += gc.get_referents(one)
    assert len(seen) > 100


def test_a_block_that_moved_within_the_history_is_found_where_it_stands(planner):
    first_turn(planner, (1, 2))
    moved = [user("So:\n[Doc_2] text of 2"), assistant("Yes."), user("So?\n[Doc_1] text of 1")]
    assert later_turn(planner, (1, 2), moved).references == (1, 2)
    assert later_turn(planner, (1, 2), moved[:2]).references == (2,)
    said = [moved[0], assistant("[Doc_1] text of 1")]
    assert later_turn(planner, (1, 2), said).references == (2,), "an answer shows nothing"


def test_a_history_of_messages_in_parts_is_read_and_sent_as_it_is(planner):
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
        user(f"{location_words(2)}\n\n[Doc_5] text of 5\n\nThen?"),
    ]


def test_conversations_are_told_apart_by_tenant_and_by_the_type_of_their_id(planner):
    _, history = first_turn(planner, (1,), conversation_id=1, tenant="a")
    asked = [(1, "a"), ("1", "a"), (1, "b"), (1, "")]
    requests = [
        ContextRequest([], history=history, conversation_id=name, tenant=tenant)
        for name, tenant in asked
    ]
    recorded = [planner.shown_blocks(request) for request in requests]
    assert [[block.id for block in shown.values()] for shown in recorded] == [[1], [], [], []]


@pytest.mark.parametrize("texts", [("foo", "foo\nbar"), ("foo\nbar", "foo")])
def test_a_label_names_the_block_that_was_sent_under_it_even_after_a_turn_was_replaced(texts):
    planner = ReusePlanner()
    old, new = (ContextBlock(id="a", text=text) for text in texts)
    planner.plan(ContextRequest([old], "?", history=[], conversation_id="c"))
    sent = planner.plan(ContextRequest([new], "?", history=[], conversation_id="c"))
    asked = ContextRequest([new, old], "?", history=sent.messages(), conversation_id="c")
    assert planner.shown_blocks(asked) == {"[Doc_a]": new}
    assert planner.plan(dataclasses.replace(asked, blocks=(new,))).references == ("a",)
    assert planner.plan(asked).blocks == (new, old), "no label of two is referred to"


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
            "[Doc_2] text of 2\n\n[Doc_3] text of 3\n\n[Doc_1] text of 1\n\nThen?"
        )
        assert plans[0].labels == {"[Doc_1]": 1, "[Doc_2]": 2, "[Doc_3]": 3}


def test_an_evicted_request_is_no_longer_expected_in_the_cache(planner):
    planner.plan(big_request((1, 2, 3), request_id="a"))
    planner.plan(big_request((1, 2, 4), request_id="b"))
    assert planner.statistics() == IndexStatistics(nodes=3, tokens=400, requests=2)

    assert planner.evict(["a", "ghost", 7, "ghost"]) == Evicted(1, 100, ("ghost", 7))
    assert planner.plan(big_request((3, 2, 1)), "none").expected_cached_tokens == 0
    assert sent_ids(planner.plan(big_request((2, 1)))) == [1, 2]
    assert planner.evict(["a"]) == Evicted(0, 0, ("a",))
    assert planner.evict([]) == Evicted(0, 0, ())


def test_a_trimmed_request_is_expected_in_the_cache_up_to_the_cut(planner):
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


def test_token_evictions_take_from_all_tenants_for_the_engines_cache_is_one(planner):
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


some_ids = st.lists(st.integers(0, 6), max_size=5, unique=True)
some_systems = st.sampled_from((None, "Be brief."))


@examples(100)
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
