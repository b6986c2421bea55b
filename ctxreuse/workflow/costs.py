"""What a scan of clusters will take, learned as scans run; how long a sub-stage should be."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

Floats = NDArray[np.float64]

_PRIOR_S = (5e-6, 0.12e-9, 0.08e-9)
"""Seconds of a cluster, and of a stored component: read from memory, and compared once."""

_PRIOR_SCANS = 2.0
_FADING = 0.98
_FITTED_EVERY = 8
_LONGEST_FACTOR = 20.0


class ScanLoad(NamedTuple):
    """How much a scan is.

    Attributes:
        clusters: Pairs of a query and a cluster.
        codes: Stored vectors in the distinct clusters: each is read from memory once.
        compared: Pairs of a query and a stored vector.
    """

    clusters: int
    codes: int
    compared: int


class ScanCosts:
    """A linear model of the seconds of a scan, fitted to the latest scans.

    A cluster that several queries need is read from memory once and compared for each of them, so
    the model has three terms: pairs of query and cluster, codes read, codes compared. None of them
    is negative.

    Args:
        dimension: Components of a vector; the model begins with what a component costs on a common
            machine.

    Example:
        >>> costs = ScanCosts(dimension=64)
        >>> for _ in range(100):
        ...     costs.observe(ScanLoad(clusters=10, codes=20_000, compared=20_000), 0.001)
        >>> round(costs.seconds(ScanLoad(clusters=10, codes=20_000, compared=20_000)), 5)
        0.001
    """

    def __init__(self, dimension: int) -> None:
        per_pair, read, compare = _PRIOR_S
        self._rates: Floats = np.array([per_pair, read * dimension, compare * dimension])
        # the prior counts as scans of one cluster, of one code read, and of one compared
        self._scale = np.array([64.0, 64_000.0, 64_000.0])
        self._gram: Floats = _PRIOR_SCANS * np.eye(3)
        self._moment: Floats = _PRIOR_SCANS * self._rates * self._scale
        self._unfitted = 0

    def seconds(self, load: ScanLoad) -> float:
        """Return what a scan will take."""
        return float(self._rates @ np.asarray(load, dtype=np.float64))

    def seconds_of_clusters(self, sizes: NDArray[np.int64], shared_by: NDArray[np.int64]) -> Floats:
        """Return what each of some clusters will take.

        Args:
            sizes: Codes in each cluster.
            shared_by: How many queries it is compared with.
        """
        per_pair, read, compare = self._rates
        seconds: Floats = per_pair * shared_by + (read + compare * shared_by) * sizes
        return seconds

    def observe(self, load: ScanLoad, seconds: float) -> None:
        """Learn what a scan has taken."""
        expected = self.seconds(load)
        seconds = min(seconds, _LONGEST_FACTOR * expected)  # the machine was busy with other things
        features = np.asarray(load, dtype=np.float64) / self._scale
        weight = 1.0 / max(float(features @ features), 1e-12)  # errors count relatively
        self._gram = _FADING * self._gram + weight * np.outer(features, features)
        self._moment = _FADING * self._moment + weight * seconds * features
        self._unfitted += 1
        if self._unfitted >= _FITTED_EVERY:
            self._unfitted = 0
            self._fit()

    def _fit(self) -> None:
        ridge = 1e-6 * np.trace(self._gram) * np.eye(3)
        root = np.linalg.cholesky(self._gram + ridge)
        target = np.linalg.solve(root, self._moment + ridge @ (self._rates * self._scale))
        fitted, _ = nnls(root.T, target)
        self._rates = fitted / self._scale


class MovingMean:
    """A mean in which the latest values count most.

    Args:
        value: Where it begins.
        weight: The weight of each new value.
    """

    def __init__(self, value: float, weight: float = 0.1) -> None:
        self.value = value
        self._weight = weight

    def add(self, value: float) -> None:
        """Take in a value."""
        self.value += self._weight * (value - self.value)


def sub_stage_s(
    retrieval_s: float, overhead_s: float, shortest_s: float = 0.001, longest_s: float = 0.05
) -> float:
    """Return how long a retrieval sub-stage should be (HedraRAG, Equation 1).

    A newcomer waits half a sub-stage of length mb, and a retrieval of length t pays the overhead b
    of scheduling t/mb times. mb/2 + b t/mb is least at sqrt(2 b t). (As printed, the equation has
    the overhead's sign the other way round, and grows without bound as mb goes to 0.)

    Args:
        retrieval_s: What a whole retrieval takes, in seconds.
        overhead_s: What scheduling a sub-stage takes, in seconds.
        shortest_s: No sub-stage is shorter.
        longest_s: None is longer.
    """
    return min(max(math.sqrt(2.0 * overhead_s * retrieval_s), shortest_s), longest_s)
