"""Which clusters to scan next, and for which queries: searches, cluster by cluster.

A search is a query and the clusters that it has to scan. Its nodes are split (HedraRAG, section
4.2): what one call to the index scans is a batch of (query, cluster) pairs that fits a time budget,
and searches join and leave between batches. Four rules make up a batch:

- who is due first chooses: its next clusters, in its own order, as far as the budget goes. What
  ends it is a batch of its own, for results come with whole batches: with equal searches that is
  first come, first served, which has the least mean wait. Only where so many wait that the overhead
  of a batch costs all of them more, it ends several;
- whoever needs a chosen cluster, too, scans it now: a cluster is read from memory once and then
  compared with all of them, at a third of the cost. Beyond some queries that gains nothing more, so
  only the most urgent ones join;
- searches that nobody waits for yet take part only where there are no others;
- pairs of one cluster stand together.

The result does not depend on any of this: it is the best k over all clusters of a search, by score
and then by id.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxreuse.workflow.vector_search.costs import Floats, ScanCosts, ScanLoad
from ctxreuse.workflow.vector_search.sessions import Integers, Vectors

SHARED_BY = 16
"""Queries that share a scan of a cluster: with so many the comparing, not the reading, takes the
time."""

_UNAWAITED_SCANS = 2.0
"""How long a scan for a search that nobody waits for yet takes, compared with its overhead."""

_STRETCH = 1.3
"""How far a budget may be exceeded for a search to end: better than a batch for what is left."""


@dataclass(slots=True, eq=False)
class VectorSearch:
    """A search on its way through its clusters.

    Args:
        vector: The query, shape (d,).
        clusters: What to scan, in this order, each once.
        k: How many results are asked for.
        due: When its result is needed, on any scale; the least is served first.
        kept: How many of the best are kept; k if that is more.

    Attributes:
        scanned: How many clusters have been scanned.
        changed_at: How many had been when the best k changed last.
        looked_at: How many had been when its owner was told last.
        pause_at: After how many of its clusters a batch should end, so that its owner can look;
            0 for none.
        pause_every: After how many more each later one should; 0 lets them take what fits.
        is_done: Whether all have been.
    """

    vector: Vectors
    clusters: Integers
    k: int
    due: float
    kept: int = 0
    scanned: int = field(default=0, init=False)
    changed_at: int = field(default=0, init=False)
    looked_at: int = field(default=-1, init=False)
    pause_at: int = field(default=0, init=False)
    pause_every: int = field(default=0, init=False)
    is_done: bool = field(default=False, init=False)
    slot: int = field(default=-1, init=False)
    in_flight: int = field(default=0, init=False)
    is_gone: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.kept = max(self.kept, self.k)

    @property
    def is_awaited(self) -> bool:
        """Whether anybody waits for it: else it is never due."""
        return not math.isinf(self.due)

    @property
    def is_all_begun(self) -> bool:
        """Whether each of its clusters has been scanned, or is being scanned."""
        return self.scanned + self.in_flight == len(self.clusters)


@dataclass(frozen=True, slots=True, eq=False)
class ScanBatch:
    """Pairs of query and cluster to scan in one call; it shares no memory with the queue.

    Attributes:
        searches: The searches that take part.
        vectors: Their queries, shape (n, d).
        thresholds: The score that a result must reach to count for each, shape (n,).
        rows: Which search each pair is of, shape (r,).
        clusters: The cluster of each pair, equal ones together, shape (r,).
        k: Results that each pair may bring.
        load: How much it is.
    """

    searches: tuple[VectorSearch, ...]
    vectors: Vectors
    thresholds: NDArray[np.float32]
    rows: NDArray[np.intp]
    clusters: Integers
    k: int
    load: ScanLoad


@dataclass(frozen=True, slots=True, eq=False)
class ClusterFindings:
    """What a batch has found that may count, all of shape (m,).

    Attributes:
        rows: Which of the batch's searches it is for.
        scores: How near it is.
        ids: What was found.
        clusters: Where.
    """

    rows: NDArray[np.intp]
    scores: NDArray[np.float32]
    ids: Integers
    clusters: Integers


@dataclass(frozen=True, slots=True, eq=False)
class TopK:
    """The best results of a search so far, best first; all of shape (n,).

    Attributes:
        scores: How near they are.
        ids: What they are.
        found_in: The cluster of each.
    """

    scores: NDArray[np.float32]
    ids: Integers
    found_in: Integers


class ScanQueue:
    """Searches that are under way. For one thread; batches may be scanned in others.

    Args:
        cluster_sizes: Codes in each cluster of the index, shape (nlist,).
        costs: What scans take.
        dimension: Components of a query.
        worst: The score that everything is better than.
        higher_is_better: Whether scores are similarities, not distances.
        shared_by: Queries that share a scan of a cluster.
    """

    def __init__(
        self,
        cluster_sizes: Integers,
        costs: ScanCosts,
        *,
        dimension: int,
        worst: float,
        higher_is_better: bool,
        shared_by: int = SHARED_BY,
    ) -> None:
        self._sizes = cluster_sizes
        self._costs = costs
        self._worst = worst
        self._sign = -1.0 if higher_is_better else 1.0
        self._width = width = 1
        self._shared_by = shared_by
        self._waiting: dict[VectorSearch, None] = {}
        self._free: list[int] = []
        slots = 0
        self._needed = np.zeros((len(cluster_sizes), slots), dtype=bool)
        self._lacking = np.zeros((slots, len(cluster_sizes)), dtype=bool)
        self._vectors = np.zeros((slots, dimension), dtype=np.float32)
        self._scores = np.full((slots, width), worst, dtype=np.float32)
        self._ids = np.full((slots, width), -1, dtype=np.int64)
        self._found_in = np.full((slots, width), -1, dtype=np.int64)
        self._demand = np.zeros(len(cluster_sizes), dtype=np.int64)

    def __len__(self) -> int:
        """Return how many searches are not done."""
        return len(self._waiting)

    def add(self, search: VectorSearch) -> None:
        """Let a search take part from the next batch on.

        Clusters without codes count as scanned; a search without any others is done at once.
        """
        if search.kept > self._width:
            self._widen(search.kept)
        if not self._free:
            self._grow()
        search.slot = slot = self._free.pop()
        self._vectors[slot] = search.vector
        clusters = search.clusters[self._sizes[search.clusters] > 0]
        self._needed[clusters, slot] = self._lacking[slot, clusters] = True
        self._demand[clusters] += 1
        self._scores[slot] = self._worst
        self._ids[slot] = self._found_in[slot] = -1
        search.scanned = len(search.clusters) - len(clusters)
        search.is_done = not len(clusters)
        if not search.is_done:
            self._waiting[search] = None

    def remove(self, search: VectorSearch) -> None:
        """Take a search out, done or not; what is being scanned for it is dropped."""
        if search.is_gone:
            return
        search.is_gone = True
        self._waiting.pop(search, None)
        if not search.is_done:
            self._demand -= self._needed[:, search.slot]
            self._needed[:, search.slot] = self._lacking[search.slot] = False
        self._free_if_unused(search)

    def best(self, search: VectorSearch, most: int | None = None) -> TopK:
        """Return the best results of a search so far.

        Args:
            search: One that has not been removed.
            most: How many at most, of those that are kept; None is its k.
        """
        slot = search.slot
        n = search.k if most is None else min(most, search.kept)
        n = min(n, int((self._ids[slot] >= 0).sum()))
        return TopK(
            self._scores[slot, :n].copy(),
            self._ids[slot, :n].copy(),
            self._found_in[slot, :n].copy(),
        )

    def prefix(self, search: VectorSearch) -> int:
        """Return how many clusters, from a search's first on, have been scanned without a gap."""
        lacking = self._lacking[search.slot, search.clusters]
        return int(lacking.argmax()) if lacking.any() else len(lacking)

    def next_batch(
        self, budget_s: float, overhead_s: float = 0.0, *, only_awaited: bool = False
    ) -> ScanBatch | None:
        """Return what to scan next, or None if there is nothing that is not being scanned.

        Args:
            budget_s: How long it should take, in seconds; one cluster, and what ends a search, may
                take longer.
            overhead_s: What a batch takes beside its scan, in seconds.
            only_awaited: Whether searches that are never due are left alone.
        """
        if not self._waiting:
            return None
        searches = sorted(self._waiting, key=_due)
        awaited = bisect_left(searches, math.inf, key=_due)
        searches, others = searches[:awaited], searches[awaited:]
        chosen = self._chosen_clusters(searches, budget_s, overhead_s)
        if not len(chosen) and not only_awaited:
            searches = others
            budget_s = min(budget_s, _UNAWAITED_SCANS * overhead_s)  # somebody may come any moment
            chosen = self._chosen_clusters(searches, budget_s, overhead_s)
        if not len(chosen):
            return None
        slots = np.array([search.slot for search in searches])
        needs = self._needed[chosen].take(slots, axis=1)
        if self._demand[chosen].max() > self._shared_by:
            needs &= np.cumsum(needs, axis=1, dtype=np.int32) <= self._shared_by
        of_cluster, numbers = np.nonzero(needs)
        counts = np.bincount(of_cluster, minlength=len(chosen))
        scans = np.bincount(numbers, minlength=len(searches))
        used = np.flatnonzero(scans)
        rows = (np.cumsum(scans > 0) - 1)[numbers]
        slots, scans, clusters = slots[used], scans[used], chosen[of_cluster]
        self._needed[clusters, slots[rows]] = False
        self._demand[chosen] -= counts
        taking_part = tuple(searches[number] for number in used.tolist())
        for search, number in zip(taking_part, scans.tolist(), strict=True):
            search.in_flight += number
        sizes = self._sizes[chosen]
        return ScanBatch(
            searches=taking_part,
            vectors=self._vectors[slots],
            thresholds=self._scores[slots, np.array([search.kept for search in taking_part]) - 1],
            rows=rows,
            clusters=clusters,
            k=max(search.kept for search in taking_part),
            load=ScanLoad(len(rows), int(sizes.sum()), int((sizes * counts).sum())),
        )

    def take_in(self, batch: ScanBatch, found: ClusterFindings) -> list[VectorSearch]:
        """Take in what a batch has found.

        Returns:
            The searches that took part and have not been removed.
        """
        scans = np.bincount(batch.rows, minlength=len(batch.searches)).tolist()
        present = []
        for search, number in zip(batch.searches, scans, strict=True):
            search.in_flight -= number
            if search.is_gone:
                self._free_if_unused(search)
                continue
            search.scanned += number
            present.append(search)
        self._merge(batch.searches, found)
        slots = np.array([search.slot for search in batch.searches])[batch.rows]
        kept = slots >= 0  # the slot of who has gone may be another's
        self._lacking[slots[kept], batch.clusters[kept]] = False
        for search in present:
            if search.scanned == len(search.clusters):
                search.is_done = True
                self._waiting.pop(search, None)
        return present

    def return_unscanned(self, batch: ScanBatch) -> None:
        """Put back a batch whose scan has failed."""
        for row, cluster in zip(batch.rows.tolist(), batch.clusters.tolist(), strict=True):
            search = batch.searches[row]
            search.in_flight -= 1
            if search.is_gone:
                self._free_if_unused(search)
            else:
                self._needed[cluster, search.slot] = True
                self._demand[cluster] += 1

    def has_unscanned(self, only_awaited: bool) -> bool:
        """Return whether there is anything that is not being scanned.

        Args:
            only_awaited: Whether searches that are never due do not count.
        """
        if only_awaited and not any(search.is_awaited for search in self._waiting):
            return False
        return bool(self._demand.any())

    def work_s(self) -> float:
        """Return what all scans that wait would take one by one, in seconds."""
        pairs, compared = int(self._demand.sum()), int(self._demand @ self._sizes)
        return self._costs.seconds(ScanLoad(pairs, compared, compared))

    def _chosen_clusters(
        self, searches: list[VectorSearch], budget_s: float, overhead_s: float
    ) -> Integers:
        """Return the clusters that fit the budget, of whoever is due first."""
        chosen: list[Integers] = []
        is_chosen = np.zeros(len(self._sizes), dtype=bool)
        ended = 0
        for search in searches:
            if search.is_all_begun:
                continue
            rest = search.clusters[self._needed[search.clusters, search.slot]]
            rest = rest[~is_chosen[rest]]
            if not len(rest):
                continue
            sharing = np.minimum(self._demand[rest], self._shared_by)
            seconds = np.cumsum(self._costs.seconds_of_clusters(self._sizes[rest], sharing))
            if not chosen:
                fitting = self._fitting(search, seconds, budget_s)
            elif self._is_worth_ending(ended, float(seconds[-1]), overhead_s):
                fitting = len(rest)
            else:
                break
            chosen.append(rest[:fitting])
            is_chosen[rest[:fitting]] = True
            if fitting < len(rest):
                break
            ended += 1
        return np.concatenate(chosen) if chosen else np.empty(0, dtype=np.int64)

    @staticmethod
    def _fitting(search: VectorSearch, seconds: Floats, budget_s: float) -> int:
        """Return how many of the next clusters of a search fit a budget.

        Args:
            search: The search.
            seconds: What its next clusters take, added up.
            budget_s: How long they should take.
        """
        fitting = max(int(np.searchsorted(seconds, budget_s, side="right")), 1)
        if seconds[-1] <= _STRETCH * budget_s:
            fitting = len(seconds)
        begun = len(search.clusters) - len(seconds)
        until_pause = search.pause_at - begun if begun < search.pause_at else search.pause_every
        return min(fitting, until_pause or fitting)

    def _is_worth_ending(self, ended: int, seconds: float, overhead_s: float) -> bool:
        """Return whether a batch that ends m searches should end one more, which takes w seconds.

        The m wait w longer. Batches of m + 1 instead of m searches are fewer by 1 in m (m + 1) per
        search, and all n that are under way wait for the overhead b of each: m w < n b / (m + 1).
        """
        return ended * (ended + 1) * seconds < len(self._waiting) * overhead_s

    def _merge(self, searches: tuple[VectorSearch, ...], found: ClusterFindings) -> None:
        """Merge what was found into the best results of the searches."""
        gone = np.array([search.is_gone for search in searches])
        counts = ~gone[found.rows]
        if not counts.any():
            return
        rows = found.rows[counts]
        is_touched = np.zeros(len(searches), dtype=bool)
        is_touched[rows] = True
        touched = np.flatnonzero(is_touched)
        groups = np.cumsum(is_touched)[rows] - 1
        slots = np.array([searches[number].slot for number in touched.tolist()])
        kept = self._width
        group = np.concatenate([np.repeat(np.arange(len(slots)), kept), groups])
        scores = np.concatenate([self._scores[slots].ravel(), found.scores[counts]])
        ids = np.concatenate([self._ids[slots].ravel(), found.ids[counts]])
        found_in = np.concatenate([self._found_in[slots].ravel(), found.clusters[counts]])
        order = np.lexsort((ids, self._sign * scores, group))
        # every group has at least `kept` entries: its own best ones so far, or what fills them up
        first = np.searchsorted(group[order], np.arange(len(slots)))
        places = order[first[:, None] + np.arange(kept)]
        before, after = self._ids[slots], ids[places]
        self._scores[slots], self._ids[slots] = scores[places], after
        self._found_in[slots] = found_in[places]
        differs = before != after
        for number, row in zip(touched.tolist(), differs, strict=True):
            search = searches[number]
            if row[: search.k].any():
                search.changed_at = search.scanned

    def _free_if_unused(self, search: VectorSearch) -> None:
        if search.slot >= 0 and not search.in_flight:
            self._free.append(search.slot)
            search.slot = -1

    def _grow(self) -> None:
        old = len(self._scores)
        new = max(16, old)

        def more(array: NDArray[Any], fill: float) -> NDArray[Any]:
            return np.concatenate([array, np.full((new, array.shape[1]), fill, dtype=array.dtype)])

        self._needed = np.pad(self._needed, ((0, 0), (0, new)))
        self._lacking = more(self._lacking, False)
        self._vectors = more(self._vectors, 0)
        self._scores = more(self._scores, self._worst)
        self._ids, self._found_in = more(self._ids, -1), more(self._found_in, -1)
        self._free += range(old + new - 1, old - 1, -1)

    def _widen(self, kept: int) -> None:
        """Keep more results of each search from now on."""
        add = ((0, 0), (0, kept - self._width))
        self._scores = np.pad(self._scores, add, constant_values=self._worst)
        self._ids = np.pad(self._ids, add, constant_values=-1)
        self._found_in = np.pad(self._found_in, add, constant_values=-1)
        self._width = kept


_due = attrgetter("due")
