import math
import random
import time

import numpy as np
import pytest
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st
from ivf_helpers import build_index, some_vectors

from ctxreuse.workflow.vector_search.costs import FasterWay, ScanCosts, ScanLoad, sub_stage_s
from ctxreuse.workflow.vector_search.ivf import IVFIndex, ScannedPairs
from ctxreuse.workflow.vector_search.scheduler import ArrivalRate, MovingMean
from ctxreuse.workflow.vector_search.top_k import nothing_found

RATES = np.array([4e-6, 6e-9, 3e-9])
SECONDS = st.floats(0.0, 10.0)


def loads(seed: int, count: int) -> list[ScanLoad]:
    draw = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        sizes = draw.integers(50, 3_000, size=draw.integers(1, 40))
        sharing = draw.integers(1, 9, size=len(sizes))
        found.append(ScanLoad(int(sharing.sum()), int(sizes.sum()), int(sizes @ sharing)))
    return found


@examples(20)
@given(st.integers(0, 1_000), st.sampled_from((0.1, 1.0, 10.0)))
def test_what_scans_take_is_learned_and_follows_the_machine(seed, pace):
    costs = ScanCosts(dimension=64)
    for load in loads(seed, 400):
        costs.observe(load, float(RATES @ load))
    for load in loads(seed + 1, 600):
        costs.observe(load, pace * float(RATES @ load))
    for load in loads(seed + 2, 20):
        assert costs.seconds(load) == pytest.approx(pace * float(RATES @ load), rel=0.1)


@examples(60)
@given(st.lists(st.tuples(st.integers(0, 99), SECONDS), max_size=60))
def test_no_cost_is_negative_or_no_number_whatever_was_measured(measured):
    costs = ScanCosts(dimension=8)
    for seed, seconds in measured:
        [load] = loads(seed, 1)
        costs.observe(load, seconds)
        assert 0.0 <= costs.seconds(load) < math.inf
    sizes, sharing = np.array([0, 10, 10_000]), np.array([1, 1, 16])
    seconds_of = costs.seconds_of_clusters(sizes, sharing)
    assert np.isfinite(seconds_of).all()
    assert (seconds_of >= 0.0).all()
    assert (np.diff(seconds_of) >= 0.0).all()


def test_clusters_cost_together_what_their_scan_costs():
    costs = ScanCosts(dimension=8)
    sizes, sharing = np.array([10, 200, 3_000]), np.array([1, 4, 2])
    load = ScanLoad(int(sharing.sum()), int(sizes.sum()), int(sizes @ sharing))
    assert costs.seconds_of_clusters(sizes, sharing).sum() == pytest.approx(costs.seconds(load))


def test_one_interruption_or_no_time_for_a_while_does_not_spoil_what_was_learned():
    costs = ScanCosts(dimension=64)
    for load in loads(0, 400):
        costs.observe(load, float(RATES @ load))
    [load] = loads(1, 1)
    costs.observe(load, 60.0)
    for load in loads(2, 32):
        costs.observe(load, float(RATES @ load))
    assert costs.seconds(load) < 2.0 * float(RATES @ load)

    costs = ScanCosts(dimension=64)
    for load in loads(0, 400):
        costs.observe(load, 0.0)
    for load in loads(1, 800):
        costs.observe(load, float(RATES @ load))
    assert costs.seconds(load) > 0.1 * float(RATES @ load)


@given(st.floats(0.0, 1.0), st.integers(0, 500), st.floats(0.0, 1_000.0), st.integers(1, 32))
def test_no_other_sub_stage_has_a_shorter_wait(overhead_s, searches, arriving_per_s, workers):
    """Part of a sub-stage for each newcomer, the overhead of all of them for all searches."""
    best = sub_stage_s(overhead_s, searches, arriving_per_s, workers)
    assert 0.001 <= best <= 0.1

    def cost(seconds: float) -> float:
        arriving = max(arriving_per_s, 1e-6)
        return arriving * seconds / (workers + 1) + max(searches, 1) * overhead_s / seconds

    for other in np.geomspace(0.001, 0.1, 30):
        assert cost(best) <= cost(float(other)) * (1 + 1e-9)


def test_rates_and_means_are_those_of_late():
    rate = ArrivalRate()
    assert rate.per_s(5.0) == 0.0
    for number in range(100):
        rate.note(number / 20)
    assert 19.0 < rate.per_s(4.95) < 21.0
    assert rate.per_s(15.0) < 0.01
    mean = MovingMean(1.0, weight=0.5)
    mean.add(3.0)
    mean.add(4.0)
    assert mean.value == 3.0


def seconds_of(is_first, load):
    """A device takes 3 ms and little for each vector; the lists take time for each vector."""
    return 0.003 + 1e-9 * load.codes if is_first else 1e-6 * load.codes + 1e-7 * load.compared


def test_small_loads_go_to_the_lists_and_large_ones_to_the_device():
    ways, rng = FasterWay(64), random.Random(0)
    chosen = []
    for number in range(3_000):
        codes = rng.choice([100, 500, 8_000, 40_000])
        load = ScanLoad(10, codes, 3 * codes)
        is_first = ways.is_first(load._replace(clusters=1), load)
        ways.observe(
            is_first, load._replace(clusters=1) if is_first else load, seconds_of(is_first, load)
        )
        if number > 1_500:
            chosen.append((codes > 1_000, is_first))
    as_wanted = sum(is_large == is_first for is_large, is_first in chosen)
    assert as_wanted / len(chosen) > 0.93  # each 32nd is a trial
    assert len(set(chosen)) == 4


def test_a_device_that_is_slow_is_left_alone():
    class Slow:
        began = 0

        def holds(self, clusters):
            return clusters >= 0

        def begin(self, vectors, rows, clusters, k):
            self.began += 1
            time.sleep(0.01)
            nothing = nothing_found((len(rows), k), False)
            return lambda: ScannedPairs(nothing, np.zeros(len(rows), dtype=np.bool_))

    searched, device = IVFIndex(build_index("L2")), Slow()
    rows, clusters = np.zeros(3, dtype=np.int64), np.arange(3)
    expected = searched.scan(some_vectors()[:1], rows, clusters, 4)
    searched.accelerate(device)
    for _ in range(200):
        found = searched.scan(some_vectors()[:1], rows, clusters, 4)
        np.testing.assert_array_equal(found.ids, expected.ids)
        np.testing.assert_array_equal(found.scores, expected.scores)
    assert 0 < device.began < 60
