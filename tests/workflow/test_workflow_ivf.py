import sys
import threading
from collections.abc import Callable

import faiss
import numpy as np
import pytest
from example_counts import examples
from hypothesis import example, given
from hypothesis import strategies as st
from ivf_helpers import (
    DIMENSION,
    METRICS,
    NLIST,
    SIZE,
    assert_same,
    build_index,
    compressing_index,
    merge,
    scan_all,
    scan_pairs,
    shared_index,
    some_vectors,
)

from ctxreuse.errors import InputFileError, InvalidRequestError, MissingExtraError
from ctxreuse.workflow.vector_search.ivf import IVFIndex, ScannedPairs
from ctxreuse.workflow.vector_search.top_k import Candidates, nothing_found

metrics = pytest.mark.parametrize("metric", METRICS)
QUERIES = some_vectors(1)[:12]


def flat_index() -> faiss.Index:
    return faiss.IndexFlatL2(DIMENSION)


def untrained_index(*metric: int) -> faiss.Index:
    return faiss.IndexIVFFlat(flat_index(), DIMENSION, 4, *metric)


def stock_search(index: faiss.Index, queries: np.ndarray, k: int, nprobe: int) -> Candidates:
    return Candidates(*index.search(queries, k, params=faiss.SearchParametersIVF(nprobe=nprobe)))


def assert_as_stock(searched: IVFIndex, index: faiss.Index, k: int = 5) -> None:
    clusters = searched.nearest_clusters(QUERIES, 8)
    assert_same(scan_all(searched, QUERIES, clusters, k), *stock_search(index, QUERIES, k, 8))


@pytest.mark.skipif(sys.platform != "linux", reason="counts a thread's switches")
def test_a_scan_does_not_wait_for_python_at_each_row():
    import resource

    searched = IVFIndex(shared_index("L2"))
    rows, clusters = np.zeros(400, dtype=np.int64), np.arange(400) % NLIST
    has_begun, may_end = threading.Event(), threading.Event()

    def compute() -> None:
        while not may_end.is_set():
            has_begun.set()
            sum(range(1_000))

    beside = threading.Thread(target=compute)
    beside.start()
    try:
        has_begun.wait()
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        for _ in range(20):
            searched.scan(QUERIES, rows, clusters, 5)
        switches = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before
    finally:
        may_end.set()
        beside.join()
    # one wait for each of the 400 rows would be 8,000; OpenMP's threads and other programs add some
    assert switches < 20 * 400 / 4


@examples(60)
@example(metric="L2", k=SIZE + 7, nprobe=8, seed=0, parts=1)
@example(metric="inner product", k=SIZE + 7, nprobe=8, seed=0, parts=2)
@given(
    metric=st.sampled_from(sorted(METRICS)),
    k=st.integers(1, 40),
    nprobe=st.integers(1, NLIST),
    seed=st.integers(0, 2**32 - 1),
    parts=st.integers(1, 6),
)
def test_order_and_split_of_a_search_do_not_change_its_result(metric, k, nprobe, seed, parts):
    searched = IVFIndex(shared_index(metric))
    queries = QUERIES[:4]
    clusters = searched.nearest_clusters(queries, nprobe).ravel()
    rows = np.repeat(np.arange(4), nprobe)
    order = np.random.default_rng(seed).permutation(len(rows))
    heap = nothing_found((4, k), searched.higher_is_better)
    for part in np.array_split(order, parts):
        found = searched.scan(queries, rows[part], clusters[part], k)
        both = Candidates(*map(np.concatenate, zip(heap, found, strict=True)))
        heap = merge(searched, 4, np.concatenate([np.arange(4), rows[part]]), both)
    assert_same(heap, *stock_search(shared_index(metric), queries, k, nprobe))


