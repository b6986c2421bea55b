"""Runs the searches of one vector index: workers in threads, owners in event loops, no polling."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

from ctxreuse.context.fail_open import FailOpen
from ctxreuse.context.fork_safety import ForkSafeLock
from ctxreuse.serving.aio.concurrency import Execute, Threads
from ctxreuse.workflow.vector_search.handle import KEPT, SearchHandle, SearchProgress, SearchRecord
from ctxreuse.workflow.vector_search.hot_tier import ClusterTier
from ctxreuse.workflow.vector_search.scheduler import Job, SearchScheduler
from ctxreuse.workflow.vector_search.vector_retriever import VectorRetriever


class SearchExecutor:
    """Runs the searches of one retriever. For one event loop at a time."""

    def __init__(
        self,
        retriever: VectorRetriever,
        execute: Execute,
        *,
        threads: Threads | None,  # for the workers; None: `execute` runs each job
        workers: int,
        reorder: bool,
        clock: Callable[[], float],
    ) -> None:
        self.retriever = retriever
        self.execute = execute
        self.scheduler = SearchScheduler(retriever, workers=workers, reorder=reorder, clock=clock)
        self._threads = threads
        self._lock = ForkSafeLock()
        self._workers: set[Future[None] | asyncio.Task[None]] = set()
        self._rebuilding: asyncio.Task[None] | None = None
        self._failing = FailOpen(
            "SearchExecutor", "clusters are scanned where they are", work="filling the hot tier"
        )

    def begin(
        self,
        text: str,
        k: int,
        due: float,
        record: SearchRecord | None = None,
        *,
        preview_at: float | None = None,
        is_remembered: bool = True,
    ) -> SearchHandle:
        """Begin a search."""
        search = SearchHandle(text, k, due, KEPT if is_remembered else k, record, preview_at)
        search.loop = asyncio.get_running_loop()
        with self._lock:
            self.scheduler.add(search)
        self._start_workers()
        return search

    def cancel(self, search: SearchHandle) -> None:
        """Drop a search that may not have ended."""
        with self._lock:
            self.scheduler.remove(search)

    def progress(self, search: SearchHandle) -> SearchProgress:
        """Return how far a search is, and what it has found so far."""
        with self._lock:
            return self.scheduler.progress(search)

    async def close(self) -> None:
        """Wait until nothing runs, and end the threads; they start again if they are needed."""
        left: list[Any]
        while left := [one for one in (*self._workers, self._rebuilding) if one is not None]:
            await asyncio.wait([asyncio.wrap_future(one) for one in left])
        if self._threads is not None:
            self._threads.close()

    def _start_workers(self) -> None:
        while True:
            with self._lock:
                if not self.scheduler.starts_worker():
                    return
            if self._threads is None:
                worker: Any = asyncio.ensure_future(self._work_in_loop())
            else:
                worker = self._threads.start(self._work_in_thread)
            self._workers.add(worker)
            worker.add_done_callback(self._workers.discard)

    def _work_in_thread(self) -> None:
        try:
            for job in self._jobs():
                job.run()
        except Exception as error:
            self._give_up(error)

    async def _work_in_loop(self) -> None:
        try:
            for job in self._jobs():
                try:
                    await self.execute(job.run)
                except asyncio.CancelledError:  # the event loop ends
                    with self._lock:
                        self.scheduler.return_job(job)
                    raise
        except Exception as error:
            self._give_up(error)

    def _jobs(self) -> Iterator[Job]:
        """Yield a worker's jobs, each to be run, and take in what they find."""
        while True:
            with self._lock:
                job = self.scheduler.next_job()
            if job is None:
                return
            self._start_workers()  # if there is more to do
            yield job
            with self._lock:
                told = self.scheduler.finish(job)
            self._tell(told)

    def _give_up(self, error: Exception) -> None:
        with self._lock:
            told = self.scheduler.give_up(error)
        self._tell(told)

    def _tell(self, searches: list[SearchHandle]) -> None:
        """Have the event loops tell the owners that wait in them."""
        for search in searches:
            assert search.loop is not None, "begin has set it"
            try:
                search.loop.call_soon_threadsafe(self._note_news, search)
            except RuntimeError:  # the loop is closed, and nothing waits in it any more
                continue

    def _note_news(self, search: SearchHandle) -> None:
        """Tell the owner of a search; start a rebuild of the hot tier if it is time."""
        search.news.set()
        tier = self.retriever.hot
        if tier is not None and tier.due() and self._rebuilding is None:
            self._rebuilding = asyncio.ensure_future(self._rebuild(tier))

    async def _rebuild(self, tier: ClusterTier) -> None:
        try:
            tier.swap(await self.execute(tier.build))
        except Exception as error:
            self._failing.note(error)
        finally:
            self._rebuilding = None
