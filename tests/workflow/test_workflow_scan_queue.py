"""The queue of scans, and a scheduler whose jobs are done in any order and brought back undone."""

from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any

import numpy as np
import pytest
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st
from workflow_engines import BLOCKS, corpus_retriever, plain_search

from ctxreuse.workflow.vector_search import scan_queue
from ctxreuse.workflow.vector_search.costs import ScanCosts
from ctxreuse.workflow.vector_search.handle import NEVER, SearchHandle
from ctxreuse.workflow.vector_search.scan_queue import ScanBatch, ScanQueue
from ctxreuse.workflow.vector_search.scheduler import Job, SearchScheduler
from ctxreuse.workflow.vector_search.top_k import ClusterFindings

CLUSTERS, DIMENSION = 10, 4


@dataclass
class Corpus:
    """Scores of searches with what clusters hold, of which there are few: ties are common."""

    seed: int
    higher_is_better: bool
    members: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        draw = Random(self.seed)
        ids = list(range(60))
        draw.shuffle(ids)
        self.members = [[] for _ in range(CLUSTERS)]
        for number in ids:
            self.members[draw.randrange(CLUSTERS - 1)].append(number)

    def queue(self) -> ScanQueue:
        sizes = np.array([len(ids) for ids in self.members], dtype=np.int64)
        return ScanQueue(
            sizes, ScanCosts(DIMENSION), dimension=DIMENSION, higher_is_better=self.higher_is_better
        )

    def score(self, query: int, number: int) -> float:
        return float((query * 7 + number * number) % 11)

    def best(self, query: int, clusters: Any, k: int) -> list[tuple[float, int, int]]:
        """Return score, id and cluster of the k best, by score and then by id."""
        sign = -1.0 if self.higher_is_better else 1.0
        found = [
            (self.score(query, number), number, cluster)
            for cluster in clusters
            for number in self.members[cluster]
        ]
        return sorted(found, key=lambda one: (sign * one[0], one[1]))[:k]

    def scan(self, batch: ScanBatch) -> ClusterFindings:
        """Scan a batch as an index does: the k best of each pair that reach the threshold."""
        queries = batch.vectors[:, 0].astype(int)
        assert [search.vector[0] for search in batch.searches] == queries.tolist()
        found = [
            (row, score, number, cluster)
            for row, cluster in zip(batch.rows.tolist(), batch.clusters.tolist(), strict=True)
            for score, number, _ in self.best(queries[row], [cluster], batch.k)
            if (score >= batch.thresholds[row])
            == (self.higher_is_better or score == batch.thresholds[row])
        ]
        rows, scores, ids, clusters = zip(*found, strict=True) if found else ((), (), (), ())
        return ClusterFindings(
            np.array(rows, dtype=np.intp),
            np.array(scores, dtype=np.float32),
            np.array(ids, dtype=np.int64),
            np.array(clusters, dtype=np.int64),
        )


def search_for(
    query: int, clusters: Any, k: int = 3, due: float = 0.0, kept: int = 0
) -> SearchHandle:
    vector = np.full(DIMENSION, query, dtype=np.float32)
    return SearchHandle(
        "", k, due, kept, vector=vector, clusters=np.array(clusters, dtype=np.int64)
    )


def found_by(queue: ScanQueue, search: SearchHandle) -> list[tuple[float, int, int]]:
    best = queue.best(search)
    found = zip(best.scores.tolist(), best.ids.tolist(), best.found_in.tolist(), strict=True)
    return list(found)[: search.k]


def queue_with(*searches: SearchHandle, corpus: Corpus | None = None) -> ScanQueue:
    queue = (corpus or Corpus(0, False)).queue()
    for search in searches:
        queue.add(search)
    return queue


def next_of(queue: ScanQueue, budget_s: float = 100.0, *overhead_s: float) -> ScanBatch:
    batch = queue.next_batch(budget_s, *overhead_s)
    assert batch is not None
    return batch


def check_batch(batch: ScanBatch, shared_by: int) -> None:
    pairs = list(zip(batch.rows.tolist(), batch.clusters.tolist(), strict=True))
    assert len(set(pairs)) == len(pairs) == batch.load.clusters > 0
    assert (np.diff(batch.clusters) != 0).sum() + 1 == len(set(batch.clusters.tolist()))
    assert set(batch.rows.tolist()) == set(range(len(batch.searches)))
    assert max(np.bincount(batch.clusters)) <= shared_by
    for row, cluster in pairs:
        assert cluster in batch.searches[row].clusters


