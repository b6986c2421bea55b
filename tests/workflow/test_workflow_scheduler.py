"""A scheduler whose jobs are done in any order, and any of them brought back undone."""

from itertools import count
from random import Random

from hypothesis import given
from hypothesis import strategies as st
from workflow_engines import BLOCKS, corpus_retriever, plain_search

from ctxreuse.workflow.vector_search.handle import NEVER, SearchHandle
from ctxreuse.workflow.vector_search.scheduler import Job, SearchScheduler

WORKERS = 3


def ticking_scheduler() -> SearchScheduler:
    ticks = count()
    return SearchScheduler(
        corpus_retriever(),
        workers=WORKERS,
        reorder=True,
        clock=lambda: next(ticks) * 1e-4,
    )


def embed_all(scheduler: SearchScheduler) -> None:
    embedding = scheduler.next_job()
    assert embedding is not None
    embedding.run()
    scheduler.finish(embedding)


@given(seed=st.integers(0, 9_999), searches=st.integers(40, 120))
def test_each_search_finds_what_faiss_finds_whichever_worker_does_its_jobs(seed, searches):
    draw = Random(seed)
    scheduler = ticking_scheduler()
    jobs: list[Job] = []
    coming = [
        SearchHandle(
            f"passage {draw.randrange(500)} of {number}",
            draw.randrange(1, 9),
            draw.choice((float(number), 0.0, NEVER)),
        )
        for number in range(searches)
    ]
    all_searches, there = list(coming), []

    def take_next() -> None:
        if (job := scheduler.next_job()) is not None:
            jobs.append(job)

    def some_job() -> Job:
        return jobs.pop(draw.randrange(len(jobs)))

    while coming or jobs:
        choice = draw.randrange(20)
        if coming and (choice < 12 or not jobs):
            there.append(coming.pop())
            scheduler.add(there[-1])
        elif choice == 12 and there:
            scheduler.remove(there.pop(draw.randrange(len(there))))
        elif choice == 13 and jobs:
            scheduler.return_job(some_job())
        elif jobs:
            job = some_job()
            job.run()
            assert all(search.outcome for search in scheduler.finish(job))
            take_next()
        while scheduler.starts_worker():
            take_next()
        assert len(jobs) <= WORKERS
    assert len(scheduler) == 0
    for search in there:
        found = [BLOCKS[number] for number in search.outcome.ids.tolist()]
        assert found == plain_search(search.text, search.k)
    for search in all_searches:
        scheduler.remove(search)
    assert sorted(scheduler._queue._free) == list(range(len(scheduler._queue._found)))


def test_without_a_last_search_the_nearest_cluster_comes_first():
    scheduler = ticking_scheduler()
    search = SearchHandle("passage 1", 3, 0.0)
    scheduler.add(search)
    assert scheduler.starts_worker()
    embed_all(scheduler)
    _, clusters = corpus_retriever().prepare(["passage 1"], [3])
    assert search.clusters.tolist() == clusters[0].tolist()
    assert search.recalled is None
