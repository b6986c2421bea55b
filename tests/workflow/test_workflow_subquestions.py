import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.workflow.library import asks_nothing


@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n",
        "...",
        "None",
        "none.",
        ' "None" ',
        "**None**",
        "(none)",
        "NONE!\n",
        "None\n\nThe known facts already tell who it was. Is that enough?",
        "None, the facts suffice.",
        "None - all is known",
        "None needed",
        "None are needed.",
        "Done",
        "Done.",
        "N/A",
        "No",
        "no more sub-questions",
        "No further questions are needed.",
        "No additional facts",
        "Nothing",
        "Nothing else is needed.",
        "Finished.",
        "Sub-question: None",
        "Sub-question:",
        "Next subquestion: none.",
        "**Sub-question 2:** None",
    ],
)
def test_a_model_that_has_no_more_to_ask_is_understood(text):
    assert asks_nothing(text)


@pytest.mark.parametrize(
    "text",
    [
        "Who wrote it?",
        "None of the Beatles was born where?",
        "None of the members",
        "No. of people in Paris",
        "Nothing Compares 2 U singer",
        "no one who lived there",
        "Sub-question: Who wrote it?",
        "Sub-question:\nWho wrote it?",
        "Who is it?\n\nNone",
        "Nonesuch Palace's builder",
        "Is there no further heir?",
        "No more heroes, by whom?",
        "1990",
        "谁?",
    ],
)
def test_a_question_is_not_taken_for_the_end(text):
    assert not asks_nothing(text)


@given(st.text())
def test_any_text_is_one_or_the_other_and_one_line_with_a_question_mark_is_a_question(text):
    assert asks_nothing(text) in (True, False)
    line = " ".join(text.split())
    assert not asks_nothing(f"Who is {line}?")