orders = st.permutations(range(CLUSTERS)).flatmap(
    lambda order: st.integers(0, CLUSTERS).map(lambda end: order[:end])
)


@examples(80)
@given(st.data(), st.integers(0, 99), st.booleans(), st.sampled_from((1, 4)), st.integers(1, 3))
def test_each_search_ends_with_its_best_whatever_fails(
    data, seed, higher_is_better, kept, shared_by
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan_queue, "SHARED_BY", shared_by)
        check_searches(data, Corpus(seed, higher_is_better), kept, shared_by)


def check_searches(data: Any, corpus: Corpus, kept: int, shared_by: int) -> None:
    queue = corpus.queue()
    draw = Random(data.draw(st.integers(0, 2**16), label="seed of what happens"))
    given_ = data.draw(
        st.lists(st.tuples(orders, st.integers(1, 8), st.integers(0, 3)), min_size=1, max_size=8)
    )
    coming = [
        search_for(number, clusters, k, float(due), kept * number)
        for number, (clusters, k, due) in enumerate(given_)
    ]
    all_searches = list(coming)
    there: list[SearchHandle] = []
    scanned: dict[SearchHandle, set[int]] = {search: set() for search in coming}
    in_flight: list[tuple[ScanBatch, ClusterFindings]] = []

    def end_one() -> None:
        batch, found = in_flight.pop(draw.randrange(len(in_flight)))
        if draw.random() < 0.2:
            queue.return_unscanned(batch)
            return
        present = queue.take_in(batch, found)
        assert present == [search for search in batch.searches if not search.is_gone]
        for row, cluster in zip(batch.rows.tolist(), batch.clusters.tolist(), strict=True):
            assert cluster not in scanned[batch.searches[row]]
            scanned[batch.searches[row]].add(cluster)

    def check() -> None:
        assert len(queue) == sum(not search.is_done for search in there)
        for search in there:
            empty = {one for one in search.clusters.tolist() if not corpus.members[one]}
            assert search.scanned == len(scanned[search] | empty)
            assert search.is_done == (search.scanned == len(search.clusters))
            query = int(search.vector[0])
            assert found_by(queue, search) == corpus.best(query, scanned[search], search.k)
            more = corpus.best(query, scanned[search], search.kept)
            assert queue.best(search).ids.tolist() == [number for _, number, _ in more]
            done = [one in scanned[search] | empty for one in search.clusters.tolist()]
            assert queue.prefix(search) == (done.index(False) if False in done else len(done))
            assert search.changed_at <= search.scanned

    for _ in range(80):
        choice = draw.randrange(6)
        if choice == 0 and coming:
            there.append(coming.pop())
            queue.add(there[-1])
        elif choice == 1 and there and draw.random() < 0.3:
            gone = there.pop(draw.randrange(len(there)))
            queue.remove(gone)
            queue.remove(gone)
        elif choice == 2 and there:
            draw.choice(there).due = float(draw.randrange(4))
        elif choice in (3, 4):
            batch = queue.next_batch(draw.choice((0.0, 5e-6, 2e-5, 1.0)))
            if batch is not None:
                check_batch(batch, shared_by)
                in_flight.append((batch, corpus.scan(batch)))
        elif in_flight:
            end_one()
        check()
    while coming:
        there.append(coming.pop())
        queue.add(there[-1])
    for _ in range(1_000):
        if not in_flight and not len(queue):
            break
        if (batch := queue.next_batch(1.0)) is not None:
            in_flight.append((batch, corpus.scan(batch)))
        end_one()
    check()
    for search in there:
        assert search.is_done
        assert found_by(queue, search) == corpus.best(
            int(search.vector[0]), search.clusters, search.k
        )
        queue.remove(search)
    assert queue.next_batch(1.0) is None
    assert queue.work_s() == 0.0
    assert not queue._states.any()
    assert not queue._demand.any()
    assert sorted(queue._free) == list(range(len(queue._found)))
    assert all(search.slot == -1 for search in all_searches if search.is_gone)


