"""Which clusters to scan next, and for which queries.

A search is a query and the clusters that it has to scan. Its nodes are split (HedraRAG, section
4.2): one call to the index scans a batch of (query, cluster) pairs that fits a time budget, and
searches join and leave between batches. Four rules make up a batch:

- The search that is due first chooses: its next clusters, in its own order, as far as the budget
  goes. What ends it is a batch of its own, because results come with whole batches. A batch ends
  several searches only if one more batch's overhead would cost all that wait more.
- Other searches that need a chosen cluster scan it now, too: it is read from memory once, and
  comparing it costs a third. Beyond some queries that gains nothing more, so only the most urgent
  ones join.
- Searches whose result no run waits for yet take part only if there are no others.
- Pairs of one cluster stand together.

The result does not depend on any of this: it is the best k over all clusters of a search, by score
and then by id.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from ctxreuse.workflow.vector_search.costs import Floats, ScanCosts, ScanLoad
from ctxreuse.workflow.vector_search.handle import SearchHandle
from ctxreuse.workflow.vector_search.top_k import (
    ClusterFindings,
    Ids,
    Scores,
    TopK,
    TopKTable,
    Vectors,
)

SHARED_BY = 16
"""Queries that share a scan of a cluster: with more, the comparing, not the reading, takes the
time."""

_DONE, _IN_FLIGHT, _NEEDED = range(3)
"""What becomes of a cluster for a search; one that it does not need is done."""

_SPECULATIVE_SCANS = 2.0
"""Length of a scan for a search that no run waits for yet, in times of a scan's overhead."""

_STRETCH = 1.3
"""How far a budget may be exceeded for a search to end: better than a batch for what is left."""


@dataclass(frozen=True, slots=True, eq=False)
class ScanBatch:
    """Pairs of query and cluster to scan in one call; it shares no memory with the queue."""

    searches: tuple[SearchHandle, ...]
    vectors: Vectors  # (n, d) their queries
    thresholds: Scores  # (n,) scores that a result must reach
    rows: NDArray[np.intp]  # (r,) which search each pair is of
    clusters: Ids  # (r,) equal ones together
    k: int  # results that each pair may bring
    load: ScanLoad


