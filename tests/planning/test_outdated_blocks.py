"""Blocks that no longer hold: what is said of them, and how they leave a history."""

from typing import Any

import pytest
from example_counts import examples
from hypothesis import example, given
from hypothesis import strategies as st

from ctxreuse import PAPER_TEMPLATES, ContextBlock, ContextRequest, ReusePlanner, Templates
from ctxreuse.context.rendering import Notice, SentBlock
from ctxreuse.errors import InvalidRequestError

pytestmark = pytest.mark.usefixtures("paper_words")

PORTO = ContextBlock(id="home", text="Alice lives in Porto.")
LISBON = ContextBlock(id="home", text="Alice lives in Lisbon.")
PIN = ContextBlock(id="pin", text="The PIN is 4711.")
CATS = ContextBlock(id="cats", text="Alice has two cats.")


def test_a_changed_block_is_said_to_replace_the_one_before():
    chat = ReusePlanner(templates=PAPER_TEMPLATES).conversation("c")
    porto, lisbon, cats = map(PAPER_TEMPLATES.label_of, (PORTO, LISBON, CATS))
    chat.plan([PORTO, CATS], query="Where?")
    chat.record("In Porto.")
    plan = chat.plan([LISBON], query="And now?", outdated=[PORTO])
    assert plan.content == (
        f"{lisbon} Alice lives in Lisbon.\n\n{lisbon} replaces {porto}.\n\nAnd now?"
    )
    assert plan.labels == {porto: "home", cats: "cats", lisbon: "home"}
    chat.record("In Lisbon.")
    again = chat.plan([LISBON, CATS], query="Sure?", outdated=[PORTO])
    assert again.content == (
        f"Please refer to {lisbon} in the previous conversation.\n\n"
        f"Please refer to {cats} in the previous conversation.\n\nSure?"
    ), "what the history says already is not said again"


def test_a_deleted_block_is_said_to_hold_no_longer_once():
    chat = ReusePlanner().conversation("c")
    chat.plan([PIN, CATS])
    chat.record("Noted.")
    plan = chat.plan([CATS], query="Go on.", outdated=[PIN])
    assert plan.content.startswith("[Doc_pin] no longer holds; do not use it.\n\nPlease refer to")
    chat.record("Yes.")
    assert "no longer" not in chat.plan([CATS], query="On.", outdated=[PIN]).content


def test_what_no_message_shows_is_not_spoken_of():
    plan = ReusePlanner().plan(ContextRequest([CATS], outdated=[PIN]))
    assert plan.content == "[Doc_cats] Alice has two cats."
    chat = ReusePlanner().conversation("c")
    chat.plan([PIN, CATS])
    chat.record("Noted.")
    chat.compact("We spoke of cats.")
    assert "no longer" not in chat.plan([CATS], outdated=[PIN]).content


def test_shown_blocks_are_those_that_really_stand_there(planner):
    chat = planner.conversation("c")
    first = chat.plan([PIN, CATS])
    history = [{"role": "user", "content": first.content.replace("cats", "dogs")}]
    request = ContextRequest((), history=history, conversation_id="c")
    assert planner.shown_blocks(request) == {"[Doc_pin]": PIN}
    assert planner.shown_blocks(ContextRequest((), history=history, tenant="t")) == {}
    with pytest.raises(InvalidRequestError):
        planner.shown_blocks("c")


def test_a_forgotten_block_leaves_the_history(planner):
    chat = planner.conversation("c", "t", "Be brief.")
    chat.plan([PIN, CATS], query="Which?")
    chat.record("The PIN is 4711.")
    chat.plan([PIN, PORTO], query="Which?")
    chat.record("Yes.")
    chat.forget(["pin"])
    first, answer, second, _ = chat.messages()[1:]
    assert first["content"] == "[Doc_pin] (removed)\n\n[Doc_cats] Alice has two cats.\n\nWhich?"
    assert answer["content"] == "The PIN is 4711.", "what the model said stays"
    assert "Please refer to [Doc_pin]" in second["content"]
    plan = chat.plan([CATS, PIN])
    assert [block.id for block in plan.blocks] == ["pin"], "it stands nowhere any more"


def test_of_blocks_of_one_text_and_label_it_is_all_the_same_which_was_shown():
    chat = ReusePlanner(templates=PAPER_TEMPLATES).conversation("c")
    pin, note, last = (ContextBlock(id=name, text=PIN.text) for name in ("pin", "note", "last"))
    chat.plan([pin, note], query="Which?")
    chat.record("Yes.")
    plan = chat.plan([note, last, pin], query="Which?")
    assert (plan.blocks, plan.references) == ((), ("note", "last", "pin"))
    label = PAPER_TEMPLATES.label_of(pin)
    assert plan.content == f"Please refer to {label} in the previous conversation.\n\nWhich?"
    chat.record("Yes.")
    chat.forget(["note"])
    assert PIN.text not in str(chat.messages())


def test_multi_part_messages_are_cleaned_and_the_given_ones_stay(planner):
    chat = planner.conversation("c")
    text = chat.plan([PIN, CATS]).content
    given_messages = [{"role": "user", "content": [{"type": "text", "text": text}, {"type": "x"}]}]
    [cleaned] = planner.without_blocks(given_messages, ["pin"], "c")
    assert "4711" not in str(cleaned)
    assert "4711" in str(given_messages)
    assert planner.without_blocks(given_messages, ["pin"], "c", "other") == given_messages
    with pytest.raises(InvalidRequestError):
        planner.without_blocks(given_messages, "pin", "c")


def test_a_history_that_takes_too_much_work_is_not_called_clean(planner):
    chat = planner.conversation("c")
    text = "x" * 100_000
    label = "[Doc_pin] "
    chat.plan([ContextBlock(id="pin", text=text)])
    messages = [{"role": "user", "content": f"{label}{text[:-1]}y\n\n" * 40 + label + text}]
    assert "x" * 99_000 in planner.without_blocks(messages, ["other"], "c")[0]["content"]
    one_letter = [{"role": "user", "content": "[Doc_x] x\n\n" * 200_000}]
    records = planner.conversation("d")
    for n in range(300):
        records.plan([ContextBlock(id="x", text="x" * (n + 1))])
    with pytest.raises(InvalidRequestError, match="too many labels"):
        planner.without_blocks(one_letter, ["pin"], "d")


versions = st.dictionaries(st.integers(0, 3), st.integers(0, 2), max_size=4)


@examples(60)
@example([{0: 0}, {}, {0: 0}], False)
@given(st.lists(versions, min_size=1, max_size=6), st.booleans())
def test_the_last_word_on_each_block_is_what_the_store_says(stores, words_are_own):
    own = Templates(replaced="<{label}> instead of <{old}>!", withdrawn="Ignore {old}.")
    planner = ReusePlanner(templates=own if words_are_own else Templates())
    chat = planner.conversation("c")
    holds: dict[str, Any] = {}
    for store in stores:
        blocks = [ContextBlock(id=n, text=f"Fact {n} is {v}.") for n, v in store.items()]
        history = [message for message in chat.messages() if message["role"] != "system"]
        shown = planner.shown_blocks(ContextRequest((), history=history, conversation_id="c"))
        keys = {block.key for block in blocks}
        plan = chat.plan(blocks, outdated=[one for one in shown.values() if one.key not in keys])
        chat.record("Yes.")
        for part in plan.parts:
            if isinstance(part, SentBlock):
                holds[part.label] = part.block
            elif isinstance(part, Notice):
                del holds[part.label]
        assert {block.key for block in holds.values()} == keys
        assert len(plan.blocks) + len(plan.references) == len(blocks)