def test_who_is_due_first_chooses_and_whoever_needs_the_same_joins():
    late, early = search_for(1, [0, 1, 2], due=2.0), search_for(2, [2, 3, 1], due=1.0)
    queue = queue_with(late, early)
    batch = next_of(queue, 0.0)
    assert batch.searches == (early, late)
    assert batch.clusters.tolist() == [2, 2]
    late.due = 0.0
    following = next_of(queue, 0.0)
    assert following.searches == (late,)
    assert following.clusters.tolist() == [0]


def test_only_the_most_urgent_share_a_scan(monkeypatch):
    monkeypatch.setattr(scan_queue, "SHARED_BY", 2)
    searches = [search_for(number, [4], due=float(-number)) for number in range(5)]
    queue = queue_with(*searches)
    batches = [queue.next_batch(1.0) for _ in range(4)]
    assert [batch and batch.searches for batch in batches] == [
        (searches[4], searches[3]),
        (searches[2], searches[1]),
        (searches[0],),
        None,
    ]


def test_a_batch_fits_its_budget_but_is_never_empty():
    costs = ScanCosts(DIMENSION)
    queue = queue_with(search_for(1, range(CLUSTERS)))
    first = next_of(queue, 0.0)
    assert first.load.clusters == 1
    second = next_of(queue, 2.5 * costs.seconds(first.load))
    assert second.load.clusters == 2
    assert costs.seconds(second.load) <= 2.5 * costs.seconds(first.load)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0]])
def test_it_is_known_when_the_best_changed_last(order):
    corpus = Corpus(3, False)
    search = search_for(1, order)
    queue = queue_with(search, corpus=corpus)
    changes = [0]
    seen: list[Any] = [[]]
    while (batch := queue.next_batch(0.0)) is not None:
        queue.take_in(batch, corpus.scan(batch))
        seen.append(found_by(queue, search))
        if seen[-1] != seen[-2]:
            changes.append(search.scanned)
        assert search.changed_at == changes[-1]
    assert search.is_done


FULL = [cluster for cluster in range(CLUSTERS) if Corpus(0, False).members[cluster]]


def test_what_ends_a_search_is_scanned_without_what_only_others_need():
    early, late = search_for(1, FULL[:2], due=1.0), search_for(2, FULL[1:], due=2.0)
    queue = queue_with(late, early)
    batch = next_of(queue)
    assert set(batch.clusters.tolist()) == set(FULL[:2])
    assert batch.searches == (early, late)  # who is late shares what it needs, too
    assert set(next_of(queue).clusters.tolist()) == set(FULL[2:])


@pytest.mark.parametrize(("overhead_s", "ended"), [(0.0, 1), (1e-9, 1), (100.0, 3)])
def test_a_batch_ends_several_searches_where_its_overhead_costs_more(overhead_s, ended):
    searches = [search_for(n, FULL[3 * n : 3 * n + 3], due=float(n)) for n in range(3)]
    batch = next_of(queue_with(*searches), 100.0, overhead_s)
    assert set(batch.clusters.tolist()) == set(FULL[: 3 * ended])


@pytest.mark.parametrize(
    ("pause_at", "parts"), [(2, [2, len(FULL) - 2]), (0, [len(FULL)]), (len(FULL), [len(FULL)])]
)
def test_a_batch_ends_where_its_search_wants_to_be_looked_at(pause_at, parts):
    search = search_for(1, FULL)
    search.pause_at = pause_at
    queue = queue_with(search)
    sizes = []
    while (batch := queue.next_batch(budget_s=100.0)) is not None:
        sizes.append(len(batch.clusters))
    assert sizes == parts


def test_what_nobody_waits_for_is_scanned_only_where_nobody_waits():
    awaited, ahead = search_for(1, FULL, due=1.0), search_for(2, FULL, due=float("inf"))
    queue = queue_with(ahead, awaited)
    assert next_of(queue).searches == (awaited,)
    following = next_of(queue)
    assert following.searches == (ahead,)
    assert len(following.clusters) == 1  # somebody may come any moment


WORKERS = 3


@given(seed=st.integers(0, 9_999), searches=st.integers(40, 120))
def test_each_search_finds_what_faiss_finds_whichever_worker_does_its_jobs(seed, searches):
    draw = Random(seed)
    ticks = count()
    scheduler = SearchScheduler(
        corpus_retriever(), workers=WORKERS, reorder=True, clock=lambda: next(ticks) * 1e-4
    )
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
