"""Decides a worker's next job for the searches of an index; no threads, locks or event loops."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from ctxreuse.workflow.vector_search.costs import ScanCosts, sub_stage_s
from ctxreuse.workflow.vector_search.handle import SearchHandle, SearchProgress
from ctxreuse.workflow.vector_search.ivf import IVFIndex
from ctxreuse.workflow.vector_search.scan_queue import ScanBatch, ScanQueue
from ctxreuse.workflow.vector_search.top_k import ClusterFindings, Ids, Scores, TopK, Vectors
from ctxreuse.workflow.vector_search.vector_retriever import VectorRetriever

_PAIRS = 16
"""The first k results of a search come from about this many pairs."""


@dataclass(slots=True, eq=False)
class EmbeddingJob:
    """Queries to embed together."""

    searches: list[SearchHandle]
    retriever: VectorRetriever
    found: list[tuple[Vectors, Ids] | Exception] = field(default_factory=list)
    """Of each search its vector and the clusters to probe, nearest first, or what went wrong."""

    def run(self) -> None:
        """Embed the queries; one by one if that fails, since one may have failed them all."""
        try:
            texts, k = zip(*[(search.text, search.k) for search in self.searches], strict=True)
            self.found = list(zip(*self.retriever.prepare(texts, k), strict=True))
        except Exception as error:
            if len(self.searches) == 1:
                self.found = [error]
                return
            for search in self.searches:
                alone = EmbeddingJob([search], self.retriever)
                alone.run()
                self.found += alone.found


@dataclass(slots=True, eq=False)
class ScanJob:
    """Clusters to scan together."""

    batch: ScanBatch
    index: IVFIndex
    clock: Callable[[], float]
    began_s: float  # when a worker began to choose the clusters
    seconds: float = 0.0  # that the index took
    found: ClusterFindings | Exception | None = None

    def run(self) -> None:
        """Find what reaches the searches' thresholds, or what goes wrong."""
        index, batch = self.index, self.batch
        try:
            began = self.clock()
            candidates = index.scan(batch.vectors, batch.rows, batch.clusters, batch.k)
            self.seconds = self.clock() - began
            nearness = candidates.scores if index.higher_is_better else -candidates.scores
            least = batch.thresholds if index.higher_is_better else -batch.thresholds
            least = np.maximum(least, _least_of_best(nearness, batch))
            counts = nearness >= least[batch.rows][:, None]  # an equal score may win by its id
            counts &= candidates.ids >= 0
            pairs, places = np.nonzero(counts)
            self.found = ClusterFindings(
                rows=batch.rows[pairs],
                scores=candidates.scores[pairs, places],
                ids=candidates.ids[pairs, places],
                clusters=batch.clusters[pairs],
            )
        except Exception as error:
            self.found = error


Job: TypeAlias = EmbeddingJob | ScanJob


def _least_of_best(nearness: Scores, batch: ScanBatch) -> Scores:
    """Return what the k best of each search in this batch alone reach, or less; shape (n,)."""
    # only the first few of each pair, its best: one pair rarely has all k
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


_LEAST_SCANS = 2.0
"""How long part of a search should take at least, compared with a scan's overhead."""

_WINDOW_S = 1.0  # in which arrivals are counted
_MOSTLY_IDLE = 0.4
"""Workers that are busy for no more of their time have some for speculative searches."""


class MovingMean:
    """A mean in which the latest values count most."""

    def __init__(self, value: float, weight: float = 0.1) -> None:
        self.value = value
        self._weight = weight

    def add(self, value: float) -> None:
        """Take in a value."""
        self.value += self._weight * (value - self.value)


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


@dataclass(slots=True)
class SearchCounters:
    """Counts of the work on the searches of an index."""

    searches: int = 0
    batches: int = 0
    pairs: int = 0
    clusters: int = 0
    scan_s: float = 0.0  # of the index, over all workers


