import sys
import threading
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st
from ivf_helpers import (
    DIMENSION,
    METRICS,
    NLIST,
    SIZE,
    assert_same,
    build_index,
    compressing_index,
    scan_all,
    shared_index,
    some_vectors,
)

from ctxreuse.errors import InvalidRequestError, MissingExtraError
from ctxreuse.workflow.vector_search.costs import FasterWay
from ctxreuse.workflow.vector_search.gpu_tier import GpuTier, fastest_tier, gpu_is_usable
from ctxreuse.workflow.vector_search.hot_tier import HotTier
from ctxreuse.workflow.vector_search.ivf import IVFIndex
from ctxreuse.workflow.vector_search.top_k import Candidates, best_by_group

metrics = pytest.mark.parametrize("metric", METRICS)
QUERIES = some_vectors(1)[:12]
VECTOR_BYTES = DIMENSION * 4 + 8
PLENTY = SIZE * VECTOR_BYTES


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("indexes")
    for metric in METRICS:
        faiss.write_index(shared_index(metric), str(folder / metric))
    return folder


@pytest.fixture
def searched() -> IVFIndex:
    return IVFIndex(shared_index("L2"))


def rebuild(tier: HotTier) -> tuple[int, ...]:
    tier.swap(tier.build())
    return tier.clusters


def bytes_of(searched: IVFIndex, *clusters: int) -> int:
    return int(searched.cluster_sizes[list(clusters)].sum()) * VECTOR_BYTES


@metrics
@examples(15)
@given(sets=st.lists(st.sets(st.integers(0, NLIST - 1)), min_size=1, max_size=4))
def test_results_do_not_depend_on_which_clusters_are_hot(files, metric, sets):
    searched = IVFIndex.read(files / metric)
    clusters = searched.nearest_clusters(QUERIES, 20)
    expected = scan_all(IVFIndex(shared_index(metric)), QUERIES, clusters, 7)
    tier = HotTier(searched, PLENTY, decay=0)
    for hot in sets:
        tier.note(np.array(sorted(hot), dtype=np.int64))
        assert rebuild(tier) == tuple(sorted(hot))
        assert_same(scan_all(searched, QUERIES, clusters, 7), *expected)
        for cluster in (0, 13, NLIST - 1):
            ids = searched.ids_of(cluster)
            np.testing.assert_array_equal(ids, IVFIndex(shared_index(metric)).ids_of(cluster))
            np.testing.assert_array_equal(
                searched.codes_of(cluster).view(np.float32), some_vectors()[ids]
            )
            np.testing.assert_array_equal(
                searched.vectors_of(ids[-1:], [cluster]), some_vectors()[ids[-1:]]
            )


def test_hot_clusters_are_read_from_their_copies_and_the_others_from_the_index():
    index = build_index("L2")
    searched = IVFIndex(index)
    tier = HotTier(searched, PLENTY)
    tier.note(np.array([3]))
    rebuild(tier)
    index.invlists.resize(3, 0)
    index.invlists.resize(4, 0)
    assert len(searched.ids_of(3)) == searched.cluster_sizes[3] > 0
    assert len(searched.ids_of(4)) == 0
    searched.serve_from(None)
    assert len(searched.ids_of(3)) == 0


def test_the_clusters_with_the_most_accesses_are_held_as_far_as_they_fit_first_ones_before_others():
    searched = IVFIndex(shared_index("L2"))
    tier = HotTier(searched, bytes_of(searched, 4, 9))
    tier.note(np.array([4, 4, 4, 9, 9, 20]))
    assert rebuild(tier) == (4, 9)
    tier = HotTier(searched, bytes_of(searched, 7, 11))
    tier.note(np.array([30, 7, 11, -1]))
    assert rebuild(tier) == (7, 11)

    assert rebuild(HotTier(searched, PLENTY)) == ()
    none = HotTier(searched, 0)
    none.note(np.array([1]))
    assert rebuild(none) == ()
    assert none.counters.swaps == 0


def test_clusters_that_do_not_fit_or_are_empty_leave_their_room_to_the_next(searched):
    sizes = IVFIndex(shared_index("L2")).cluster_sizes
    small, large = int(np.argmin(sizes)), int(np.argmax(sizes))
    tier = HotTier(searched, bytes_of(searched, large) - 1)
    tier.note(np.array([large, large, small]))
    assert rebuild(tier) == (small,)

    index = build_index("L2")
    index.invlists.resize(5, 0)
    tier = HotTier(IVFIndex(index), PLENTY)
    tier.note(np.array([5, 6]))
    assert rebuild(tier) == (6,)


