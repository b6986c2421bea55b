import pytest
from hypothesis import given
from hypothesis import strategies as st

from public_data.quality.scoring import answer_contained, exact_match, normalize_answer, token_f1


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Eiffel-Tower.", "eiffeltower"),
        ("a cat, an owl\tand the dog!", "cat owl and dog"),
        ("Another theme", "another theme"),
        ("“£5” per 10 %", "“£5” per 10"),
        ("the", ""),
        ("", ""),
    ],
)
def test_answers_are_compared_as_squad_compares_them(text, normal):
    assert normalize_answer(text) == normal


def test_an_answer_is_or_holds_a_right_one_word_by_word():
    assert exact_match("the Denver Broncos.", ["Carolina", "Denver Broncos"]) == 1.0
    assert exact_match("Denver Broncos won", ["Denver Broncos"]) == 0.0
    assert exact_match("", ["Denver"]) == 0.0

    assert answer_contained("It was the Denver Broncos.", ["Carolina", "Denver Broncos"]) == 1.0
    assert answer_contained("Denver, Broncos!", ["denver broncos"]) == 1.0
    assert answer_contained("Broncos of Denver", ["Denver Broncos"]) == 0.0
    assert answer_contained("fifteen", ["fifte"]) == 0.0
    assert answer_contained("five", ["the"]) == 0.0
    assert answer_contained("", ["five"]) == 0.0
    assert answer_contained("the", ["."]) == 1.0


def test_f1_counts_shared_words_with_the_closest_right_answer_as_often_as_both_have_them():
    assert token_f1("Denver Broncos", ["Denver Broncos"]) == 1.0
    assert token_f1("the Denver Broncos won it", ["Denver Broncos"]) == pytest.approx(2 / 3)
    assert token_f1("Broncos", ["Carolina Panthers", "Denver Broncos"]) == pytest.approx(2 / 3)
    assert token_f1("Carolina", ["Denver Broncos"]) == 0.0
    assert token_f1("five five five", ["five"]) == 0.5
    assert token_f1("five five", ["five five five"]) == 0.8
    assert token_f1("", ["the"]) == 1.0
    assert token_f1("", ["five"]) == 0.0
    assert token_f1("five", ["."]) == 0.0


words = st.lists(st.sampled_from(["one", "two", "three", "the"]), max_size=6).map(" ".join)


@given(words, words)
def test_f1_is_symmetric_and_one_exactly_for_the_same_words(left, right):
    score = token_f1(left, [right])
    assert 0 <= score <= 1
    assert score == token_f1(right, [left])
    same = sorted(normalize_answer(left).split()) == sorted(normalize_answer(right).split())
    assert (score == 1) == same
