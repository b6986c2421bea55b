import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.context.tokens import as_token_counter, estimate_tokens
from ctxreuse.errors import InvalidRequestError


class Encoding:
    def __init__(self, ids):
        self.ids = ids


class CharacterTokenizer:
    """One token a character, and a special one that counting must leave out."""

    def __init__(self, wrap):
        self._wrap = wrap

    def encode(self, text, add_special_tokens=True):
        return self._wrap([ord(letter) for letter in text] + [0] * add_special_tokens)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("", 0), ("a", 1), ("four", 1), ("fiver", 2), ("ü" * 4, 2), ("🦜", 1), ("\ud800", 1)],
)
def test_an_estimated_token_is_four_bytes_of_utf_8_rounded_up(text, tokens):
    assert estimate_tokens(text) == tokens


@given(st.text(), st.text())
def test_an_estimate_grows_with_the_text(one, two):
    assert 0 <= estimate_tokens(one) <= estimate_tokens(one + two)
    assert estimate_tokens(one + two) <= estimate_tokens(one) + estimate_tokens(two)


def test_lengths_are_estimated_without_a_counter_and_counted_by_a_function_as_it_is():
    assert as_token_counter(None) is estimate_tokens
    assert as_token_counter(len)("abc") == 3
    assert as_token_counter(lambda text: np.int64(len(text)))("abc") == 3


@pytest.mark.parametrize("wrap", [list, Encoding, np.array], ids=["list", "Encoding", "array"])
def test_a_tokenizer_counts_without_special_tokens(wrap):
    assert as_token_counter(CharacterTokenizer(wrap))("abc") == 3


@pytest.mark.parametrize("counter", [5, "gpt2", b"gpt2", ["gpt2"]])
def test_what_is_neither_function_nor_tokenizer_is_refused(counter):
    with pytest.raises(InvalidRequestError) as caught:
        as_token_counter(counter)
    shown = f"{counter!r} ({type(counter).__name__})"
    assert str(caught.value) == f"token_counter must be a function or a tokenizer, not {shown}"


@pytest.mark.parametrize(
    ("count", "shown"), [(-1, "-1 (int)"), (1.5, "1.5 (float)"), (None, "None (NoneType)")]
)
def test_a_counter_that_returns_no_length_is_named(count, shown):
    with pytest.raises(InvalidRequestError) as caught:
        as_token_counter(lambda text: count)("text")
    assert str(caught.value) == (
        f"token_counter returned {shown}; it must return an integer from 0"
    )


def test_a_tokenizer_that_returns_no_tokens_is_named():
    with pytest.raises(InvalidRequestError) as caught:
        as_token_counter(CharacterTokenizer(len))("abc")
    assert str(caught.value) == "the tokenizer's encode returned 3 (int)"