@metrics
def test_of_vectors_that_tie_the_smaller_ids_are_found_whatever_the_order(metric):
    vectors = np.repeat(some_vectors()[:40], 9, axis=0)
    searched = IVFIndex(build_index(metric, vectors, nlist=4))
    queries = QUERIES[:2]
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(8)
        rows, clusters = np.divmod(order, 4)
        found = scan_pairs(searched, queries, rows, clusters, 13)
        scores, ids = searched.faiss_index.search(
            queries, len(vectors), params=faiss.SearchParametersIVF(nprobe=4)
        )
        for row in range(2):
            worst_first = scores[row] if metric == "L2" else -scores[row]
            canonical = np.lexsort((ids[row], worst_first))[:13]
            assert found.ids[row].tolist() == ids[row][canonical].tolist()
            assert found.scores[row].tolist() == scores[row][canonical].tolist()


@metrics
def test_no_cluster_and_an_empty_cluster_give_nothing(metric):
    index = build_index(metric)
    index.invlists.resize(5, 0)
    searched = IVFIndex(index)
    found = searched.scan(QUERIES, np.array([0, 1]), np.array([-1, 5]), 3)
    assert_same(found, *nothing_found((2, 3), searched.higher_is_better))
    assert searched.cluster_sizes[5] == 0
    assert searched.ids_of(5).shape == (0,)
    assert searched.codes_of(5).shape == (0, DIMENSION * 4)


@metrics
def test_a_query_of_no_numbers_finds_nothing_and_leaves_the_others_alone(metric):
    searched = IVFIndex(shared_index(metric))
    queries = QUERIES[:3].copy()
    queries[1] = np.nan
    clusters = searched.nearest_clusters(queries, 4)
    found = scan_all(searched, queries, clusters, 5)
    alone = scan_all(searched, QUERIES[:3], searched.nearest_clusters(QUERIES[:3], 4), 5)
    assert found.ids[1].tolist() == [-1] * 5
    assert_same(Candidates(*(part[[0, 2]] for part in found)), *(part[[0, 2]] for part in alone))


@metrics
def test_the_nearest_clusters_of_a_query_do_not_depend_on_its_batch(metric, monkeypatch):
    # far from the origin roundings are large enough to change the order
    monkeypatch.setattr(faiss.cvar, "distance_compute_blas_threshold", 20)
    searched = IVFIndex(build_index(metric, some_vectors() + np.float32(300)))
    queries = some_vectors(2)[:100] + np.float32(300)
    batch = searched.nearest_clusters(queries, NLIST)
    alone = np.concatenate([searched.nearest_clusters(query[None], NLIST) for query in queries])
    np.testing.assert_array_equal(batch, alone)


@metrics
def test_the_nearest_clusters_are_those_of_the_stock_quantizer_for_infinite_queries_too(metric):
    searched = IVFIndex(shared_index(metric))
    _, expected = searched.faiss_index.quantizer.search(QUERIES, 9)
    np.testing.assert_array_equal(searched.nearest_clusters(QUERIES, 9), expected)
    queries = np.full((1, DIMENSION), np.inf, dtype=np.float32)
    assert searched.nearest_clusters(queries, 4).shape == (1, 4)
    assert searched.scan(queries, np.array([0]), np.array([0]), 5).ids.shape == (1, 5)


def test_more_probes_than_clusters_are_all_and_none_are_an_empty_result():
    searched = IVFIndex(shared_index("L2"))
    clusters = searched.nearest_clusters(QUERIES, 10 * NLIST)
    assert np.sort(clusters).tolist() == [list(range(NLIST))] * len(QUERIES)
    assert searched.scan(QUERIES, [0], [0], np.int64(3)).ids.shape == (1, 3)
    assert searched.scan(QUERIES, [], [], 3).ids.shape == (0, 3)
    assert searched.nearest_clusters(QUERIES[:0], np.int64(3)).shape == (0, 3)
    assert searched.vectors_of([], []).shape == (0, DIMENSION)


def test_queries_may_be_strided_or_of_another_number_type():
    searched = IVFIndex(shared_index("L2"))
    wide = np.zeros((12, 2 * DIMENSION))
    wide[:, ::2] = QUERIES
    clusters = searched.nearest_clusters(QUERIES, 4)
    np.testing.assert_array_equal(searched.nearest_clusters(wide[:, ::2], 4), clusters)
    rows = np.arange(24)[::2].astype(np.int32) // 2
    found = searched.scan(wide[:, ::2], rows, clusters[:, 1], 3)
    expected = searched.scan(QUERIES, np.arange(12), clusters[:, 1].copy(), 3)
    assert_same(found, *expected)


