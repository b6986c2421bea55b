"""The best of searches: merged, scanned in batches of a real index, and where they look first."""

import numpy as np
import pytest
from example_counts import examples
from hypothesis import example, given
from hypothesis import strategies as st
from ivf_helpers import METRICS, assert_same
from workflow_engines import DIMENSION, NLIST, corpus_index

from ctxreuse.workflow.vector_search.costs import ScanLoad
from ctxreuse.workflow.vector_search.handle import SearchHandle, SearchRecord
from ctxreuse.workflow.vector_search.ivf import IVFIndex
from ctxreuse.workflow.vector_search.scan_queue import ScanBatch
from ctxreuse.workflow.vector_search.scheduler import ScanJob
from ctxreuse.workflow.vector_search.top_k import (
    MISSING,
    WORST,
    Candidates,
    ClusterFindings,
    best_by_group,
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
        assert set(found.scores[group].tolist()[len(expected) :]) <= {WORST[higher]}


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


def scanned(index, batch):
    job = ScanJob(batch, index, lambda: 0.0, 0.0)
    job.run()
    assert isinstance(job.found, ClusterFindings)
    return job.found


@pytest.mark.parametrize("metric", METRICS)
@given(
    seed=st.integers(0, 999),
    wanted=st.lists(st.tuples(st.integers(1, 60), st.integers(1, NLIST)), min_size=1, max_size=6),
)
def test_the_best_of_each_search_come_back(metric, seed, wanted):
    index = IVFIndex(corpus_index(metric))
    draw = np.random.default_rng(seed)
    vectors = draw.normal(size=(len(wanted), DIMENSION)).astype(np.float32)
    pairs = [
        (cluster, row)
        for row, (_, count) in enumerate(wanted)
        for cluster in draw.permutation(NLIST)[:count].tolist()
    ]
    clusters, rows = np.array(sorted(pairs)).T
    most = max(k for k, _ in wanted)
    batch = ScanBatch(
        searches=tuple(
            SearchHandle("", k, 0.0, vector=vectors[i]) for i, (k, _) in enumerate(wanted)
        ),
        vectors=vectors,
        thresholds=np.full(len(wanted), WORST[index.higher_is_better], dtype=np.float32),
        rows=rows,
        clusters=clusters,
        k=most,
        load=ScanLoad(len(rows), 0, 0),
    )
    found = scanned(index, batch)
    everything = index.scan(vectors, rows, clusters, 200)
    sign = -1 if index.higher_is_better else 1
    for row, (k, _) in enumerate(wanted):
        all_ids, all_scores = everything.ids[rows == row].ravel(), everything.scores[rows == row]
        order = np.lexsort((all_ids, sign * all_scores.ravel()))
        best = all_ids[order][all_ids[order] >= 0][:k]
        came = found.rows == row
        order = np.lexsort((found.ids[came], sign * found.scores[came]))
        np.testing.assert_array_equal(found.ids[came][order][: len(best)], best)
        assert (np.diff(np.sort(found.ids[came])) > 0).all()
        assert (index.ids_of(int(found.clusters[came][0])) == found.ids[came][0]).any()


def test_what_does_not_reach_the_threshold_stays_away():
    index = IVFIndex(corpus_index())
    vectors = np.zeros((1, DIMENSION), dtype=np.float32)
    clusters, rows = np.arange(NLIST), np.zeros(NLIST, dtype=np.intp)
    scores = np.sort(index.scan(vectors, rows, clusters, 5).scores.ravel())
    batch = ScanBatch(
        searches=(SearchHandle("", 5, 0.0, vector=vectors[0], clusters=clusters),),
        vectors=vectors,
        thresholds=scores[2:3],
        rows=rows,
        clusters=clusters,
        k=5,
        load=ScanLoad(NLIST, 0, 0),
    )
    found = scanned(index, batch)
    np.testing.assert_array_equal(np.sort(found.scores), scores[:3])


clusters = st.lists(st.integers(0, 20), unique=True, max_size=12)


def record(probed: list[int], found_in: list[int]) -> SearchRecord:
    return SearchRecord(
        np.zeros(2, dtype=np.float32),
        np.array(probed, dtype=np.int64),
        np.arange(len(found_in)),
        np.array(found_in, dtype=np.int64),
    )


@given(clusters, clusters, st.lists(st.integers(0, 20), max_size=20))
def test_where_the_last_search_found_comes_first_then_where_it_looked(new, probed, found_in):
    given_ = np.array(new, dtype=np.int64)
    found = [one for one in new if one in found_in]
    looked = [one for one in new if one in probed and one not in found_in]
    rest = [one for one in new if one not in probed and one not in found_in]
    assert record(probed, found_in).reordered(given_).tolist() == found + looked + rest
    assert given_.tolist() == new
