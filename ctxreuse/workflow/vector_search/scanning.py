"""Scanning a batch, in whatever thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ctxreuse.workflow.vector_search.ivf import IVFIndex
from ctxreuse.workflow.vector_search.scan_queue import ClusterFindings, ScanBatch

_PAIRS = 16
"""How many pairs of a search hold the first k of it, more or less."""


@dataclass(frozen=True, slots=True)
class Scanned:
    """What a scan has found, and how long the index took."""

    found: ClusterFindings
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
    least = batch.thresholds if index.higher_is_better else -batch.thresholds
    least = np.maximum(least, _least_of_best(nearness, batch))
    counts = nearness >= least[batch.rows][:, None]
    counts &= candidates.ids >= 0
    pairs, places = np.nonzero(counts)
    found_ones = ClusterFindings(
        rows=batch.rows[pairs],
        scores=candidates.scores[pairs, places],
        ids=candidates.ids[pairs, places],
        clusters=batch.clusters[pairs],
    )
    return Scanned(found_ones, seconds)


def _least_of_best(nearness: NDArray[np.float32], batch: ScanBatch) -> NDArray[np.float32]:
    """Return what the k best of each search in this batch alone reach, or less; shape (n,).

    Only the first few of each pair are looked at, which are its best: seldom are all k in one.
    """
    width = -(-batch.k // _PAIRS)
    counts = np.bincount(batch.rows, minlength=len(batch.searches))
    order = np.argsort(batch.rows, kind="stable")
    places = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    firsts = np.full((len(counts), int(counts.max()), width), -np.inf, dtype=np.float32)
    firsts[batch.rows[order], places] = nearness[order, :width]
    flat = firsts.reshape(len(counts), -1)
    if flat.shape[1] < batch.k:
        return np.full(len(counts), -np.inf, dtype=np.float32)
    at = flat.shape[1] - batch.k
    least: NDArray[np.float32] = np.partition(flat, at, axis=1)[:, at]
    return least