@metrics
def test_the_settings_of_the_index_and_of_the_thread_are_neither_used_nor_changed(metric):
    index = build_index(metric)
    index.nprobe, index.parallel_mode = 3, 1
    lists, threads = int(index.invlists.this), faiss.omp_get_max_threads()
    searched = IVFIndex(index)
    clusters = searched.nearest_clusters(QUERIES, 8)
    found = scan_all(searched, QUERIES, clusters, 5)
    assert (index.nprobe, index.parallel_mode, int(index.invlists.this)) == (3, 1, lists)
    assert faiss.omp_get_max_threads() == threads
    del searched
    assert_same(found, *stock_search(index, QUERIES, 5, 8))


def test_stored_vectors_are_found_by_id_and_cluster():
    index = build_index("L2", some_vectors()[:0x200], nlist=4)
    extra = some_vectors(3)[:3]
    index.add_with_ids(extra, np.array([900, 70_000, 801]))
    searched = IVFIndex(index)
    owners = {int(id_): c for c in range(4) for id_ in searched.ids_of(c)}
    wanted = [70_000, 5, 900, 5]
    vectors = searched.vectors_of(wanted, [owners[id_] for id_ in wanted])
    stored = some_vectors()
    np.testing.assert_array_equal(vectors, [extra[1], stored[5], extra[0], stored[5]])


@pytest.mark.parametrize("by_residual", [True, False])
def test_a_scalar_quantizer_is_searched_as_stock_faiss_does(by_residual):
    index = compressing_index(NLIST, by_residual=by_residual)
    index.train(some_vectors())
    index.add(some_vectors())
    searched = IVFIndex(index)
    assert_as_stock(searched, index)
    cluster = int(searched.nearest_clusters(QUERIES, 8)[0, 0])
    id_ = int(searched.ids_of(cluster)[0])
    index.make_direct_map()
    np.testing.assert_array_equal(searched.vectors_of([id_], [cluster])[0], index.reconstruct(id_))


def test_handles_of_the_general_type_will_do_and_live_as_long_as_they_are_searched():
    wrapper = faiss.IndexIDMap(untrained_index())
    wrapper.index.train(some_vectors())
    assert type(wrapper.index) is faiss.Index
    assert IVFIndex(wrapper.index).nlist == 4
    assert_as_stock(IVFIndex(build_index("L2")), shared_index("L2"))


@metrics
@pytest.mark.parametrize("memory_map", [True, False])
def test_an_index_in_a_file_is_searched_alike(metric, memory_map, tmp_path):
    path = tmp_path / "vectors.faiss"
    faiss.write_index(shared_index(metric), str(path))
    searched = IVFIndex.read(path, memory_map=memory_map)
    lists = type(faiss.downcast_InvertedLists(searched.faiss_index.invlists)).__name__
    assert lists == ("OnDiskInvertedLists" if memory_map else "ArrayInvertedLists")
    assert_as_stock(searched, shared_index(metric))
    np.testing.assert_array_equal(
        searched.vectors_of([searched.ids_of(2)[1]], [2])[0], some_vectors()[searched.ids_of(2)[1]]
    )