def test_old_accesses_count_less_with_every_build(searched):
    tier = HotTier(searched, max(bytes_of(searched, 1), bytes_of(searched, 2)), decay=0.5)
    tier.note(np.array([1, 1, 1, 1]))
    assert rebuild(tier) == (1,)
    tier.note(np.array([2]))
    assert rebuild(tier) == (1,)  # two against one
    tier.note(np.array([2]))
    assert rebuild(tier) == (2,)  # one against one and a half


def test_a_build_is_due_after_every_so_many_sub_stages():
    tier = HotTier(IVFIndex(shared_index("L2")), PLENTY, every=3)
    seen = []
    for _ in range(7):
        tier.note(np.array([1]))
        seen.append(tier.due())
        if tier.due():
            built = tier.build()
            assert not tier.due()
            tier.swap(built)
    assert seen == [False, False, True, False, False, True, False]
    assert tier.counters.swaps == 1


def test_counters_tell_the_share_of_compared_vectors_that_was_hot(searched):
    tier = HotTier(searched, PLENTY)
    tier.note(np.array([5, -1]))
    rebuild(tier)
    tier.note(np.array([5, 6, 5]))
    five, six = int(searched.cluster_sizes[5]), int(searched.cluster_sizes[6])
    assert tier.counters.swaps == 1
    assert (tier.counters.codes, tier.counters.hot_codes) == (3 * five + six, 2 * five)


def test_scans_in_other_threads_go_on_while_sets_are_swapped(files):
    searched = IVFIndex.read(files / "L2")
    clusters = searched.nearest_clusters(QUERIES, NLIST)
    expected = scan_all(searched, QUERIES, clusters, 5)
    tier = HotTier(searched, PLENTY // 2, decay=0)
    done = threading.Event()
    wrong: list[object] = []

    def scan_until_done() -> None:
        while not done.is_set():
            found = scan_all(searched, QUERIES, clusters, 5)
            if not np.array_equal(found.ids, expected.ids):
                wrong.append(found.ids)

    threads = [threading.Thread(target=scan_until_done) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        random = np.random.default_rng(0)
        for _ in range(30):
            tier.note(random.integers(0, NLIST, size=12))
            rebuild(tier)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert tier.counters.swaps == 30


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"capacity_bytes": -1}, "capacity_bytes must be an integer from 0, not -1"),
        ({"capacity_bytes": 1.5}, "capacity_bytes must be an integer from 0"),
        ({"capacity_bytes": 1, "every": 0}, "every must be an integer from 1, not 0"),
        ({"capacity_bytes": 1, "decay": 1.1}, "decay must be a number from 0 to 1, not 1.1"),
        ({"capacity_bytes": 1, "decay": "half"}, "decay must be a number from 0 to 1, not 'half'"),
    ],
)
def test_wrong_settings_are_named(arguments, message):
    with pytest.raises(InvalidRequestError, match=message):
        HotTier(IVFIndex(shared_index("L2")), **arguments)


@pytest.fixture(autouse=True)
def always_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have scans go to the device, though a CPU that stands for one is slower than faiss."""
    monkeypatch.setattr(FasterWay, "is_first", lambda *_: True)


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="the GPU tier needs torch")


def on_device(index: IVFIndex, clusters: list[int], capacity_bytes: int = PLENTY) -> GpuTier:
    tier = GpuTier(index, capacity_bytes, device="cpu", decay=0)
    tier.note(np.array(clusters, dtype=np.int64))
    tier.swap(tier.build())
    return tier


def every_pair(searched: IVFIndex, queries: np.ndarray, k: int) -> Candidates:
    """Return what is found for every query in every cluster; ties in the order of ids."""
    rows = np.repeat(np.arange(len(queries)), searched.nlist)
    clusters = np.tile(np.arange(searched.nlist), len(queries))
    found = searched.scan(queries, rows, clusters, k)
    pairs = np.repeat(np.arange(len(rows)), k)
    return best_by_group(
        pairs, found.scores.ravel(), found.ids.ravel(), len(rows), k, searched.higher_is_better
    )


def assert_as_faiss(
    searched: IVFIndex, queries: np.ndarray, k: int, clusters: list[int], **capacity: int
) -> GpuTier:
    expected = every_pair(searched, queries, k)
    tier = on_device(searched, clusters, **capacity)
    assert_same(every_pair(searched, queries, k), *expected)
    return tier


def certain_pairs(tier: GpuTier, queries: np.ndarray, k: int) -> np.ndarray:
    """Return for each query and held cluster whether the device's answer was taken."""
    scanner = tier.index._serving.scanner
    assert scanner is not None
    rows = np.repeat(np.arange(len(queries)), len(tier.clusters))
    clusters = np.tile(np.array(tier.clusters), len(queries))
    return scanner.begin(queries, rows, clusters, k)().is_certain