class ScanQueue:
    """Searches that are under way. For one thread; batches may be scanned in others."""

    def __init__(
        self, cluster_sizes: Ids, costs: ScanCosts, *, dimension: int, higher_is_better: bool
    ) -> None:
        nlist = len(cluster_sizes)
        self._sizes = cluster_sizes
        self._costs = costs
        self._waiting: dict[SearchHandle, None] = {}
        self._free: list[int] = []
        self._found = TopKTable(higher_is_better)
        self._vectors = np.zeros((0, dimension), dtype=np.float32)
        self._states = np.zeros((nlist, 0), dtype=np.int8)  # by cluster and slot
        self._demand = np.zeros(nlist, dtype=np.int64)

    def __len__(self) -> int:
        """Return how many searches are not done."""
        return len(self._waiting)

    def add(self, search: SearchHandle) -> None:
        """Let a search take part from the next batch on."""
        if not self._free or search.kept > self._found.width:
            old, more = len(self._found), 0 if self._free else max(16, len(self._found))
            self._found.resize(old + more, max(search.kept, self._found.width))
            self._vectors = np.pad(self._vectors, ((0, more), (0, 0)))
            self._states = np.pad(self._states, ((0, 0), (0, more)))
            self._free += range(old + more - 1, old - 1, -1)
        search.slot = slot = self._free.pop()
        self._vectors[slot] = search.vector
        clusters = search.clusters[self._sizes[search.clusters] > 0]
        self._states[clusters, slot] = _NEEDED
        self._demand[clusters] += 1
        self._found.clear(slot)
        # clusters without codes count as scanned
        search.scanned = len(search.clusters) - len(clusters)
        search.is_done = not len(clusters)
        if not search.is_done:
            self._waiting[search] = None

    def remove(self, search: SearchHandle) -> None:
        """Take a search out, done or not; what is being scanned for it is dropped."""
        if search.is_gone:
            return
        search.is_gone = True
        self._waiting.pop(search, None)
        if search.slot >= 0 and not search.is_done:
            self._demand -= self._states[:, search.slot] == _NEEDED
            self._states[:, search.slot] = _DONE
        self._free_if_unused(search)

    def best(self, search: SearchHandle) -> TopK:
        """Return the best results so far of a search that has not been removed: all kept ones."""
        return self._found.best(search.slot, search.kept)

    def prefix(self, search: SearchHandle) -> int:
        """Return how many clusters, from a search's first on, have been scanned without a gap."""
        lacking = self._states[search.clusters, search.slot] != _DONE
        return int(lacking.argmax()) if lacking.any() else len(lacking)

    def next_batch(self, budget_s: float, overhead_s: float = 0.0) -> ScanBatch | None:
        """Return what to scan next, or None if everything is being scanned."""
        searches = sorted(self._waiting, key=_due)
        awaited = bisect_left(searches, math.inf, key=_due)
        ahead_s = min(budget_s, _SPECULATIVE_SCANS * overhead_s)  # a run may come any moment
        for some, most_s in ((searches[:awaited], budget_s), (searches[awaited:], ahead_s)):
            chosen = self._chosen_clusters(some, most_s, overhead_s)
            if len(chosen):
                return self._batch_of(some, chosen)
        return None

    def _batch_of(self, searches: list[SearchHandle], chosen: Ids) -> ScanBatch:
        """Return the batch that scans clusters for all searches that need and may share them."""
        slots = np.array([search.slot for search in searches])
        needs = self._states[chosen].take(slots, axis=1) == _NEEDED
        if self._demand[chosen].max() > SHARED_BY:
            needs &= np.cumsum(needs, axis=1, dtype=np.int32) <= SHARED_BY
        of_cluster, numbers = np.nonzero(needs)
        counts = np.bincount(of_cluster, minlength=len(chosen))
        scans = np.bincount(numbers, minlength=len(searches))
        used = np.flatnonzero(scans)
        rows = (np.cumsum(scans > 0) - 1)[numbers]
        slots, scans, clusters = slots[used], scans[used], chosen[of_cluster]
        self._states[clusters, slots[rows]] = _IN_FLIGHT
        self._demand[chosen] -= counts
        taking_part = tuple(searches[number] for number in used.tolist())
        for search, number in zip(taking_part, scans.tolist(), strict=True):
            search.in_flight += number
        kept, sizes = np.array([search.kept for search in taking_part]), self._sizes[chosen]
        return ScanBatch(
            searches=taking_part,
            vectors=self._vectors[slots],
            thresholds=self._found.scores[slots, kept - 1],
            rows=rows,
            clusters=clusters,
            k=int(kept.max()),
            load=ScanLoad(len(rows), int(sizes.sum()), int((sizes * counts).sum())),
        )

    def take_in(self, batch: ScanBatch, found: ClusterFindings) -> list[SearchHandle]:
        """Take in what a batch has found; return its searches, but for removed ones."""
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
        kept = slots >= 0  # the slot of a search that is gone may be another's
        self._states[batch.clusters[kept], slots[kept]] = _DONE
        for search in present:
            if search.scanned == len(search.clusters):
                search.is_done = True
                self._waiting.pop(search, None)
        return present

    def return_unscanned(self, batch: ScanBatch) -> None:
        """Put back a batch that was not scanned."""
        for row, cluster in zip(batch.rows.tolist(), batch.clusters.tolist(), strict=True):
            search = batch.searches[row]
            search.in_flight -= 1
            if search.is_gone:
                self._free_if_unused(search)
            else:
                self._states[cluster, search.slot] = _NEEDED
                self._demand[cluster] += 1

    @property
    def has_unscanned(self) -> bool:
        """Whether there is anything that is not being scanned."""
        return bool(self._demand.any())

    def work_s(self) -> float:
        """Return what all scans that wait would take one by one, in seconds."""
        pairs, compared = int(self._demand.sum()), int(self._demand @ self._sizes)
        return self._costs.seconds(ScanLoad(pairs, compared, compared))

    def _chosen_clusters(
        self, searches: list[SearchHandle], budget_s: float, overhead_s: float
    ) -> Ids:
        """Return the clusters that fit the budget, of the searches that are due first."""
        chosen: list[Ids] = []
        is_chosen = np.zeros(len(self._sizes), dtype=bool)
        ended = 0
        for search in searches:
            if search.scanned + search.in_flight == len(search.clusters):
                continue
            rest = search.clusters[self._states[search.clusters, search.slot] == _NEEDED]
            rest = rest[~is_chosen[rest]]
            if not len(rest):
                continue
            sharing = np.minimum(self._demand[rest], SHARED_BY)
            seconds = np.cumsum(self._costs.seconds_of_clusters(self._sizes[rest], sharing))
            if not chosen:
                fitting = _fitting(search, seconds, budget_s)
            elif ended * (ended + 1) * float(seconds[-1]) < len(self._waiting) * overhead_s:
                # Should a batch that ends m searches end one more, in w seconds? The m wait w
                # longer. Batches of m + 1 instead of m searches are fewer by 1 in m (m + 1) a
                # search, and all n under way wait for the overhead b of each: m w < n b / (m + 1).
                fitting = len(rest)
            else:
                break
            chosen.append(rest[:fitting])
            is_chosen[rest[:fitting]] = True
            if fitting < len(rest):
                break
            ended += 1
        return np.concatenate(chosen) if chosen else np.empty(0, dtype=np.int64)

    def _merge(self, searches: tuple[SearchHandle, ...], found: ClusterFindings) -> None:
        is_there = np.array([not search.is_gone for search in searches])
        counts = is_there[found.rows]
        if not counts.any():
            return
        present = [search for search in searches if not search.is_gone]
        slots = np.array([search.slot for search in present])
        groups = (np.cumsum(is_there) - 1)[found.rows[counts]]
        differs = self._found.merge(slots, groups, found, counts)
        for search, row in zip(present, differs, strict=True):
            if row[: search.k].any():
                search.changed_at = search.scanned

    def _free_if_unused(self, search: SearchHandle) -> None:
        if search.slot >= 0 and not search.in_flight:
            self._free.append(search.slot)
            search.slot = -1


_due = attrgetter("due")


def _fitting(search: SearchHandle, seconds: Floats, budget_s: float) -> int:
    """Return how many of the next clusters of a search fit a budget."""
    fitting = max(int(np.searchsorted(seconds, budget_s, side="right")), 1)
    if seconds[-1] <= _STRETCH * budget_s:
        fitting = len(seconds)
    begun = len(search.clusters) - len(seconds)
    return min(fitting, search.pause_at - begun) if begun < search.pause_at else fitting
