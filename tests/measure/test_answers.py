import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.errors import InvalidRequestError
from ctxreuse.measure.results.answers import (
    Interval,
    answer_contained,
    bootstrap_interval,
    exact_match,
    normalize_answer,
    token_f1,
    without_thoughts,
)


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


def test_an_exact_match_is_one_of_the_right_answers():
    assert exact_match("the Denver Broncos.", ["Carolina", "Denver Broncos"]) == 1.0
    assert exact_match("Denver Broncos won", ["Denver Broncos"]) == 0.0
    assert exact_match("", ["Denver"]) == 0.0


def test_an_answer_holds_a_right_one_word_by_word():
    assert answer_contained("It was the Denver Broncos.", ["Carolina", "Denver Broncos"]) == 1.0
    assert answer_contained("Denver, Broncos!", ["denver broncos"]) == 1.0
    assert answer_contained("Broncos of Denver", ["Denver Broncos"]) == 0.0
    assert answer_contained("fifteen", ["fifte"]) == 0.0
    assert answer_contained("five", ["the"]) == 0.0
    assert answer_contained("", ["five"]) == 0.0
    assert answer_contained("the", ["."]) == 1.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>Five or six?</think>\n\nFive.", "Five."),
        ("Five or six?</think> Five.", "Five."),  # some chat templates begin the thought
        ("<think>One.</think><think>Two.</think>Five.\n", "Five."),
        ("\n<think>Five or", ""),
        ("<think></think>", ""),
        (" Five. ", " Five. "),
        ("I think <think> is a tag.", "I think <think> is a tag."),
        ("", ""),
    ],
)
def test_an_answer_is_what_stands_behind_the_thought(text, answer):
    assert without_thoughts(text) == answer


def test_f1_counts_shared_words_with_the_closest_right_answer():
    assert token_f1("Denver Broncos", ["Denver Broncos"]) == 1.0
    assert token_f1("the Denver Broncos won it", ["Denver Broncos"]) == pytest.approx(2 / 3)
    assert token_f1("Broncos", ["Carolina Panthers", "Denver Broncos"]) == pytest.approx(2 / 3)
    assert token_f1("Carolina", ["Denver Broncos"]) == 0.0


def test_f1_counts_a_repeated_word_as_often_as_both_have_it():
    assert token_f1("five five five", ["five"]) == 0.5
    assert token_f1("five five", ["five five five"]) == 0.8


def test_no_words_match_no_words_only():
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


def test_the_interval_is_that_of_the_seed():
    scores = [0.0, 1.0, 1.0, 0.5, 0.25] * 8
    interval = bootstrap_interval(scores, resamples=2_000, seed=7)
    assert interval == bootstrap_interval(scores, resamples=2_000, seed=7)
    assert interval != bootstrap_interval(scores, resamples=2_000, seed=8)
    assert interval.mean == pytest.approx(0.55)


def test_the_interval_is_that_of_normal_theory_for_many_scores():
    scores = [0.0, 1.0] * 200  # the mean's standard error is 0.5 / sqrt(400) = 0.025
    interval = bootstrap_interval(scores)
    assert interval.low == pytest.approx(0.5 - 1.96 * 0.025, abs=0.004)
    assert interval.high == pytest.approx(0.5 + 1.96 * 0.025, abs=0.004)
    narrow = bootstrap_interval(scores, confidence=0.5)
    assert narrow.high == pytest.approx(0.5 + 0.674 * 0.025, abs=0.004)


def test_equal_scores_have_no_spread():
    assert bootstrap_interval([0.25] * 3) == Interval(0.25, 0.25, 0.25)
    assert Interval(0.25, 0.125, 0.5).half_width == 0.1875


def test_all_samples_are_drawn_where_they_do_not_fit_at_once():
    scores = [0.0, 1.0] * 300_000
    interval = bootstrap_interval(scores, resamples=3)
    assert interval.mean == 0.5
    assert 0.49 < interval.low <= interval.high < 0.51


@pytest.mark.parametrize("references", [[], "one", ()])
def test_right_answers_are_a_list_with_at_least_one(references):
    for measure in (answer_contained, exact_match, token_f1):
        with pytest.raises(InvalidRequestError, match="at least one"):
            measure("one", references)


def test_impossible_arguments_are_refused():
    for scores in ([], [[1.0]]):
        with pytest.raises(InvalidRequestError, match="scores must be"):
            bootstrap_interval(scores)
    for confidence in (0, 1, 95):
        with pytest.raises(InvalidRequestError, match="confidence must be"):
            bootstrap_interval([1.0], confidence=confidence)
    for resamples in (0, 1.5):
        with pytest.raises(InvalidRequestError, match="resamples must be"):
            bootstrap_interval([1.0], resamples=resamples)
