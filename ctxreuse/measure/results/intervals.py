"""Means with bootstrap intervals; Efron, "Bootstrap Methods" (1979)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_SCORES_AT_ONCE = 1_000_000


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its confidence interval."""

    mean: float
    low: float
    high: float


def bootstrap_interval(scores: Sequence[float], *, resamples: int = 10_000) -> Interval:
    """Return the mean of some scores, at least one, with its 95% percentile interval."""
    values, random = np.asarray(scores, dtype=np.float64), np.random.default_rng(0)
    means = np.empty(resamples)
    step = max(1, _SCORES_AT_ONCE // values.size)  # as many samples as fit into memory
    for start in range(0, resamples, step):
        part = means[start : start + step]
        part[:] = values[random.integers(0, values.size, (part.size, values.size))].mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return Interval(float(values.mean()), float(low), float(high))
