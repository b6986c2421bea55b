"""How long a scan of clusters will take, learned as scans run; how long a sub-stage should be."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_USUAL_S = (5e-6, 0.12e-9, 0.08e-9)
"""Seconds of a cluster, and of a stored component: read from memory, and compared once."""

_LEARNING = 0.05
_WINDOW_S = 1.0  # in which arrivals are counted
_SHORTEST_S, _LONGEST_S = 0.001, 0.1  # sub-stages
_LONGEST_FACTOR = 20.0


class ScanLoad(NamedTuple):
    """The size of a scan."""

    clusters: int  # pairs of a query and a cluster
    codes: int  # vectors in the distinct clusters: each is read from memory once
    compared: int  # pairs of a query and a vector


class MovingMean:
    """A mean in which the latest values count most."""

    def __init__(self, value: float, weight: float = 0.1) -> None:
        self.value = value
        self._weight = weight

    def add(self, value: float) -> None:
        """Take in a value."""
        self.value += self._weight * (value - self.value)


class ScanCosts:
    """The seconds of a scan: the usual ones, times how much longer the latest scans have taken."""

    def __init__(self, dimension: int) -> None:
        per_pair, read, compare = _USUAL_S
        self._usual: Floats = np.array([per_pair, read * dimension, compare * dimension])
        self._slowness = MovingMean(1.0, _LEARNING)

    def seconds(self, load: ScanLoad) -> float:
        """Return the expected seconds of a scan."""
        return self._slowness.value * float(self._usual @ np.asarray(load, dtype=np.float64))

    def seconds_of_clusters(self, sizes: NDArray[np.int64], shared_by: NDArray[np.int64]) -> Floats:
        """Return the expected seconds of each of some clusters."""
        per_pair, read, compare = self._slowness.value * self._usual
        seconds: Floats = per_pair * shared_by + (read + compare * shared_by) * sizes
        return seconds

    def observe(self, load: ScanLoad, seconds: float) -> None:
        """Learn from the seconds that a scan took."""
        seconds = min(seconds, _LONGEST_FACTOR * self.seconds(load))  # the machine was busy
        self._slowness.add(seconds / float(self._usual @ np.asarray(load, dtype=np.float64)))


class ArrivalRate:
    """How many searches arrive in a second; the latest seconds count most."""

    def __init__(self) -> None:
        self._per_s = 0.0
        self._last_s = 0.0

    def note(self, now_s: float) -> None:
        """Note an arrival."""
        self._per_s = self.per_s(now_s) + 1.0 / _WINDOW_S
        self._last_s = now_s

    def per_s(self, now_s: float) -> float:
        """Return how many arrive in a second."""
        return self._per_s * math.exp(-max(0.0, now_s - self._last_s) / _WINDOW_S)


def sub_stage_s(
    overhead_s: float,
    searches: int,
    arriving_per_s: float,
    workers: int = 1,
) -> float:
    """Return how long a retrieval sub-stage should be (HedraRAG, Equation 1).

    Of a second, sub-stages of length mb spend b/mb on the overhead b of scheduling, for which all n
    searches wait; each of the r newcomers waits mb/(w+1) for the first of w workers. The sum n b/mb
    + r mb/(w+1) is least at sqrt((w+1) n b / r). The paper's equation, its overhead term with the
    right sign, is the case of one worker, one search, and one newcomer.
    """
    overhead_of_all_s = max(searches, 1) * overhead_s
    best = math.sqrt((workers + 1) * overhead_of_all_s / max(arriving_per_s, 1e-6))
    return min(max(best, _SHORTEST_S), _LONGEST_S)
