"""How long a scan of clusters will take, learned as scans run; how long a sub-stage should be."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from ctxreuse.context.fork_safety import ForkSafeLock

Floats = NDArray[np.float64]

_PRIOR_S = (5e-6, 0.12e-9, 0.08e-9)
"""Seconds of a cluster, and of a stored component: read from memory, and compared once."""

_PRIOR_SCANS = 2.0
_FORGETTING = 0.02
_SCALE = (64.0, 64_000.0, 64_000.0)
"""A usual scan: the terms of the model are of one size then."""

_FITTED_EVERY = 16
_TRIED_EVERY = 32
_SHORTEST_S, _LONGEST_S = 0.001, 0.1  # sub-stages
_LONGEST_FACTOR = 20.0


class ScanLoad(NamedTuple):
    """The size of a scan."""

    clusters: int  # pairs of a query and a cluster
    codes: int  # vectors in the distinct clusters: each is read from memory once
    compared: int  # pairs of a query and a vector


class ScanCosts:
    """A linear model of the seconds of a scan, fitted to the latest scans; no term is negative."""

    def __init__(self, dimension: int) -> None:
        per_pair, read, compare = _PRIOR_S
        self._rates: Floats = np.array([per_pair, read * dimension, compare * dimension])
        self._scale = np.array(_SCALE)
        # sums of products: of the features with each other, and with the seconds
        self._gram = _PRIOR_SCANS * np.eye(3)
        self._moment = _PRIOR_SCANS * self._rates * self._scale
        self._unfitted = 0

    def seconds(self, load: ScanLoad) -> float:
        """Return the expected seconds of a scan."""
        return float(self._rates @ np.asarray(load, dtype=np.float64))

    def seconds_of_clusters(self, sizes: NDArray[np.int64], shared_by: NDArray[np.int64]) -> Floats:
        """Return the expected seconds of each of some clusters."""
        per_pair, read, compare = self._rates
        seconds: Floats = per_pair * shared_by + (read + compare * shared_by) * sizes
        return seconds

    def observe(self, load: ScanLoad, seconds: float) -> None:
        """Learn from the seconds that a scan took."""
        expected = self.seconds(load)
        seconds = min(seconds, _LONGEST_FACTOR * expected)  # the machine was busy otherwise
        features = np.array(load) / self._scale
        weighted = features / max(features @ features, 1e-12)  # errors count relatively
        self._gram += np.outer(weighted, features) - _FORGETTING * self._gram
        self._moment += weighted * seconds - _FORGETTING * self._moment
        self._unfitted += 1
        if self._unfitted >= _FITTED_EVERY:
            self._unfitted = 0
            ridge = 1e-6 * np.trace(self._gram) * np.eye(3)
            root = np.linalg.cholesky(self._gram + ridge)
            known = self._moment + ridge @ (self._rates * self._scale)
            fitted, _ = nnls(root.T, np.linalg.solve(root, known))
            self._rates = fitted / self._scale


class FasterWay:
    """Which of two ways to scan is faster for a load, by what scans took; thread-safe.

    Each `_TRIED_EVERY`th scan goes the other way, so that both are known.
    """

    def __init__(self, dimension: int) -> None:
        self._costs = ScanCosts(dimension), ScanCosts(dimension)
        self._lock = ForkSafeLock()
        self._asked = 0

    def is_first(self, first: ScanLoad, second: ScanLoad) -> bool:
        """Return whether to take the first way, given the load that each of them has."""
        with self._lock:
            self._asked += 1
            is_faster = self._costs[0].seconds(first) < self._costs[1].seconds(second)
            return is_faster != (self._asked % _TRIED_EVERY == 0)

    def observe(self, was_first: bool, load: ScanLoad, seconds: float) -> None:
        """Learn from the seconds that a scan took."""
        with self._lock:
            self._costs[not was_first].observe(load, seconds)


def sub_stage_s(overhead_s: float, searches: int, arriving_per_s: float, workers: int = 1) -> float:
    """Return how long a retrieval sub-stage should be (HedraRAG, Equation 1).

    Of a second, sub-stages of length mb spend b/mb on the overhead b of scheduling, for which all n
    searches wait; each of the r newcomers waits mb/(w+1) for the first of w workers. The sum n b/mb
    + r mb/(w+1) is least at sqrt((w+1) n b / r). The paper's equation, its overhead term with the
    right sign, is the case of one worker, one search, and one newcomer.
    """
    overhead_of_all_s = max(searches, 1) * overhead_s
    best = math.sqrt((workers + 1) * overhead_of_all_s / max(arriving_per_s, 1e-6))
    return min(max(best, _SHORTEST_S), _LONGEST_S)
