"""Searches of one vector index: embedded together, scanned together, sub-stage by sub-stage.

There is no barrier and no polling: a batch begins when a search arrives or another batch has ended,
as long as a worker is free.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from ctxreuse.blocks import ContextBlock
from ctxreuse.fail_open import FailOpen
from ctxreuse.workflow.costs import ArrivalRate, MovingMean, ScanCosts, sub_stage_s
from ctxreuse.workflow.history import KEPT, Integers, SearchRecord, Vectors, reordered
from ctxreuse.workflow.pending_search import PendingSearch
from ctxreuse.workflow.scan_queue import Best, ScanBatch, ScanQueue, Search
from ctxreuse.workflow.scanning import Scanned, timed_scan
from ctxreuse.workflow.threads import Execute
from ctxreuse.workflow.tiers import BuiltTier, ClusterTier
from ctxreuse.workflow.vector_retriever import VectorRetriever

_Result = TypeVar("_Result")

_LEAST_SCANS = 2.0
"""How long a scan should be at least, compared with its overhead."""


@dataclass(slots=True)
class LaneCounters:
    """What a lane has done.

    Attributes:
        searches: Searches that have ended.
        batches: Scans.
        pairs: Pairs of query and cluster that were scanned.
        clusters: Clusters that were read for them.
        scan_s: Seconds of scanning, over all workers.
        scheduling_s: Seconds spent on deciding what to scan, and on taking in what was found.
    """

    searches: int = 0
    batches: int = 0
    pairs: int = 0
    clusters: int = 0
    scan_s: float = 0.0
    scheduling_s: float = 0.0


class SearchLane:
    """Runs the searches of one retriever. For one event loop.

    Args:
        retriever: The index, and what belongs to it.
        execute: Runs blocking work in another thread.
        scan_in: Runs scans, `workers` at a time, one more waiting; None takes `execute`.
        workers: How many scans may run at a time.
        reorder: Whether a session's last search says where to look first.
        clock: Seconds from any start, for what things take.
    """

    def __init__(
        self,
        retriever: VectorRetriever,
        execute: Execute,
        *,
        scan_in: Execute | None = None,
        workers: int = 1,
        reorder: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        index = retriever.index
        self.counters = LaneCounters()
        self._retriever = retriever
        self._execute = execute
        self._scan_in = execute if scan_in is None else scan_in
        self._workers = workers
        # where threads take scans from a queue, one waits in it, so that no thread waits for us
        self._most_scans = workers if scan_in is None else workers + 1
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
        self._running: set[asyncio.Future[Any]] = set()
        self._scanning = 0
        self._unembedded: list[PendingSearch] = []
        self._is_embedding = False
        self._is_rebuilding = False
        self._rebuilding = FailOpen(
            "SearchLane", "clusters are scanned where they are", work="filling the hot tier"
        )
        self._pending: dict[Search, PendingSearch] = {}
        self._overhead_s = MovingMean(0.0005)
        self._arrivals = ArrivalRate()

    def __len__(self) -> int:
        """Return how many searches are under way."""
        return len(self._pending) + len(self._unembedded)

    @property
    def has_idle_worker(self) -> bool:
        """Whether a search that nobody waits for would keep no other from being scanned."""
        return len(self) < self._workers

    def begin(
        self,
        text: str,
        k: int,
        due: float,
        record: SearchRecord | None = None,
        on_progress: Callable[[PendingSearch], None] | None = None,
        *,
        is_remembered: bool = True,
    ) -> PendingSearch:
        """Begin a search; its `ended` will hold the best k, or what went wrong.

        Args:
            text: The query.
            k: How many results.
            due: When its result is needed; the least is served first.
            record: The last search of its session.
            on_progress: Called when a part of it has been done, but not all.
            is_remembered: Whether more of its results are kept, for the next search.
        """
        self._arrivals.note(self._clock())
        pending = PendingSearch(text, k, due, record, on_progress, KEPT if is_remembered else k)
        self._unembedded.append(pending)
        self._embed()
        return pending

    def cancel(self, pending: PendingSearch) -> None:
        """Drop a search, or let go of what one that has ended has found."""
        pending.ended.cancel()
        if pending in self._unembedded:
            self._unembedded.remove(pending)
        if pending.search is not None:
            self._pending.pop(pending.search, None)
            self._queue.remove(pending.search)

    def progress(self, pending: PendingSearch) -> float:
        """Return how much of a search, from its beginning on, has been done, from 0 to 1."""
        search = pending.search
        if search is None or search.is_gone:
            return 0.0
        return self._queue.prefix(search) / max(1, len(search.clusters))

    def pause(self, pending: PendingSearch, progress: float) -> None:
        """Have a sub-stage end when so much of a search has been done, for `on_progress`."""
        if pending.search is not None:
            pending.search.pause_at = math.ceil(progress * len(pending.search.clusters))

    def preview(self, pending: PendingSearch) -> Best | None:
        """Return the best results so far; None before the first."""
        if pending.search is None or pending.search.is_gone or not pending.search.scanned:
            return None
        return self._queue.best(pending.search)

    async def drain(self) -> None:
        """Wait until nothing runs in other threads."""
        while self._running:
            await asyncio.wait(self._running)

    def blocks_of(self, ids: Integers) -> tuple[ContextBlock, ...]:
        """Return the blocks that ids stand for."""
        return self._retriever.blocks_of(ids)

    def nearness(self, best: Best) -> Vectors:
        """Return how near results are, the higher the nearer."""
        return best.scores if self._retriever.index.higher_is_better else -best.scores

    def snapshot(self, pending: PendingSearch) -> SearchRecord | None:
        """Return what a search has found so far, without vectors; None before the first scan."""
        search = pending.search
        if search is None or search.is_gone or not search.scanned:
            return None
        best = self._queue.best(search, KEPT)
        return SearchRecord(search.vector, search.clusters, best.ids, best.found_in)

    async def with_vectors(self, record: SearchRecord) -> SearchRecord:
        """Return a record with the vectors of what was found."""
        index = self._retriever.index
        vectors = await self._execute(lambda: index.vectors_of(record.ids, record.found_in))
        return replace(record, vectors=vectors)

    # embedding: whatever waits goes together

    def _embed(self) -> None:
        if self._is_embedding or not self._unembedded:
            return
        batch, self._unembedded = self._unembedded, []
        self._is_embedding = True
        self._start(self._embedded(batch), lambda embedding: self._note_embedded(batch, embedding))

    def _note_embedded(self, batch: list[PendingSearch], embedding: asyncio.Future[None]) -> None:
        self._is_embedding = False
        if embedding.cancelled():
            return  # the event loop ends
        self._guarded(self._embed)
        error = embedding.exception()
        if isinstance(error, Exception):
            for pending in batch:
                _fail(pending, error)

    async def _embedded(self, batch: list[PendingSearch]) -> None:
        retriever = self._retriever
        texts = [pending.text for pending in batch]
        try:
            vectors, clusters = await self._execute(lambda: retriever.prepare(texts))
        except Exception as error:
            if len(batch) > 1:  # one text may be at fault; the others need not fail with it
                for pending in batch:
                    await self._embedded([pending])
            else:
                _fail(batch[0], error)
            return
        for pending, vector, probed in zip(batch, vectors, clusters, strict=True):
            if not pending.ended.done():
                self._enter(pending, vector, probed[probed >= 0])
        self._dispatch()

    def _enter(self, pending: PendingSearch, vector: Vectors, clusters: Integers) -> None:
        index = self._retriever.index
        if pending.record is not None:
            if pending.record.vectors is not None:
                pending.local = _nearest(
                    vector,
                    pending.record,
                    pending.record.vectors,
                    pending.k,
                    index.higher_is_better,
                )
            if self._reorder:
                clusters = reordered(clusters, pending.record)
        k, kept = min(pending.k, index.size), min(pending.kept, index.size)
        pending.search = search = Search(vector, clusters, k, pending.due, kept)
        self._queue.add(search)
        if search.is_done:
            self._end(pending)
            return
        self._pending[search] = pending
        self._tell(pending)

    # scanning

    def _dispatch(self) -> None:
        while self._scanning < self._scans_at_a_time():
            began = self._clock()
            least_s = _LEAST_SCANS * self._overhead_s.value
            budget_s = sub_stage_s(
                self._overhead_s.value, len(self._queue), self._arrivals.per_s(began)
            )
            if len(self._queue) < self._workers:  # each takes a part
                free = self._workers - self._scanning
                budget_s = min(budget_s, max(self._queue.work_s() / free, least_s))
            batch = self._queue.next_batch(budget_s, least_s)
            if batch is None:
                return
            self._scanning += 1
            self._begin_scan(batch, self._clock() - began)

    def _scans_at_a_time(self) -> int:
        """Return how many scans to have under way; one may wait where there is much to do."""
        return self._workers if len(self._queue) <= self._workers else self._most_scans

    def _begin_scan(self, batch: ScanBatch, scheduling_s: float) -> None:
        index = self._retriever.index
        self._start(
            self._scan_in(lambda: timed_scan(index, batch, self._clock)),
            lambda scanned: self._guarded(lambda: self._end_scan(batch, scanned, scheduling_s)),
        )

    def _end_scan(
        self, batch: ScanBatch, scanned: asyncio.Future[Scanned], scheduling_s: float
    ) -> None:
        self._scanning -= 1
        if scanned.cancelled():  # the event loop ends
            self._queue.return_unscanned(batch)
            return
        error = scanned.exception()
        if error is not None:
            self._queue.return_unscanned(batch)
            self._fail_all(batch.searches, error)
            self._dispatch()
            return
        result, came = scanned.result(), self._clock()
        scan_s = result.ended_s - result.began_s
        self._costs.observe(batch.load, scan_s)
        self._note_accesses(batch)
        present = self._queue.take_in(batch, result.found)
        scheduling_s += self._clock() - came
        self._overhead_s.add(scheduling_s + came - result.ended_s)
        self._count(batch, scan_s, scheduling_s)
        self._dispatch()
        for search in present:
            if search not in self._pending:
                continue
            pending = self._pending[search]
            if search.is_done:
                del self._pending[search]
                self._end(pending)
            else:
                self._tell(pending)

    def _count(self, batch: ScanBatch, scan_s: float, scheduling_s: float) -> None:
        counters = self.counters
        counters.batches += 1
        counters.pairs += len(batch.clusters)
        counters.clusters += int((np.diff(batch.clusters) != 0).sum()) + 1
        counters.scan_s += scan_s
        counters.scheduling_s += scheduling_s

    def _guarded(self, work: Callable[[], None]) -> None:
        """Do what nobody waits for; if it fails, no search may wait for ever."""
        try:
            work()
        except Exception as error:
            self._fail_all(list(self._pending), error)

    def _fail_all(self, searches: Iterable[Search], error: BaseException) -> None:
        for search in searches:
            if search in self._pending:
                pending = self._pending.pop(search)
                self._queue.remove(search)
                _fail(pending, error)

    def _note_accesses(self, batch: ScanBatch) -> None:
        """Let the hot tier count, and follow what is used most, beside the scans."""
        tier = self._retriever.hot
        if tier is not None:
            tier.note(batch.clusters)
            if tier.due() and not self._is_rebuilding:
                self._is_rebuilding = True
                self._start(self._execute(tier.build), lambda built: self._swap(tier, built))

    def _swap(self, tier: ClusterTier[Any], built: asyncio.Future[BuiltTier[Any]]) -> None:
        self._is_rebuilding = False
        if not built.cancelled():
            self._rebuilding.attempt(lambda: tier.swap(built.result()), lambda: None)

    def _tell(self, pending: PendingSearch) -> None:
        """Tell who waits for it that a part of a search has been done."""
        if pending.on_progress is not None:
            pending.on_progress(pending)

    def _end(self, pending: PendingSearch) -> None:
        assert pending.search is not None, "a search ends after it has begun"
        self.counters.searches += 1
        if not pending.ended.done():
            pending.ended.set_result(self._queue.best(pending.search))

    def _start(
        self, work: Awaitable[_Result], then: Callable[[asyncio.Future[_Result]], None]
    ) -> None:
        task = asyncio.ensure_future(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(then)


def _nearest(
    vector: Vectors, record: SearchRecord, vectors: Vectors, k: int, higher_is_better: bool
) -> Integers:
    """Return the k of a record's results that are nearest to a query."""
    near = vectors @ vector if higher_is_better else -((vectors - vector) ** 2).sum(axis=1)
    return record.ids[np.lexsort((record.ids, -near))[:k]]


def _fail(pending: PendingSearch, error: BaseException) -> None:
    if not pending.ended.done():
        pending.ended.set_exception(error)
