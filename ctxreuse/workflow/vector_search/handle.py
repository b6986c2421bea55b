"""A search of a vector index as its owner holds it: what is asked, how far it is, its result."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ctxreuse.workflow.vector_search.top_k import Ids, TopK, Vectors

NEVER = math.inf
"""The due time of a search that only prepares another one: no run waits for its result."""

KEPT = 20
"""How many results of a search are remembered: more than are asked for, since the next query's
results tend to be among the next best of this one's."""


@dataclass(frozen=True, slots=True, eq=False)
class SearchRecord:
    """A search that has ended, or the part of one that has been done, for the next search.

    Consecutive queries of a workflow are close to each other. What the last one found is often
    found again, and lies in the same clusters (HedraRAG, section 4.3, observations 1 to 3).

    Attributes:
        vector: The query, shape (d,).
        clusters: The clusters that were probed, C_v.
        ids: The best results, at most `KEPT`, best first.
        found_in: The cluster of each; together H_v.
        vectors: The stored vector of each, shape (n, d); None if they were not looked up.
    """

    vector: Vectors
    clusters: Ids
    ids: Ids
    found_in: Ids
    vectors: Vectors | None = None

    @property
    def size_bytes(self) -> int:
        """How many bytes it takes; no array is a part of a larger one."""
        arrays = (self.vector, self.clusters, self.ids, self.found_in, self.vectors)
        return sum(array.nbytes for array in arrays if array is not None)

    def reordered(self, clusters: Ids) -> Ids:
        """Return a new query's clusters in the order in which to scan them.

        First those in which this search found something (H_v), then those that it probed (C_v),
        then the rest; within each group the given order.
        """
        rank = np.full(clusters.shape, 2)
        rank[np.isin(clusters, self.clusters)] = 1
        rank[np.isin(clusters, self.found_in)] = 0
        return clusters[np.argsort(rank, kind="stable")]

    def nearest(self, vector: Vectors, k: int, higher_is_better: bool) -> Ids | None:
        """Return the k results that are nearest to a new query; None without `vectors`."""
        if self.vectors is None:
            return None
        stored = self.vectors
        near = stored @ vector if higher_is_better else -((stored - vector) ** 2).sum(axis=1)
        return self.ids[np.lexsort((self.ids, -near))[:k]]


class PreviewSchedule(NamedTuple):
    """When the owner of a search gets a preview of its results.

    Attributes:
        first: After which part of the search, from 0 to 1.
        every: After which further part each time; 0 leaves it to the batches.
    """

    first: float = 0.0
    every: float = 0.0


class SearchProgress(NamedTuple):
    """How far a search is.

    Attributes:
        share: The part that has been done without a gap, from 0 to 1.
        unchanged: The part since the best k changed last, from 0 to 1.
        best: All results that are kept; None before the first scan.
    """

    share: float = 0.0
    unchanged: float = 0.0
    best: TopK | None = None


@dataclass(slots=True, eq=False)
class SearchHandle:
    """A search: its owner waits for `updates` and reads `outcome`; the scheduler advances it.

    Attributes:
        text: The query.
        k: How many results are asked for.
        due: When the result is needed, on any scale; the least is served first.
        kept: How many of the best are kept; k if that is more.
        record: The last search of the session.
        previews: When the owner gets a preview; None is never.
        vector: The query's vector, shape (d,), once it is embedded.
        clusters: The clusters to scan, in this order, each once; empty until then.
        recalled: What of the last search's results is nearest to the new query, best first: a
            preview that costs nothing. None until the query is embedded, or without such a record.
        scanned: How many clusters have been scanned; `in_flight` more are being scanned.
        changed_at: How many had been when the best k changed last; `previewed_at`: when the owner
            was told last.
        pause_at: After how many clusters a batch should end for a preview; 0 for none.
        pause_every: After how many more each later one should; 0 lets them take what fits.
        slot: The row of its results while it is under way; else -1.
        is_done: Whether all clusters have been scanned.
        is_gone: Whether the search was taken out of the queue.
        outcome: The best results, all that are kept, or what went wrong; None until it has ended.
        loop: The event loop of the owner.
        updates: What the owner has not seen yet: for each update, whether the search has ended.
    """

    text: str
    k: int
    due: float
    kept: int = 0
    record: SearchRecord | None = None
    previews: PreviewSchedule | None = None
    vector: Vectors = field(default_factory=lambda: np.empty(0, dtype=np.float32))
    clusters: Ids = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    recalled: Ids | None = field(default=None, init=False)
    scanned: int = field(default=0, init=False)
    changed_at: int = field(default=0, init=False)
    previewed_at: int = field(default=-1, init=False)
    pause_at: int = field(default=0, init=False)
    pause_every: int = field(default=0, init=False)
    slot: int = field(default=-1, init=False)
    in_flight: int = field(default=0, init=False)
    is_done: bool = field(default=False, init=False)
    is_gone: bool = field(default=False, init=False)
    outcome: TopK | Exception | None = field(default=None, init=False)
    loop: asyncio.AbstractEventLoop | None = field(default=None, init=False)
    updates: asyncio.Queue[bool] = field(default_factory=asyncio.Queue, init=False)

    def __post_init__(self) -> None:
        self.kept = max(self.kept, self.k)

    def record_of(self, best: TopK | None) -> SearchRecord | None:
        """Return what the next search may learn from; None before the first scan."""
        if best is None or not self.scanned:
            return None
        return SearchRecord(
            self.vector.copy(),  # else all of its batch's vectors would be kept
            self.clusters.copy(),
            best.ids[:KEPT].copy(),
            best.found_in[:KEPT].copy(),
        )

    def schedule_previews(self, previews: PreviewSchedule | None) -> None:
        """Have batches end where the owner gets a preview."""
        self.previews = previews
        first, every = (0.0, 0.0) if previews is None else previews
        self.pause_at = math.ceil(first * len(self.clusters))
        self.pause_every = math.ceil(every * len(self.clusters))


class SearchUpdate(NamedTuple):
    """An update for the owner of a search."""

    search: SearchHandle
    has_ended: bool
