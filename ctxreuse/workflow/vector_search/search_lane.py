"""Searches of one vector index, as an event loop sees them: begun, watched, ended.

There is no barrier and no polling: workers go on as long as there is anything to do, and end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from ctxreuse.context.blocks import ContextBlock
from ctxreuse.context.fail_open import FailOpen
from ctxreuse.serving.aio.threads import Execute, Threads
from ctxreuse.workflow.vector_search.pending_search import ANY_TIME, PreviewSchedule, SearchHandle
from ctxreuse.workflow.vector_search.scan_queue import TopK
from ctxreuse.workflow.vector_search.search_work import LaneCounters, SearchScheduler, SearchUpdate
from ctxreuse.workflow.vector_search.sessions import KEPT, Integers, SearchRecord, Vectors
from ctxreuse.workflow.vector_search.tiers import BuiltTier, ClusterTier
from ctxreuse.workflow.vector_search.vector_retriever import VectorRetriever


class SearchExecutor:
    """Runs the searches of one retriever. For one event loop at a time.

    Args:
        retriever: The index, and what belongs to it.
        execute: Runs blocking work in another thread.
        threads: For the workers alone; None has `execute` do every job of theirs.
        workers: How many workers there may be.
        reorder: Whether a session's last search says where to look first.
        clock: Seconds from any start, for what things take.
    """

    def __init__(
        self,
        retriever: VectorRetriever,
        execute: Execute,
        *,
        threads: Threads | None = None,
        workers: int = 1,
        reorder: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._retriever = retriever
        self._execute = execute
        self._threads = threads
        self._work = SearchScheduler(retriever, workers=workers, reorder=reorder, clock=clock)
        self._at_work: set[Future[None] | asyncio.Task[None]] = set()
        self._rebuilding: asyncio.Task[None] | None = None
        self._failing = FailOpen(
            "SearchExecutor", "clusters are scanned where they are", work="filling the hot tier"
        )

    @property
    def counters(self) -> LaneCounters:
        """What has been done."""
        return self._work.counters

    def __len__(self) -> int:
        """Return how many searches are under way."""
        return len(self._work)

    @property
    def has_time(self) -> bool:
        """Whether a search that nobody waits for yet would keep hardly any other waiting."""
        return self._work.has_time

    def begin(
        self,
        text: str,
        k: int,
        due: float,
        record: SearchRecord | None = None,
        on_progress: Callable[[SearchHandle], None] | None = None,
        *,
        is_remembered: bool = True,
        looks: PreviewSchedule = ANY_TIME,
    ) -> SearchHandle:
        """Begin a search; its `ended` will hold the best k, or what went wrong.

        Args:
            text: The query.
            k: How many results.
            due: When its result is needed; the least is served first.
            record: The last search of its session.
            on_progress: Called when a part of it has been done, but not all.
            is_remembered: Whether more of its results are kept, for the next search.
            looks: When `on_progress` should be called: a sub-stage ends there.
        """
        kept = KEPT if is_remembered else k
        pending = SearchHandle(text, k, due, record, on_progress, kept, looks)
        self._work.add(pending)
        self._hire()
        return pending

    def cancel(self, pending: SearchHandle) -> None:
        """Drop a search, or let go of what one that has ended has found."""
        pending.ended.cancel()
        self._work.remove(pending)

    def progress(self, pending: SearchHandle) -> float:
        """Return how much of a search, from its beginning on, has been done, from 0 to 1."""
        return self._work.progress(pending)

    def preview(self, pending: SearchHandle) -> TopK | None:
        """Return the best results so far; None before the first."""
        return self._work.preview(pending)

    async def drain(self) -> None:
        """Wait until nothing runs in other threads."""
        while running := self._running():
            await asyncio.wait(running)

    def _running(self) -> set[asyncio.Future[None]]:
        # workers end at any moment: looked at once
        running = {asyncio.wrap_future(worker) for worker in tuple(self._at_work)}
        return running | {self._rebuilding} if self._rebuilding else running

    async def close(self) -> None:
        """Wait until nothing runs, and let the threads go; they start again if they are needed."""
        await self.drain()
        if self._threads is not None:
            self._threads.close()

    def blocks_of(self, ids: Integers) -> tuple[ContextBlock, ...]:
        """Return the blocks that ids stand for."""
        return self._retriever.blocks_of(ids)

    def nearness(self, best: TopK) -> Vectors:
        """Return how near results are, the higher the nearer."""
        return best.scores if self._retriever.index.higher_is_better else -best.scores

    def snapshot(self, pending: SearchHandle) -> SearchRecord | None:
        """Return what a search has found so far, without vectors; None before the first scan."""
        return self._work.snapshot(pending)

    async def with_vectors(self, record: SearchRecord) -> SearchRecord:
        """Return a record with the vectors of what was found."""
        index = self._retriever.index
        vectors = await self._execute(lambda: index.vectors_of(record.ids, record.found_in))
        return replace(record, vectors=vectors)

    # workers

    def _hire(self) -> None:
        while self._work.hire():
            if self._threads is None:
                worker: Any = asyncio.ensure_future(self._work_step_by_step())
            else:
                worker = self._threads.start(self._work_in_thread)
            self._at_work.add(worker)
            worker.add_done_callback(self._at_work.discard)

    def _work_in_thread(self) -> None:
        work = self._work
        try:
            while (job := work.next_job()) is not None:
                self._hire()
                self._tell_loops(work.finish(job, job.outcome()))
        except Exception as error:
            self._tell_loops(work.give_up(error))

    async def _work_step_by_step(self) -> None:
        work = self._work
        try:
            while (job := work.next_job()) is not None:
                self._hire()
                try:
                    outcome = await self._execute(job.outcome)
                except asyncio.CancelledError:  # the event loop ends
                    work.return_job(job)
                    raise
                self._tell(work.finish(job, outcome))
        except Exception as error:
            self._tell(work.give_up(error))

    def _tell_loops(self, news: list[SearchUpdate]) -> None:
        """Have the event loops tell who waits in them."""
        for loop in {one.pending.ended.get_loop() for one in news}:
            of_loop = [one for one in news if one.pending.ended.get_loop() is loop]
            try:
                loop.call_soon_threadsafe(self._tell, of_loop)
            except RuntimeError:  # it is closed, and nobody waits in it any more
                continue

    def _tell(self, news: list[SearchUpdate]) -> None:
        """Tell who waits for searches what has become of them."""
        for pending, outcome in news:
            if pending.ended.done():
                continue
            if outcome is None:
                if pending.on_progress is not None:
                    pending.on_progress(pending)
            elif isinstance(outcome, Exception):
                pending.ended.set_exception(outcome)
            else:
                pending.ended.set_result(outcome)
        tier = self._retriever.hot
        if tier is not None and tier.due() and self._rebuilding is None:
            self._rebuilding = asyncio.ensure_future(self._rebuild(tier))

    async def _rebuild(self, tier: ClusterTier[Any]) -> None:
        """Let the hot tier follow what is used most, beside the scans."""
        try:
            built: BuiltTier[Any] = await self._execute(tier.build)
            tier.swap(built)
        except Exception as error:
            self._failing.note(error)
        finally:
            self._rebuilding = None
