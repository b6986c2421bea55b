import numpy as np
import pytest
from example_counts import examples
from hypothesis import example, given
from hypothesis import strategies as st
from ivf_helpers import assert_same

from ctxreuse.workflow.vector_search.top_k import (
    MISSING,
    Candidates,
    best_by_group,
    nothing_found,
    worst_score,
)

LARGEST = float(np.finfo(np.float32).max)

candidates = st.lists(
    st.tuples(
        st.integers(0, 4),
        st.sampled_from([-LARGEST, -1.5, -0.0, 0.0, 1e-30, 0.25, 3.0, LARGEST]),
        st.integers(-1, 6),
    ),
    max_size=40,
)


def scores_of(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def ids_of(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_what_was_given_is_not_changed():
    scores, ids = scores_of(2, 1), ids_of(1, 2)
    best_by_group(ids_of(0, 0), scores, ids, 1, 2, higher_is_better=True)
    best_by_group(ids_of(0, 0), scores, ids, 1, 2, higher_is_better=False)
    assert (scores.tolist(), ids.tolist()) == ([2, 1], [1, 2])


@pytest.mark.parametrize(("higher", "worst"), [(True, -LARGEST), (False, LARGEST)])
def test_nothing_found_is_preset_as_faiss_presets_its_heaps(higher, worst):
    assert worst_score(higher) == worst
    found = nothing_found((2, 1), higher)
    assert (found.scores.dtype, found.ids.dtype) == (np.float32, np.int64)
    assert_same(found, np.full((2, 1), worst, dtype=np.float32), np.full((2, 1), -1))


@examples(100)
@example([(0, 1.0, 4), (0, 1.0, 4), (0, 0.0, 2), (0, -0.0, 1), (2, LARGEST, MISSING)], 3, False)
@example([], 2, True)
@given(given_candidates=candidates, k=st.integers(1, 6), higher=st.booleans())
def test_groups_equal_a_plain_sort_of_each(given_candidates, k, higher):
    found = merged(given_candidates, k, higher)
    for group in range(5):
        expected = sorted(
            ((-score if higher else score), id_)
            for owner, score, id_ in given_candidates
            if owner == group and id_ != MISSING
        )[:k]
        assert found.ids[group].tolist()[: len(expected)] == [id_ for _, id_ in expected]
        assert [-score if higher else score for score in found.scores[group][: len(expected)]] == [
            np.float32(score) for score, _ in expected
        ]
        assert set(found.ids[group].tolist()[len(expected) :]) <= {MISSING}
        assert set(found.scores[group].tolist()[len(expected) :]) <= {worst_score(higher)}


@examples(50)
@given(given_candidates=candidates, k=st.integers(1, 6), higher=st.booleans(), data=st.data())
def test_merging_in_parts_equals_merging_at_once(given_candidates, k, higher, data):
    shuffled = data.draw(st.permutations(given_candidates))
    cut = data.draw(st.integers(0, len(shuffled)))
    carried = merged(shuffled[:cut], k, higher)
    heap = [
        (group, score, id_)
        for group in range(5)
        for score, id_ in zip(
            carried.scores[group].tolist(), carried.ids[group].tolist(), strict=True
        )
    ]
    at_once = merged(given_candidates, k, higher)
    assert_same(merged(heap + shuffled[cut:], k, higher), at_once.scores, at_once.ids)


def merged(some: list[tuple[int, float, int]], k: int, higher: bool) -> Candidates:
    groups, scores, ids = zip(*some, strict=True) if some else ((), (), ())
    return best_by_group(ids_of(*groups), scores_of(*scores), ids_of(*ids), 5, k, higher)
