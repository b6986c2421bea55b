import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse import ContextBlock, ReusePlanner
from ctxreuse.context.thoughts import ThoughtFilter, without_thoughts


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>Five or six?</think>\n\nFive.", "Five."),
        ("\n<Thinking>Five\nor six?</thinking> Five.", "Five."),
        ("Five or six?</think> Five.", "Five."),  # some chat templates begin the thought
        ("<think>One.</think><thinking>Two.</thinking>Five.\n", "Five.\n"),
        ("\n<think>Five or", ""),
        ("<think></think>", ""),
        (" Five. ", " Five. "),
        ("<thin> ice", "<thin> ice"),
        ("Tags are <think> and </think>.", "Tags are <think> and </think>."),
        ("<think>?</think>Tags are <think> and </think>.", "Tags are <think> and </think>."),
        (" " * 65 + "<think>", " " * 65 + "<think>"),
        ("", ""),
        ("<", "<"),
    ],
)
def test_an_answer_is_what_stands_behind_the_thought(text, answer):
    assert without_thoughts(text) == answer


words = st.sampled_from(
    ["<think>", "</think>", "<thinking>", "</thinking>", " ", "\n", "<", "I", " " * 60, "<thin"]
)


@given(st.lists(words), st.integers(1, 9))
def test_pieces_of_any_length_are_the_answer_of_the_whole(said, length):
    text, stream = "<think>" + "".join(said), ThoughtFilter()
    told = "".join(stream.take(text[at : at + length]) for at in range(0, len(text), length))
    assert told == (without_thoughts(text) if stream.has_begun else "")


def test_no_thought_stands_in_the_history_of_a_conversation():
    conversation = ReusePlanner().conversation("c")
    conversation.plan([ContextBlock(text="a")], "Which?")
    conversation.record("<think>Hm.</think>\n\nThis one.")
    assert conversation.messages()[-1]["content"] == "This one."
    conversation.compact("<think>Short.</think>They spoke of one.")
    assert conversation.messages()[-1]["content"] == "They spoke of one."
