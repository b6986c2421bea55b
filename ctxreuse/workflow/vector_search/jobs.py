"""What workers do for searches: embed queries, scan clusters. A job runs in any thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from ctxreuse.workflow.vector_search.handle import SearchHandle
from ctxreuse.workflow.vector_search.ivf import IVFIndex
from ctxreuse.workflow.vector_search.scan_queue import ScanBatch
from ctxreuse.workflow.vector_search.top_k import ClusterFindings, Ids, Scores, Vectors
from ctxreuse.workflow.vector_search.vector_retriever import VectorRetriever

_PAIRS = 16
"""The first k results of a search come from about this many pairs."""


class Embedded(NamedTuple):
    """Queries' vectors, and the clusters to probe for each, nearest first."""

    vectors: Vectors
    clusters: Ids


class Scanned(NamedTuple):
    """What a scan has found, and how long the index took."""

    found: ClusterFindings
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingJob:
    """Queries to embed together."""

    searches: list[SearchHandle]
    retriever: VectorRetriever

    def run(self) -> Embedded | Exception:
        """Return the vectors, or what went wrong."""
        try:
            return Embedded(*self.retriever.prepare([search.text for search in self.searches]))
        except Exception as error:
            return error


@dataclass(frozen=True, slots=True, eq=False)
class ScanJob:
    """Clusters to scan together.

    Attributes:
        batch: The pairs of query and cluster.
        index: The index that is scanned.
        clock: Seconds from any start.
        began_s: When a worker began to choose the clusters.
        is_speculative: Whether no run waits for any of the searches.
    """

    batch: ScanBatch
    index: IVFIndex
    clock: Callable[[], float]
    began_s: float
    is_speculative: bool

    def run(self) -> Scanned | Exception:
        """Return what reaches the searches' thresholds, or what went wrong.

        An equal score counts: it may win by its id.
        """
        try:
            return self._scanned()
        except Exception as error:
            return error

    def _scanned(self) -> Scanned:
        index, batch = self.index, self.batch
        began = self.clock()
        candidates = index.scan(batch.vectors, batch.rows, batch.clusters, batch.k)
        seconds = self.clock() - began
        nearness = candidates.scores if index.higher_is_better else -candidates.scores
        least = batch.thresholds if index.higher_is_better else -batch.thresholds
        least = np.maximum(least, _least_of_best(nearness, batch))
        counts = nearness >= least[batch.rows][:, None]
        counts &= candidates.ids >= 0
        pairs, places = np.nonzero(counts)
        found = ClusterFindings(
            rows=batch.rows[pairs],
            scores=candidates.scores[pairs, places],
            ids=candidates.ids[pairs, places],
            clusters=batch.clusters[pairs],
        )
        return Scanned(found, seconds)


Job: TypeAlias = EmbeddingJob | ScanJob
Outcome: TypeAlias = Embedded | Scanned | Exception


def _least_of_best(nearness: Scores, batch: ScanBatch) -> Scores:
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
    least: Scores = np.partition(flat, at, axis=1)[:, at]
    return least