@metrics
@pytest.mark.parametrize("k", [1, 5, 400])
def test_clusters_on_the_device_are_searched_as_faiss_does(torch, metric, k):
    searched = IVFIndex(shared_index(metric))
    tier = assert_as_faiss(searched, QUERIES, k, list(range(0, NLIST, 2)))
    assert tier.clusters == tuple(range(0, NLIST, 2))
    assert certain_pairs(tier, QUERIES, k).all()


@examples(30)
@given(
    metric=st.sampled_from(sorted(METRICS)),
    scale=st.sampled_from([1e-25, 1e-12, 1.0, 300.0, 1e12, 1e17, 3e18, 1e19, 1e25]),
    shift=st.sampled_from([0.0, 1.0, 1000.0]),
    dimension=st.sampled_from([1, 3, 17, 64, 200]),
    k=st.integers(1, 50),
    seed=st.integers(0, 2**32 - 1),
)
def test_whatever_the_vectors_results_are_those_of_faiss(metric, scale, shift, dimension, k, seed):
    pytest.importorskip("torch")
    random = np.random.default_rng(seed)
    vectors = ((random.normal(size=(400, dimension)) + shift) * scale).astype(np.float32)
    vectors[200:250] = vectors[:50]
    coarse = faiss.IndexFlat(dimension, METRICS[metric])
    coarse.add(vectors[:4])
    index = faiss.IndexIVFFlat(coarse, dimension, 4, METRICS[metric])
    index.train(vectors)
    index.add(vectors)
    searched = IVFIndex(index)
    queries = vectors[::60] + np.float32(scale) * random.normal(size=(7, dimension)).astype("f4")
    assert_as_faiss(searched, queries, k, [0, 1, 3], capacity_bytes=10**7)


@metrics
def test_equal_scores_at_the_end_are_left_to_faiss(torch, metric):
    vectors = np.repeat(some_vectors()[:20], 30, axis=0)
    searched = IVFIndex(build_index(metric, vectors, nlist=2))
    tier = assert_as_faiss(searched, QUERIES, 7, [0, 1])
    assert not certain_pairs(tier, QUERIES, 7).any()
    assert certain_pairs(tier, QUERIES, 30).all()


@metrics
def test_more_candidates_within_the_margin_than_there_is_room_for_are_left_to_faiss(torch, metric):
    random = np.random.default_rng(0)
    vectors = (1 + 1e-6 * random.normal(size=(300, DIMENSION))).astype(np.float32)
    searched = IVFIndex(build_index(metric, vectors, nlist=1))
    queries = vectors[:3]
    tier = assert_as_faiss(searched, queries, 3, [0])
    assert not certain_pairs(tier, queries, 3).any()


@metrics
def test_queries_that_are_no_numbers_are_left_to_faiss(torch, metric):
    searched = IVFIndex(shared_index(metric))
    queries = QUERIES[:3].copy()
    queries[1], queries[2] = np.nan, np.inf
    tier = assert_as_faiss(searched, queries, 5, list(range(NLIST)))
    certain = certain_pairs(tier, queries, 5).reshape(3, NLIST)
    assert certain.any(axis=1).tolist() == [True, False, False]


def test_rows_come_back_in_the_order_in_which_they_were_asked(torch, searched):
    random = np.random.default_rng(0)
    rows, clusters = random.integers(0, 12, 60), random.integers(-1, NLIST, 60)
    expected = searched.scan(QUERIES, rows, clusters, 4)
    on_device(searched, list(range(0, NLIST, 3)))
    assert_same(searched.scan(QUERIES, rows, clusters, 4), *expected)


