"""Scanning a batch, in whatever thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ctxreuse.workflow.ivf import IVFIndex
from ctxreuse.workflow.scan_queue import Found, ScanBatch


@dataclass(frozen=True, slots=True)
class Scanned:
    """What a scan has found, and how long the index took."""

    found: Found
    seconds: float


def scan(index: IVFIndex, batch: ScanBatch, clock: Callable[[], float]) -> Scanned:
    """Scan a batch; runs in any thread.

    Args:
        index: What is scanned.
        batch: What of it, for which queries.
        clock: Seconds from any start.

    Returns:
        What reaches the searches' thresholds: an equal score may win by its id.
    """
    began = clock()
    candidates = index.scan(batch.vectors, batch.rows, batch.clusters, batch.k)
    seconds = clock() - began
    nearness = candidates.scores if index.higher_is_better else -candidates.scores
    least = batch.thresholds.copy() if index.higher_is_better else -batch.thresholds
    for row in range(len(batch.searches)):
        found = nearness[batch.rows == row].ravel()
        if len(found) > batch.k:  # what its own k best in this batch beat cannot count
            least[row] = max(least[row], np.partition(found, -batch.k)[-batch.k])
    counts = nearness >= least[batch.rows][:, None]
    counts &= candidates.ids >= 0
    pairs, places = np.nonzero(counts)
    found_ones = Found(
        rows=batch.rows[pairs],
        scores=candidates.scores[pairs, places],
        ids=candidates.ids[pairs, places],
        clusters=batch.clusters[pairs],
    )
    return Scanned(found_ones, seconds)
