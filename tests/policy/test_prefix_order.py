from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.policy.batch import prefix_order

GRAIN = 64


def grains(word: str) -> str:
    """Return a prompt in which each letter stands for a grain."""
    return "".join(letter * GRAIN for letter in word)


def order(*words: str) -> list[str]:
    positions = prefix_order([grains(word) for word in words])
    return [words[position] for position in positions]


def test_a_prompt_goes_before_the_one_that_continues_it():
    assert order("abc", "ab", "abd") == ["ab", "abc", "abd"]


def test_less_than_a_grain_in_common_does_not_count():
    prompts = ["x" * (GRAIN - 1) + "b", "y", "x" * (GRAIN - 1) + "a"]
    assert prefix_order(prompts) == [0, 1, 2]


words = st.lists(st.text(alphabet="ab", max_size=6), max_size=20)


@given(words)
def test_the_order_is_a_permutation(some):
    assert sorted(prefix_order([grains(word) for word in some])) == list(range(len(some)))


@given(words, st.integers(min_value=1, max_value=4))
def test_all_prompts_with_the_same_beginning_are_neighbours(some, length):
    positions = prefix_order([grains(word) for word in some])
    beginnings = [some[position][:length] for position in positions]
    whole = [beginning for beginning, _ in groupby(beginnings) if len(beginning) == length]
    assert len(whole) == len(set(whole))
