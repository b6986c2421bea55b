"""The searches of one vector index, and what is to be done for them next.

Workers take jobs, do them, and bring back the results; whoever waits for a search hears of it from
the `SearchUpdate` that a worker then has. Nothing stands between one job of a worker and its next,
not even the event loop: it would be asked for each, and be busy with other things.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple, TypeAlias

import numpy as np

from ctxreuse.workflow.vector_search.costs import ArrivalRate, MovingMean, ScanCosts, sub_stage_s
from ctxreuse.workflow.vector_search.ivf import IVFIndex
from ctxreuse.workflow.vector_search.pending_search import SearchHandle
from ctxreuse.workflow.vector_search.scan_queue import ScanBatch, ScanQueue, TopK, VectorSearch
from ctxreuse.workflow.vector_search.scanning import Scanned, scan
from ctxreuse.workflow.vector_search.sessions import (
    KEPT,
    Integers,
    SearchRecord,
    Vectors,
    reordered,
)
from ctxreuse.workflow.vector_search.vector_retriever import VectorRetriever

_LEAST_SCANS = 2.0
"""How long part of a search should take at least, compared with a scan's overhead."""


@dataclass(slots=True)
class LaneCounters:
    """What has been done for the searches of an index.

    Attributes:
        searches: Searches that have ended.
        batches: Scans.
        pairs: Pairs of query and cluster that were scanned.
        clusters: Clusters that were read for them.
        scan_s: Seconds that the index took for them, over all workers.
        scheduling_s: Seconds that workers spent on choosing what to scan.
    """

    searches: int = 0
    batches: int = 0
    pairs: int = 0
    clusters: int = 0
    scan_s: float = 0.0
    scheduling_s: float = 0.0


class Embedded(NamedTuple):
    """Queries' vectors, and the clusters to probe for each, nearest first."""

    vectors: Vectors
    clusters: Integers


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """Queries to embed together."""

    batch: list[SearchHandle]
    retriever: VectorRetriever

    def outcome(self) -> Embedded | Exception:
        """Do it; in any thread."""
        try:
            return Embedded(*self.retriever.prepare([pending.text for pending in self.batch]))
        except Exception as error:
            return error


@dataclass(frozen=True, slots=True, eq=False)
class Scan:
    """Clusters to scan together.

    Attributes:
        began_s: When somebody began to choose them.
        is_ahead: Whether nobody waits for any of them.
    """

    batch: ScanBatch
    index: IVFIndex
    clock: Callable[[], float]
    began_s: float
    is_ahead: bool

    def outcome(self) -> Scanned | Exception:
        """Do it; in any thread."""
        try:
            return scan(self.index, self.batch, self.clock)
        except Exception as error:
            return error


_SEARCHES_A_BATCH = 12
_MOST_BATCHES = 6
"""So many batches are chosen at a time where so many searches wait for each."""

_MOSTLY_IDLE = 0.4
"""Workers that are busy for no more of their time have some for what is only expected."""

Job: TypeAlias = Embedding | Scan
Outcome: TypeAlias = Embedded | Scanned | Exception


class SearchUpdate(NamedTuple):
    """What has become of a search: the best k, or what went wrong; None is a part done."""

    pending: SearchHandle
    outcome: TopK | Exception | None


