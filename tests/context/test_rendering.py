import copy
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.documents import Document

from ctxreuse import ContextRequest, ReusePlanner
from ctxreuse.cache.prompt_ends import character_ends
from ctxreuse.context.blocks import ContextBlock
from ctxreuse.context.content_parts import joined, turn_parts
from ctxreuse.context.rendering import (
    DEFAULT_TEMPLATES,
    Reference,
    SentBlock,
    Templates,
    message_texts,
    render_block,
    render_messages,
)
from langchain_ctxreuse import format_context

PARTS = (
    SentBlock("[Doc_3]", ContextBlock(id="a", text="first")),
    Reference("[Doc_1]", "b", "See [Doc_1]."),
    SentBlock("[Doc_4]", ContextBlock(id="c", text="second")),
)


def rendered(*turn):
    return joined(turn_parts(*turn))


def test_a_turn_is_blocks_and_references_then_annotation_and_question_in_either_order():
    assert rendered(PARTS, "Order.", "Why?", DEFAULT_TEMPLATES) == (
        "[Doc_3] first\n\nSee [Doc_1].\n\n[Doc_4] second\n\nOrder.\n\nWhy?"
    )
    words = Templates(order_position="after_question", separator="\n---\n")
    assert rendered(PARTS, "Order.", "Why?", words) == (
        "[Doc_3] first\n---\nSee [Doc_1].\n---\n[Doc_4] second\n---\nWhy?\n---\nOrder."
    )


@pytest.mark.parametrize(
    ("parts", "annotation", "query", "content"),
    [
        (PARTS[:1], None, "", "[Doc_3] first"),
        (PARTS[:1], "Order.", "", "[Doc_3] first\n\nOrder."),
        ((), None, "Why?", "Why?"),
        ((), None, "", ""),
    ],
)
def test_nothing_stands_for_what_is_not_there(parts, annotation, query, content):
    assert rendered(parts, annotation, query, DEFAULT_TEMPLATES) == content


@pytest.mark.parametrize("texts", [[""], ["", "one", "", "", "two", ""], ["one", ""]])
def test_blocks_with_empty_text_send_no_blank_lines(texts):
    said = [one for one in texts if one]
    plan = ReusePlanner().plan(
        ContextRequest([ContextBlock(id=n, text=one) for n, one in enumerate(texts)], "Why?")
    )
    assert plan.content == "\n\n".join([*said, "Why?"])
    [message] = plan.body()["messages"]
    assert "".join(part["text"] for part in message["content"]) == plan.content
    ends = [plan.content.find(one.text) + len(one.text) for one in plan.blocks if one.text]
    assert [
        end for end, one in zip(character_ends(plan), plan.blocks, strict=True) if one.text
    ] == ends
    documents = [Document(page_content=one) for one in texts]
    assert format_context(documents) == "\n\n".join(said)


@given(st.text(), st.sampled_from(["[Doc_1]", "{text}", ""]))
def test_a_blocks_text_stands_between_its_words_unaltered(text, label):
    words = Templates(block="<{label}>{text}</>")
    assert render_block(label, text, words) == f"<{label}>" + text + "</>"


def test_messages_are_system_then_history_then_this_turn():
    history = [
        {"role": "user", "content": [{"type": "text", "text": "Look."}], "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
    ]
    before = copy.deepcopy(history)
    messages = render_messages("Be brief.", history, "Why?")
    assert messages == [
        {"role": "system", "content": "Be brief."},
        *before,
        {"role": "user", "content": "Why?"},
    ]
    messages[1]["content"].append({"type": "text", "text": "More."})
    messages[2]["tool_calls"][0]["id"] = "2"
    assert history == before


@pytest.mark.parametrize(
    ("system", "history", "content", "messages"),
    [
        (None, None, None, []),
        (None, [], "", [{"role": "user", "content": ""}]),
        ("", None, None, [{"role": "system", "content": ""}]),
    ],
)
def test_only_what_is_none_is_left_out_of_the_messages(system, history, content, messages):
    assert render_messages(system, history, content) == messages


@pytest.mark.parametrize(
    ("message", "texts"),
    [
        ({"role": "user", "content": "one"}, ["one"]),
        ({"role": "user", "content": ""}, [""]),
        ({"role": "assistant", "content": None}, []),
        ({"role": "assistant"}, []),
        ({"role": "user", "content": 5}, []),
        (
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "one"},
                    {"type": "image_url", "image_url": {"url": "x"}},
                    {"type": "text", "text": None},
                    "not a part",
                    {"type": "text", "text": "two"},
                ],
            },
            ["one", "two"],
        ),
        ({"content": ({"type": "text", "text": "one"},)}, ["one"]),
        (MappingProxyType({"content": [{"type": "text", "text": "one"}]}), ["one"]),
        ({"content": [MappingProxyType({"type": "text", "text": "one"})]}, ["one"]),
    ],
    ids=range(9),
)
def test_the_texts_of_a_message_are_its_content_or_its_text_parts(message, texts):
    assert message_texts(message) == texts
