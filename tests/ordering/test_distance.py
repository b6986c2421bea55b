from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.distance import squareform

from ctxreuse.distance import context_distance, pairwise_distances

A, B, C, D = [3, 5, 1, 7], [2, 6, 3, 5], [3, 5, 8, 9], [2, 6, 4, 0]

contexts = st.lists(st.lists(st.integers(0, 12), unique=True, max_size=6), max_size=10)


@pytest.mark.parametrize(
    ("one", "two", "distance"),
    [(A, B, 0.502), (B, C, 0.502), (B, D, 0.5), (A, C, 0.5), (A, D, 1), (C, D, 1)],
    ids=["A-B", "B-C", "B-D", "A-C", "A-D", "C-D"],
)
def test_the_papers_contexts_are_as_far_apart_as_equation_1_says(one, two, distance):
    assert context_distance(one, two, alpha=0.001) == pytest.approx(distance, abs=1e-12)
    assert context_distance(two, one, alpha=0.001) == context_distance(one, two, alpha=0.001)


@pytest.mark.parametrize(("one", "two"), [([1, 2], [3]), ([1], []), ([], [])])
def test_contexts_that_share_nothing_are_at_distance_1(one, two):
    assert context_distance(one, two) == 1
    assert pairwise_distances([one, two]).tolist() == [1]


def test_equal_contexts_are_at_distance_0():
    assert context_distance([4, 2, 9], [4, 2, 9]) == 0


def test_other_ranks_add_the_mean_shift_times_alpha():
    assert context_distance("abc", "cab", alpha=0.01) == pytest.approx(0.01 * (1 + 1 + 2) / 3)
    assert context_distance("abc", "cab", alpha=0) == 0


def test_the_larger_context_normalises_the_overlap():
    assert context_distance("a", "abcd") == 0.75
    assert context_distance("abcd", "a") == 0.75


def test_a_repeated_id_counts_at_its_first_position():
    assert context_distance("abab", "ab") == 0
    assert context_distance("aab", "ab") == 0


def test_ids_of_different_types_are_different_blocks():
    assert context_distance([1, 2], ["1", "2"]) == 1
    assert context_distance([1, "1"], ["1", 1], alpha=0.001) == pytest.approx(0.001)


@given(contexts, st.integers(1, 200), st.sampled_from([0, 0.001, 0.01, 1]))
def test_all_pairs_at_once_equal_one_pair_after_the_other(batch, chunk_pairs, alpha):
    distances = pairwise_distances(batch, alpha, chunk_pairs)
    one_by_one = [context_distance(one, two, alpha) for one, two in combinations(batch, 2)]
    np.testing.assert_allclose(distances, one_by_one, rtol=0, atol=1e-12)


def test_pairs_come_in_the_order_of_scipys_condensed_matrix():
    matrix = squareform(pairwise_distances([A, B, C, D], alpha=0.001))
    assert matrix.round(12).tolist() == [
        [0, 0.502, 0.5, 1],
        [0.502, 0, 0.502, 0.5],
        [0.5, 0.502, 0, 1],
        [1, 0.5, 1, 0],
    ]


@pytest.mark.parametrize("batch", [[], [[]], [[1, 2]]])
def test_fewer_than_two_contexts_have_no_pairs(batch):
    assert pairwise_distances(batch).tolist() == []


@given(contexts)
def test_a_distance_lies_between_0_and_1_and_what_the_ranks_add(batch):
    for one, two in combinations(batch, 2):
        assert 0 <= context_distance(one, two, alpha=0.001) <= 1 + 0.001 * 6
        assert context_distance(one, one) == (0 if one else 1)
