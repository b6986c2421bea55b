import dataclasses
import gc
from functools import partial
from types import FunctionType, ModuleType

import pytest
from planning_helpers import assistant, block, location_words, user

from ctxreuse import ContextBlock, ContextRequest, Conversation, ReusePlanner
from ctxreuse.errors import ConversationError, InvalidBlockError, InvalidRequestError

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
    sent = [
        SYSTEM,
        user("[Doc_1] text of 1\n\n[Doc_2] text of 2\n\n[Doc_4] text of 4\n\nFirst?"),
    ]
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


def test_a_turn_carries_its_request_id_tenant_and_conversation():
    chat = ReusePlanner().conversation("c", "t", "Be brief.")
    plan = chat.plan(["a text"], "Why?", request_id="engine-1")
    assert plan.request_id == "engine-1"
    asked = plan.request
    assert (asked.tenant, asked.conversation_id, asked.system) == ("t", "c", "Be brief.")
    assert asked.history == ()


def test_the_messages_that_were_handed_out_are_copies():
    chat = ReusePlanner().conversation("c")
    chat.plan(blocks(1), "First?")
    chat.record("Yes.")
    messages = chat.messages()
    messages[0]["content"] = "changed"
    messages.clear()
    assert chat.messages() == [user("[Doc_1] text of 1\n\nFirst?"), assistant("Yes.")]


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


def test_a_conversation_id_of_any_size_is_legal_in_errors_too():
    with pytest.raises(ConversationError, match="call plan"):
        ReusePlanner().conversation(10**5000).record("Yes.")


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
