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
    """A search, or what is done of it, whose clusters the next, close one tries first."""

    vector: Vectors  # (d,) the query
    clusters: Ids  # that were probed, the paper's C_v
    ids: Ids  # at most `KEPT`, best first
    found_in: Ids  # the cluster of each, together H_v
    vectors: Vectors | None = None  # (n, d) the stored vector of each, if looked up

    @property
    def size_bytes(self) -> int:
        """How many bytes it takes; no array is a part of a larger one."""
        arrays = (self.vector, self.clusters, self.ids, self.found_in, self.vectors)
        return sum(array.nbytes for array in arrays if array is not None)

    def reordered(self, clusters: Ids) -> Ids:
        """Return a new query's clusters in the order in which to scan them."""
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


class SearchProgress(NamedTuple):
    """How far a search is."""

    share: float = 0.0  # done without a gap, from 0 to 1
    best: TopK | None = None


@dataclass(slots=True, eq=False)
class SearchHandle:
    """A search: its owner waits for `news` and reads `outcome`; the scheduler advances it."""

    text: str
    k: int
    due: float  # the least is served first
    kept: int = 0  # results, k at least
    record: SearchRecord | None = None
    preview_at: float | None = None  # after which part, from 0 to 1; None: no preview
    vector: Vectors = field(default_factory=lambda: np.empty(0, dtype=np.float32))
    clusters: Ids = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    recalled: Ids | None = None  # the last search's results, by nearness
    scanned: int = 0  # clusters
    changed_at: int = 0  # clusters, when the best k changed
    previewed_at: int = -1  # clusters, when the owner was told
    pause_at: int = 0  # clusters, for a preview; 0: none
    slot: int = -1  # of its results; -1: none
    in_flight: int = 0
    is_done: bool = False
    is_gone: bool = False
    outcome: TopK | Exception | None = None
    loop: asyncio.AbstractEventLoop | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)

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

    def schedule_preview(self, share: float | None) -> None:
        """Have a batch end after a part of the search, where the owner gets a first preview."""
        self.preview_at = share
        self.pause_at = math.ceil((share or 0.0) * len(self.clusters))