class SearchScheduler:
    """The searches of one retriever, shared by an event loop and the workers.

    Args:
        retriever: The index, and what belongs to it.
        workers: How many workers there may be.
        reorder: Whether a session's last search says where to look first.
        clock: Seconds from any start, for what things take.
    """

    def __init__(
        self,
        retriever: VectorRetriever,
        *,
        workers: int,
        reorder: bool,
        clock: Callable[[], float],
    ) -> None:
        index = retriever.index
        self.counters = LaneCounters()
        self._retriever = retriever
        self._workers = workers
        self._reorder = reorder
        self._clock = clock
        self._costs = ScanCosts(index.dimension)
        self._queue = ScanQueue(
            index.cluster_sizes,
            self._costs,
            dimension=index.dimension,
            worst=index.worst,
            higher_is_better=index.higher_is_better,
        )
        self._overhead_s = MovingMean(0.0005)
        self._arrivals = ArrivalRate()
        self._lock = Lock()
        self._open: set[SearchHandle] = set()
        self._of_search: dict[VectorSearch, SearchHandle] = {}
        self._unembedded: list[SearchHandle] = []
        self._is_embedding = False
        self._alone: list[SearchHandle] = []
        self._chosen: deque[ScanBatch] = deque()
        self._at_work = self._at_work_ahead = 0

    def __len__(self) -> int:
        """Return how many searches are under way."""
        return len(self._open)

    @property
    def has_time(self) -> bool:
        """Whether a search that nobody waits for yet would keep hardly any other waiting."""
        counters = self.counters
        usual_s = counters.scan_s / counters.searches if counters.searches else 0.0
        busy = self._arrivals.per_s(self._clock()) * usual_s / self._workers
        return len(self._open) < self._workers and busy < _MOSTLY_IDLE

    def add(self, pending: SearchHandle) -> None:
        """Take in a search; somebody must then see whether to `hire` a worker for it."""
        with self._lock:
            if not math.isinf(pending.due):
                self._arrivals.note(self._clock())
            self._open.add(pending)
            self._unembedded.append(pending)

    def remove(self, pending: SearchHandle) -> None:
        """Drop a search, or let go of what one that has ended has found."""
        with self._lock:
            self._open.discard(pending)
            for waiting in (self._unembedded, self._alone):
                if pending in waiting:
                    waiting.remove(pending)
            if pending.search is not None:
                self._of_search.pop(pending.search, None)
                self._queue.remove(pending.search)

    # what has been found so far

    def progress(self, pending: SearchHandle) -> float:
        """Return how much of a search, from its beginning on, has been done, from 0 to 1."""
        with self._lock:
            search = pending.search
            if search is None or search.is_gone:
                return 0.0
            return self._queue.prefix(search) / max(1, len(search.clusters))

    def preview(self, pending: SearchHandle) -> TopK | None:
        """Return the best k so far; None before the first scan."""
        with self._lock:
            search = pending.search
            if search is None or search.is_gone or not search.scanned:
                return None
            return self._queue.best(search)

    def snapshot(self, pending: SearchHandle) -> SearchRecord | None:
        """Return what a search has found so far, without vectors; None before the first scan."""
        with self._lock:
            search = pending.search
            if search is None or search.is_gone or not search.scanned:
                return None
            best = self._queue.best(search, KEPT)
            return SearchRecord(search.vector, search.clusters, best.ids, best.found_in)

    # what workers do

    def hire(self) -> bool:
        """Return whether one more worker is to begin now; it counts as at work from now on."""
        with self._lock:
            has_texts = bool(self._unembedded or self._alone) and not self._is_embedding
            is_all_taken = self._at_work >= self._workers
            has_scans = bool(self._chosen) or self._queue.has_unscanned(self._is_one_kept)
            if is_all_taken or not (has_texts or has_scans):
                return False
            self._at_work += 1
            return True

    def next_job(self) -> Job | None:
        """Return what a worker is to do now; with None it ends, and is not at work any more."""
        with self._lock:
            began = self._clock()
            if not self._is_embedding and (texts := self._next_texts()):
                self._is_embedding = True
                return Embedding(texts, self._retriever)
            if not self._chosen:
                self._choose(began)
            if not self._chosen:
                self._at_work -= 1
                return None
            batch = self._chosen.popleft()
            job = Scan(batch, self._retriever.index, self._clock, began, self._is_ahead(batch))
            self._at_work_ahead += job.is_ahead
            self.counters.scheduling_s += self._clock() - began
            return job

    def finish(self, job: Job, outcome: Outcome) -> list[SearchUpdate]:
        """Take in what has come of a job, and return who is to hear of it."""
        with self._lock:
            self._let_go(job)
            if isinstance(job, Embedding) and isinstance(outcome, Embedded):
                return self._take_in_vectors(job, outcome)
            if isinstance(job, Scan) and isinstance(outcome, Scanned):
                return self._take_in_scanned(job, outcome)
            assert isinstance(outcome, Exception), "a job's outcome is its own"
            return self._take_in_fault(job, outcome)

    def return_job(self, job: Job) -> None:
        """Take back a job that was not done; its worker ends."""
        with self._lock:
            self._at_work -= 1
            self._let_go(job)
            if isinstance(job, Embedding):
                self._alone += [pending for pending in job.batch if pending in self._open]
            else:
                self._queue.return_unscanned(job.batch)

    def give_up(self, error: Exception) -> list[SearchUpdate]:
        """End all searches, for a worker has failed and ends: nobody may wait for ever."""
        with self._lock:
            self._at_work -= 1
            self._is_embedding = False
            self._unembedded.clear()
            self._alone.clear()
            while self._chosen:
                self._queue.return_unscanned(self._chosen.popleft())
            return self._fail(list(self._open), error)

    @property
    def _is_one_kept(self) -> bool:
        """Whether a worker has to be kept from what is only expected, for who may come."""
        return 0 < self._at_work_ahead >= self._workers - 1

    @staticmethod
    def _is_ahead(batch: ScanBatch) -> bool:
        return not any(search.is_awaited for search in batch.searches)

    def _let_go(self, job: Job) -> None:
        if isinstance(job, Embedding):
            self._is_embedding = False
        else:
            self._at_work_ahead -= job.is_ahead

    def _choose(self, now_s: float) -> None:
        """Choose what to scan next.

        Where many wait, several batches are chosen at a time: the first one brings the queue back
        into the processor's caches, from which scans drive it out, the others cost a third.
        """
        budget_s, overhead_s = self._budget_s(now_s), self._overhead_s.value
        for _ in range(max(1, min(len(self._queue) // _SEARCHES_A_BATCH, _MOST_BATCHES))):
            batch = self._queue.next_batch(
                budget_s, overhead_s, only_awaited=self._is_one_kept or bool(self._chosen)
            )
            if batch is None:
                return
            self._chosen.append(batch)

    def _budget_s(self, now_s: float) -> float:
        searches, overhead_s = len(self._queue), self._overhead_s.value
        arriving_per_s = self._arrivals.per_s(now_s)
        budget_s = sub_stage_s(overhead_s, searches, arriving_per_s, self._workers)
        if searches < self._workers:  # each takes a part
            part_s = self._queue.work_s() / (self._workers - self._at_work + 1)
            budget_s = min(budget_s, max(part_s, _LEAST_SCANS * overhead_s))
        return budget_s

    def _next_texts(self) -> list[SearchHandle]:
        if self._alone:
            return [self._alone.pop()]
        texts, self._unembedded = self._unembedded, []
        return texts

    def _take_in_fault(self, job: Job, error: Exception) -> list[SearchUpdate]:
        if isinstance(job, Scan):
            self._queue.return_unscanned(job.batch)
            owners = [self._of_search.get(search) for search in job.batch.searches]
            return self._fail([owner for owner in owners if owner is not None], error)
        present = [pending for pending in job.batch if pending in self._open]
        if len(job.batch) == 1:
            return self._fail(present, error)
        self._alone += present  # one text may be at fault; the others need not fail with it
        return []

    def _take_in_vectors(self, job: Embedding, embedded: Embedded) -> list[SearchUpdate]:
        news = []
        for pending, vector, probed in zip(job.batch, *embedded, strict=True):
            if pending in self._open:
                try:
                    news.append(self._enter(pending, vector, probed[probed >= 0]))
                except Exception as error:
                    news += self._fail([pending], error)
        return news

    def _enter(self, pending: SearchHandle, vector: Vectors, clusters: Integers) -> SearchUpdate:
        index = self._retriever.index
        record = pending.record
        if record is not None:
            if record.vectors is not None:
                pending.local = _nearest(
                    vector, record, record.vectors, pending.k, index.higher_is_better
                )
            if self._reorder:
                clusters = reordered(clusters, record)
        k, kept = min(pending.k, index.size), min(pending.kept, index.size)
        pending.search = search = VectorSearch(vector, clusters, k, pending.due, kept)
        pending.set_pauses(search)
        self._queue.add(search)
        self._of_search[search] = pending
        return self._news_of(search)

    def _take_in_scanned(self, job: Scan, scanned: Scanned) -> list[SearchUpdate]:
        batch = job.batch
        self._costs.observe(batch.load, scanned.seconds)
        if self._retriever.hot is not None:
            self._retriever.hot.note(batch.clusters)
        present = self._queue.take_in(batch, scanned.found)
        news = [
            self._news_of(search)
            for search in present
            if search in self._of_search and (search.is_done or self._is_worth_a_look(search))
        ]
        self._overhead_s.add(self._clock() - job.began_s - scanned.seconds)
        counters = self.counters
        counters.batches += 1
        counters.pairs += len(batch.clusters)
        counters.clusters += int((np.diff(batch.clusters) != 0).sum()) + 1
        counters.scan_s += scanned.seconds
        return news

    def _is_worth_a_look(self, search: VectorSearch) -> bool:
        """Return whether its owner should look: where it wished to, and when its best change."""
        is_news = search.looked_at < max(search.pause_at, search.changed_at) <= search.scanned
        if not is_news or self._of_search[search].on_progress is None:
            return False
        return self._queue.prefix(search) >= search.pause_at

    def _news_of(self, search: VectorSearch) -> SearchUpdate:
        if not search.is_done:
            search.looked_at = search.scanned
            return SearchUpdate(self._of_search[search], None)
        pending = self._of_search.pop(search)
        self._open.discard(pending)
        self.counters.searches += 1
        return SearchUpdate(pending, self._queue.best(search))

    def _fail(self, those: Iterable[SearchHandle], error: Exception) -> list[SearchUpdate]:
        news = []
        for pending in those:
            self._open.discard(pending)
            if pending.search is not None:
                self._of_search.pop(pending.search, None)
                self._queue.remove(pending.search)
            news.append(SearchUpdate(pending, error))
        return news


def _nearest(
    vector: Vectors, record: SearchRecord, vectors: Vectors, k: int, higher_is_better: bool
) -> Integers:
    """Return the k of a record's results that are nearest to a query."""
    near = vectors @ vector if higher_is_better else -((vectors - vector) ** 2).sum(axis=1)
    return record.ids[np.lexsort((record.ids, -near))[:k]]
