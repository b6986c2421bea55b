from collections import Counter

from ctxreuse import ContextBlock
from ctxreuse.context.rendering import DEFAULT_TEMPLATES
from labels import FORMS, compared, copied, tasks
from public_data.datasets import Dataset, Passage, Question


def test_one_of_the_forms_is_what_the_package_writes():
    block = ContextBlock(id="a", text="Some text.")
    assert FORMS["4 capitals"].label(block.text, 1) == DEFAULT_TEMPLATES.label_of(block)


def test_a_label_is_found_at_the_beginning_of_an_answer_only_if_it_is_whole():
    labels = ["[Doc_1]", "[Doc_10]"]
    answers = [
        "[Doc_1]",
        " Doc_10.",
        "[Doc_10] is",
        "[doc_1]",
        "[Doc_2]",
        "[Doc_100]",
        "The [Doc_1]",
    ]
    assert [copied(one, labels) for one in answers] == [0, 1, 1, None, None, None, None]


def test_the_right_passage_stands_once_at_the_place_that_is_noted():
    passages = tuple(Passage(f"p{number}", f"text {number}") for number in range(30))
    questions = tuple(
        Question(f"q{one}", f"{one}?", gold=frozenset({f"p{one}"})) for one in range(20)
    )
    drawn = list(tasks(Dataset("made", passages, questions), 20))
    for task in drawn:
        assert task.passages[task.right] == f"text {task.question.removesuffix('?')}"
        assert Counter(task.passages).most_common(1)[0][1] == 1
    assert {len(task.passages) for task in drawn} == {10}


def test_questions_that_one_form_gets_right_and_the_other_wrong_are_counted_apart():
    assert compared([2, 2, 0, 1, 2], [2, 1, 2, 2, 0]) == (3, 4, 2, 2)