def test_many_rows_are_scored_in_blocks(torch, monkeypatch, searched):
    monkeypatch.setattr("ctxreuse.workflow.vector_search.gpu_tier._LARGEST_PRODUCT", 700)
    assert_as_faiss(searched, QUERIES, 5, list(range(NLIST)))


def test_products_of_less_precision_are_not_trusted(torch, searched):
    tier = on_device(searched, [3])
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert not certain_pairs(tier, QUERIES, 5).any()
    finally:
        torch.set_float32_matmul_precision(before)
    assert certain_pairs(tier, QUERIES, 5).all()


def test_products_whose_precision_torch_cannot_tell_are_not_trusted(torch, monkeypatch):
    def mixed_settings() -> str:
        raise RuntimeError("you have used mix of the legacy and new APIs")

    tier = on_device(IVFIndex(shared_index("L2")), [3])
    monkeypatch.setattr(torch, "get_float32_matmul_precision", mixed_settings)
    assert not certain_pairs(tier, QUERIES, 5).any()


def test_a_tier_that_holds_nothing_any_more_is_not_asked(torch, searched):
    tier = on_device(searched, [3])
    tier.build()
    tier.swap(tier.build())
    assert tier.clusters == ()
    assert searched._serving.scanner is None


@pytest.mark.parametrize("clusters", [[], [4], [3, 4], [-1], [3]])
def test_a_scan_may_meet_no_cluster_of_the_tier(torch, clusters, searched):
    rows, wanted = np.zeros(len(clusters), dtype=np.int64), np.array(clusters, dtype=np.int64)
    expected = IVFIndex(shared_index("L2")).scan(QUERIES, rows, wanted, 5)
    on_device(searched, [3])
    assert_same(searched.scan(QUERIES, rows, wanted, 5), *expected)


def test_clusters_of_very_different_sizes_are_searched_as_faiss_does(torch):
    vectors = np.concatenate([some_vectors() + 9 * n for n in range(3)] + [some_vectors()[:40] - 9])
    index = build_index("L2", vectors, nlist=9)
    for cluster, size in ((1, 0), (2, 1), (3, 2), (4, 5)):
        index.invlists.resize(cluster, size)
    searched = IVFIndex(index)
    queries = np.concatenate([QUERIES, vectors[::50]])
    assert_as_faiss(searched, queries, 6, list(range(9)))


@pytest.mark.parametrize("breaks", ["begin", "finish"])
def test_a_fault_of_the_device_leaves_the_search_to_the_lists(torch, monkeypatch, caplog, breaks):
    searched = IVFIndex(shared_index("L2"))
    expected = every_pair(searched, QUERIES, 5)
    tier = on_device(searched, [3])

    def fail(*_):
        raise RuntimeError("out of memory")

    name = "begin" if breaks == "begin" else "_scored_again"
    monkeypatch.setattr(type(tier.index._serving.scanner), name, fail)
    for _ in range(2):
        assert_same(every_pair(searched, QUERIES, 5), *expected)
    assert [one.partition(" failed")[0] for one in caplog.messages] == [
        "IVFIndex: searching the hot tier"
    ]


def test_a_device_that_is_not_there_is_named_when_the_tier_is_made(torch):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(InvalidRequestError, match="torch sees no GPU here"):
        GpuTier(IVFIndex(shared_index("L2")), PLENTY)


def test_clusters_can_be_hot_in_both_tiers(torch, searched):
    expected = every_pair(searched, QUERIES, 5)
    on_device(searched, [1, 2, 3])
    ram = HotTier(searched, PLENTY)
    ram.note(np.array([3, 4]))
    ram.swap(ram.build())
    assert_same(every_pair(searched, QUERIES, 5), *expected)


def test_compressed_vectors_are_refused():
    index = compressing_index()
    index.train(some_vectors())
    with pytest.raises(InvalidRequestError, match=r"not 16 .* 16 dimensions; use HotTier"):
        GpuTier(IVFIndex(index), 1)
    assert type(fastest_tier(IVFIndex(index), 1)) is HotTier


def test_without_torch_the_tier_is_in_ram(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    searched = IVFIndex(shared_index("L2"))
    assert not gpu_is_usable()
    assert type(fastest_tier(searched, PLENTY)) is HotTier
    with pytest.raises(MissingExtraError, match=r"the GPU tier needs .*\[gpu\]"):
        GpuTier(searched, PLENTY)