def test_a_file_that_is_no_index_is_named(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("no index")
    for wrong in (path, tmp_path / "missing"):
        with pytest.raises(InputFileError, match=f"{wrong.name}: not an index that faiss"):
            IVFIndex.read(wrong)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("vectors.faiss", "built over a faiss index, not over 'str'"),
        (flat_index(), "IndexFlatL2 cannot be searched .* atomic stage"),
        (faiss.IndexIVFPQ(flat_index(), DIMENSION, 4, 4, 8), "IndexIVFPQ cannot be searched .*"),
        (faiss.IndexIDMap(untrained_index()), "IndexIDMap cannot be searched .* add_with_ids"),
        (faiss.IndexPreTransform(untrained_index()), "IndexPreTransform cannot be searched"),
        (untrained_index(), "must be trained"),
        (untrained_index(faiss.METRIC_L1), "metric must be L2 or inner product, not 2"),
        (compressing_index(metric=faiss.METRIC_INNER_PRODUCT), "by_residual=False"),
    ],
)
def test_an_index_that_cannot_be_searched_in_steps_is_refused(index, message):
    with pytest.raises(InvalidRequestError, match=message):
        IVFIndex(index)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((QUERIES[0], [0], [0], 1), r"numbers of shape \(n, 16\), not float32 of shape \(16,\)"),
        ((QUERIES.astype(complex), [0], [0], 1), "not complex128"),
        (([["a"] * DIMENSION], [0], [0], 1), "vectors must be numbers"),
        ((QUERIES, [12], [0], 1), "rows must be from 0 to 11, not from 12 to 12"),
        ((QUERIES, [0], [NLIST], 1), "clusters must be from -1 to 31"),
        ((QUERIES, [0, 1], [0], 1), "clusters must be a row of 2 integers"),
        ((QUERIES, [[0]], [[0]], 1), "rows must be a row of integers"),
        ((QUERIES, [0.5], [0], 1), "rows must be a row of integers, not float64"),
        ((QUERIES, [0], [0], 0), "k must be an integer from 1, not 0"),
    ],
)
def test_wrong_arguments_of_a_scan_are_named(arguments, message):
    searched = IVFIndex(shared_index("L2"))
    with pytest.raises(InvalidRequestError, match=message):
        searched.scan(*arguments)


def test_wrong_arguments_of_the_other_calls_and_missing_ids_are_named():
    searched = IVFIndex(shared_index("L2"))
    with pytest.raises(InvalidRequestError, match="nprobe must be an integer from 1, not 0"):
        searched.nearest_clusters(QUERIES, 0)
    with pytest.raises(InvalidRequestError, match="clusters must be a row of"):
        searched.vectors_of([1], [1, 2])
    with pytest.raises(InvalidRequestError, match="clusters must be from 0 to 31"):
        searched.vectors_of([1], [-1])
    missing = next(id_ for id_ in range(SIZE) if id_ not in searched.ids_of(3))
    with pytest.raises(InvalidRequestError, match=f"cluster 3 holds no vector .* id {missing};"):
        searched.vectors_of([missing], [3])


class OneCluster:
    """A scanner that holds one cluster, finds there what no index has, and doubts query 2."""

    def __init__(self, cluster: int) -> None:
        self.cluster = cluster

    def holds(self, clusters: np.ndarray) -> np.ndarray:
        return clusters == self.cluster

    def begin(
        self, vectors: np.ndarray, rows: np.ndarray, clusters: np.ndarray, k: int
    ) -> Callable[[], ScannedPairs]:
        assert set(clusters.tolist()) == {self.cluster}
        found = nothing_found((len(rows), k), higher_is_better=False)
        found.ids[:, 0] = 10**6 + rows
        return lambda: ScannedPairs(found, rows != 2)


def test_a_scanner_searches_the_clusters_that_it_holds_and_faiss_what_it_is_not_sure_of():
    searched = IVFIndex(shared_index("L2"))
    rows, clusters = np.array([0, 1, 2, 3]), np.array([4, 9, 4, 4])
    stock = searched.scan(QUERIES, rows, clusters, 2)
    searched.accelerate(OneCluster(4))
    found = searched.scan(QUERIES, rows, clusters, 2)
    assert found.ids.tolist() == [
        [10**6, -1],
        stock.ids[1].tolist(),
        stock.ids[2].tolist(),
        [10**6 + 3, -1],
    ]
    assert found.scores[1:3].tolist() == stock.scores[1:3].tolist()
    searched.accelerate(None)
    assert_same(searched.scan(QUERIES, rows, clusters, 2), *stock)


def test_without_faiss_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(MissingExtraError, match=r"pip install .*\[workflow\]"):
        IVFIndex(object())
