"""Workers that take the jobs of many searches, in any order, and bring back any of them undone."""

from __future__ import annotations

import asyncio
from itertools import count
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from workflow_engines import BLOCKS, corpus_retriever, plain_search

from ctxreuse.workflow.vector_search.pending_search import NEVER, SearchHandle
from ctxreuse.workflow.vector_search.search_work import Job, SearchScheduler

WORKERS = 3


def ticking_work() -> SearchScheduler:
    ticks = count()
    return SearchScheduler(
        corpus_retriever(),
        workers=WORKERS,
        reorder=True,
        clock=lambda: next(ticks) * 1e-4,
    )


@settings(deadline=None)
@given(seed=st.integers(0, 9_999), searches=st.integers(40, 120))
def test_each_search_finds_what_faiss_finds_whoever_does_its_jobs(seed: int, searches: int) -> None:
    draw = Random(seed)
    work = ticking_work()
    jobs: list[Job] = []

    async def main() -> None:
        coming = [
            SearchHandle(
                f"passage {draw.randrange(500)} of {number}",
                draw.randrange(1, 9),
                draw.choice((float(number), 0.0, NEVER)),
                None,
                None,
                kept=0,
            )
            for number in range(searches)
        ]
        all_searches, there = list(coming), []

        def hire() -> None:
            while work.hire():
                take_next()

        def take_next() -> None:
            if (job := work.next_job()) is not None:
                jobs.append(job)

        def some_job() -> Job:
            return jobs.pop(draw.randrange(len(jobs)))

        while coming or jobs:
            choice = draw.randrange(20)
            if coming and (choice < 12 or not jobs):
                there.append(coming.pop())
                work.add(there[-1])
            elif choice == 12 and there:
                gone = there.pop(draw.randrange(len(there)))
                gone.ended.cancel()
                work.remove(gone)
            elif choice == 13 and jobs:
                work.return_job(some_job())
            elif jobs:
                job = some_job()
                for pending, best in work.finish(job, job.outcome()):
                    if best is not None and not pending.ended.done():
                        assert not isinstance(best, Exception)
                        pending.ended.set_result(best)
                take_next()
            hire()
            assert len(jobs) <= WORKERS
        assert len(work) == 0
        for pending in there:
            found = [BLOCKS[number] for number in pending.ended.result().ids.tolist()]
            assert found == plain_search(pending.text, pending.k)
        for pending in all_searches:
            work.remove(pending)
        assert not work._chosen
        assert sorted(work._queue._free) == list(range(len(work._queue._scores)))

    asyncio.run(main())


def test_where_many_wait_batches_are_chosen_several_at_a_time() -> None:
    work = ticking_work()

    async def main() -> None:
        for number in range(40):
            work.add(SearchHandle(f"passage {number}", 3, float(number), None, None, kept=3))
        assert work.hire()
        embedding = work.next_job()
        assert embedding is not None
        work.finish(embedding, embedding.outcome())
        assert work.next_job() is not None
        assert len(work._chosen) == 2
        work.give_up(RuntimeError("a fault"))
        assert not work._chosen
        assert len(work) == 0

    asyncio.run(main())
