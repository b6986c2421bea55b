import pytest

from ctxreuse.context.checks import (
    checked_choice,
    checked_integer,
    checked_kind,
    checked_number,
    checked_optional_integer,
)
from ctxreuse.errors import InvalidRequestError, UnknownStrategyError


def test_what_is_allowed_is_returned():
    assert checked_integer("n", 1, at_least=1) == 1
    assert checked_optional_integer("n", 0) == 0
    assert checked_optional_integer("n", None) is None
    assert checked_number("x", 0.5) == 0.5
    assert checked_kind("s", "", str, "a string") == ""
    assert checked_kind("k", (1,), tuple, "a tuple") == (1,)
    assert checked_choice("mode", "b", ("a", "b")) == "b"


@pytest.mark.parametrize(
    ("check", "words"),
    [
        (lambda: checked_integer("n", 0, 1), "n must be an integer from 1, not 0 (int)"),
        (lambda: checked_integer("n", "3"), "n must be an integer from 0, not '3' (str)"),
        (
            lambda: checked_optional_integer("n", -1),
            "n must be an integer from 0 or None, not -1 (int)",
        ),
        (lambda: checked_number("x", float("nan")), "x must be a number from 0, not nan (float)"),
        (lambda: checked_number("x", float("inf")), "x must be a number from 0, not inf (float)"),
        (lambda: checked_kind("s", 5, str, "a string"), "s must be a string, not 5 (int)"),
        (
            lambda: checked_kind("k", 5, tuple, "a tuple; give (5,)"),
            "k must be a tuple, not 5 (int); give (5,)",
        ),
        (
            lambda: checked_choice("mode", "c", ("a", "b")),
            "there is no mode 'c' (str); choose one of 'a', 'b'",
        ),
    ],
)
def test_what_is_not_allowed_is_named_with_its_value(check, words):
    with pytest.raises(InvalidRequestError) as caught:
        check()
    assert str(caught.value) == words


def test_the_error_can_be_another():
    with pytest.raises(UnknownStrategyError):
        checked_choice("strategy", ["a"], ("a",), error=UnknownStrategyError)