class SearchScheduler:
    """The searches of one retriever; arguments as for `SearchExecutor`, which locks it."""

    def __init__(
        self, retriever: VectorRetriever, *, workers: int, reorder: bool, clock: Callable[[], float]
    ) -> None:
        index = retriever.index
        self.counters = SearchCounters()
        self._retriever = retriever
        self._workers = workers
        self._reorder = reorder
        self._clock = clock
        self._costs = ScanCosts(index.dimension)
        self._queue = ScanQueue(
            index.cluster_sizes,
            self._costs,
            dimension=index.dimension,
            higher_is_better=index.higher_is_better,
        )
        self._overhead_s = MovingMean(0.0005)
        self._arrivals = ArrivalRate()
        self._open: set[SearchHandle] = set()
        self._unembedded: list[SearchHandle] = []
        self._is_embedding = False
        self._working = 0

    def __len__(self) -> int:
        return len(self._open)

    @property
    def has_time(self) -> bool:
        """Whether a speculative search would delay few others, if any; needs no lock."""
        counters = self.counters
        usual_s = counters.scan_s / counters.searches if counters.searches else 0.0
        busy = self._arrivals.per_s(self._clock()) * usual_s / self._workers
        return len(self._open) < self._workers and busy < _MOSTLY_IDLE

    def add(self, search: SearchHandle) -> None:
        """Take in a search; the caller then asks `starts_worker`."""
        if not math.isinf(search.due):
            self._arrivals.note(self._clock())
        self._open.add(search)
        self._unembedded.append(search)

    def remove(self, search: SearchHandle) -> None:
        """Drop a search; of one that has ended nothing is left to drop."""
        self._open.discard(search)
        if search in self._unembedded:
            self._unembedded.remove(search)
        self._queue.remove(search)

    def progress(self, search: SearchHandle) -> SearchProgress:
        """Return how far a search is, and what it has found so far."""
        if isinstance(search.outcome, TopK):
            return SearchProgress(1.0, search.outcome)
        if search.slot < 0 or search.is_gone:
            return SearchProgress()
        best = self._queue.best(search) if search.scanned else None
        return SearchProgress(self._queue.prefix(search) / max(1, len(search.clusters)), best)

    def starts_worker(self) -> bool:
        """Return whether one more worker is to begin now; it counts as working from now on."""
        has_texts = bool(self._unembedded) and not self._is_embedding
        starts = (has_texts or self._queue.has_unscanned) and self._working < self._workers
        self._working += starts
        return starts

    def next_job(self) -> Job | None:
        """Return what a worker is to do now; None ends the worker."""
        began = self._clock()
        if self._unembedded and not self._is_embedding:
            self._is_embedding = True
            searches, self._unembedded = self._unembedded, []
            return EmbeddingJob(searches, self._retriever)
        waiting, overhead_s = len(self._queue), self._overhead_s.value
        arriving_per_s = self._arrivals.per_s(began)
        budget_s = sub_stage_s(overhead_s, waiting, arriving_per_s, self._workers)
        if waiting < self._workers:  # each takes a part
            part_s = self._queue.work_s() / (self._workers - self._working + 1)
            budget_s = min(budget_s, max(part_s, _LEAST_SCANS * overhead_s))
        batch = self._queue.next_batch(budget_s, overhead_s)
        if batch is None:
            self._working -= 1
            return None
        return ScanJob(batch, self._retriever.index, self._clock, began)

    def finish(self, job: Job) -> list[SearchHandle]:
        """Take in what a job has found, and return the searches whose owners are to be told."""
        if isinstance(job, EmbeddingJob):
            self._is_embedding = False
            return self._take_in_vectors(job)
        batch, found = job.batch, job.found
        assert found is not None, "the job has run"
        if isinstance(found, Exception):
            self._queue.return_unscanned(batch)
            return self._fail(batch.searches, found)
        self._costs.observe(batch.load, job.seconds)
        if self._retriever.hot is not None:
            self._retriever.hot.note(batch.clusters)
        present = self._queue.take_in(batch, found)
        told = [search for search in present if search.is_done or self._is_preview_due(search)]
        for search in told:
            self._note_told(search)
        self._overhead_s.add(self._clock() - job.began_s - job.seconds)
        counters = self.counters
        counters.batches += 1
        counters.pairs += len(batch.clusters)
        counters.clusters += int((np.diff(batch.clusters) != 0).sum()) + 1
        counters.scan_s += job.seconds
        return told

    def return_job(self, job: Job) -> None:
        """Take back a job that was not run; its worker ends."""
        self._working -= 1
        if isinstance(job, EmbeddingJob):
            self._is_embedding = False
            self._unembedded += [search for search in job.searches if search in self._open]
        else:
            self._queue.return_unscanned(job.batch)

    def give_up(self, error: Exception) -> list[SearchHandle]:
        """End all searches with the error of a worker, so that no run waits forever."""
        self._working -= 1
        self._is_embedding = False
        return self._fail(list(self._open), error)

    def _take_in_vectors(self, job: EmbeddingJob) -> list[SearchHandle]:
        told, index = [], self._retriever.index
        for search, found in zip(job.searches, job.found, strict=True):
            if search not in self._open:
                continue
            try:
                if isinstance(found, Exception):
                    raise found
                vector, clusters = found
                if search.record is not None:
                    higher = index.higher_is_better
                    search.recalled = search.record.nearest(vector, search.k, higher)
                    if self._reorder:
                        clusters = search.record.reordered(clusters)
                search.k, search.kept = min(search.k, index.size), min(search.kept, index.size)
                search.vector, search.clusters = vector, clusters
                search.schedule_preview(search.preview_at)
                self._queue.add(search)
            except Exception as error:
                told += self._fail([search], error)
                continue
            if search.is_done or search.preview_at is not None:
                self._note_told(search)
                told.append(search)
        return told

    def _is_preview_due(self, search: SearchHandle) -> bool:
        """Return whether the owner gets a preview: where it asked for one, or results changed."""
        changed_at = max(search.pause_at, search.changed_at)
        if search.preview_at is None or not search.previewed_at < changed_at <= search.scanned:
            return False
        return self._queue.prefix(search) >= search.pause_at

    def _note_told(self, search: SearchHandle) -> None:
        """Note that the owner of a search is told; end one that is done."""
        search.previewed_at = search.scanned
        if search.is_done:
            best = self._queue.best(search)
            self.counters.searches += 1
            self.remove(search)
            search.outcome = best  # last: the owner does not wait for the lock

    def _fail(self, searches: Iterable[SearchHandle], error: Exception) -> list[SearchHandle]:
        failed = [search for search in searches if search in self._open]
        for search in failed:
            self.remove(search)
            search.outcome = error
        return failed
