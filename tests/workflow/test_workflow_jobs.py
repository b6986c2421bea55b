"""A batch scanned in a real index: the best of each search come back, and little else."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ivf_helpers import METRICS
from workflow_engines import DIMENSION, NLIST, corpus_index

from ctxreuse.workflow.vector_search.costs import ScanLoad
from ctxreuse.workflow.vector_search.handle import SearchHandle
from ctxreuse.workflow.vector_search.ivf import IVFIndex
from ctxreuse.workflow.vector_search.scan_queue import ScanBatch
from ctxreuse.workflow.vector_search.scheduler import ScanJob
from ctxreuse.workflow.vector_search.top_k import ClusterFindings


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
        thresholds=np.full(len(wanted), index.worst, dtype=np.float32),
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
