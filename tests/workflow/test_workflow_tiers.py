from __future__ import annotations

import threading
from pathlib import Path

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
    scan_all,
    shared_index,
    some_vectors,
)

from ctxreuse.errors import InvalidRequestError
from ctxreuse.workflow.vector_search.hot_tier import HotTier
from ctxreuse.workflow.vector_search.ivf import IVFIndex

metrics = pytest.mark.parametrize("metric", METRICS)
QUERIES = some_vectors(1)[:8]
VECTOR_BYTES = DIMENSION * 4 + 8
PLENTY = SIZE * VECTOR_BYTES


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("indexes")
    for metric in METRICS:
        faiss.write_index(shared_index(metric), str(folder / metric))
    return folder


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


def test_the_clusters_with_the_most_accesses_are_held_as_far_as_they_fit():
    searched = IVFIndex(shared_index("L2"))
    tier = HotTier(searched, bytes_of(searched, 4, 9))
    tier.note(np.array([4, 4, 4, 9, 9, 20]))
    assert rebuild(tier) == (4, 9)
    assert tier.size_bytes == bytes_of(searched, 4, 9)


def test_a_cluster_that_does_not_fit_leaves_its_room_to_the_next():
    sizes = IVFIndex(shared_index("L2")).cluster_sizes
    small, large = int(np.argmin(sizes)), int(np.argmax(sizes))
    searched = IVFIndex(shared_index("L2"))
    tier = HotTier(searched, bytes_of(searched, large) - 1)
    tier.note(np.array([large, large, small]))
    assert rebuild(tier) == (small,)


def test_of_equally_used_clusters_the_first_ones_are_held():
    searched = IVFIndex(shared_index("L2"))
    tier = HotTier(searched, bytes_of(searched, 7, 11))
    tier.note(np.array([30, 7, 11, -1]))
    assert rebuild(tier) == (7, 11)


def test_nothing_is_held_without_accesses_or_capacity():
    searched = IVFIndex(shared_index("L2"))
    assert rebuild(HotTier(searched, PLENTY)) == ()
    none = HotTier(searched, 0)
    none.note(np.array([1]))
    assert rebuild(none) == ()
    assert none.counters.swaps == 0


def test_old_accesses_count_less_with_every_build():
    searched = IVFIndex(shared_index("L2"))
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


def test_copies_of_clusters_that_stay_are_kept():
    tier = HotTier(IVFIndex(shared_index("L2")), PLENTY)
    tier.note(np.array([1, 2]))
    first = tier.build()
    tier.swap(first)
    tier.note(np.array([3]))
    second = tier.build()
    assert sorted(second.copies) == [1, 2, 3]
    assert second.copies[1] is first.copies[1]
    assert second.copies[2] is first.copies[2]
    assert tier.clusters == (1, 2)


def test_counters_tell_the_share_of_compared_vectors_that_was_hot():
    searched = IVFIndex(shared_index("L2"))
    tier = HotTier(searched, PLENTY)
    assert tier.hot_share == 0
    tier.note(np.array([5, -1]))
    rebuild(tier)
    tier.note(np.array([5, 6, 5]))
    five, six = int(searched.cluster_sizes[5]), int(searched.cluster_sizes[6])
    assert (tier.counters.sub_stages, tier.counters.swaps) == (2, 1)
    assert (tier.counters.codes, tier.counters.hot_codes) == (3 * five + six, 2 * five)
    assert tier.hot_share == 2 * five / (3 * five + six)


def test_an_empty_cluster_is_never_held():
    index = build_index("L2")
    index.invlists.resize(5, 0)
    tier = HotTier(IVFIndex(index), PLENTY)
    tier.note(np.array([5, 6]))
    assert rebuild(tier) == (6,)


def test_scans_in_other_threads_go_on_while_sets_are_swapped(files):
    searched = IVFIndex.read(files / "L2", threads=1)
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
        ({"capacity_bytes": 1, "decay": 1.1}, "decay must be from 0 to 1, not 1.1"),
        ({"capacity_bytes": 1, "decay": "half"}, "decay must be from 0 to 1, not 'half'"),
    ],
)
def test_wrong_settings_are_named(arguments, message):
    with pytest.raises(InvalidRequestError, match=message):
        HotTier(IVFIndex(shared_index("L2")), **arguments)
