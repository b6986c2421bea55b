"""What the last search of a session found: where the next one should look first.

Consecutive queries of a workflow are close to each other. What the last one found is often found
again, and lies in the clusters that it lay in (HedraRAG, section 4.3, observations 1 to 3).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Vectors = NDArray[np.float32]

KEPT = 20
"""How many results of a search are remembered: more than are asked for, since the next query's
results tend to be among the next best of this one's."""


@dataclass(frozen=True, slots=True, eq=False)
class SearchRecord:
    """A search that has ended, or the part of one that has been done.

    Attributes:
        vector: The query, shape (d,).
        clusters: The clusters that were probed, C_v.
        ids: The best results, at most `KEPT`, best first.
        found_in: The cluster of each; together H_v.
        vectors: The stored vector of each, shape (n, d); None where nobody has looked them up.
    """

    vector: Vectors
    clusters: Integers
    ids: Integers
    found_in: Integers
    vectors: Vectors | None = None


def reordered(clusters: Integers, record: SearchRecord | None) -> Integers:
    """Return clusters in the order in which to search them.

    First those in which the last search found something (H_v), then those that it probed (C_v),
    then the rest; within each group the given order.

    Args:
        clusters: The new query's clusters C', nearest first.
        record: The last search; None leaves the order as it is.
    """
    if record is None:
        return clusters
    rank = np.full(clusters.shape, 2)
    rank[np.isin(clusters, record.clusters)] = 1
    rank[np.isin(clusters, record.found_in)] = 0
    return clusters[np.argsort(rank, kind="stable")]


class Sessions:
    """Remembers the last search of each session.

    Args:
        most: How many sessions; the least recently used ones are forgotten.
    """

    def __init__(self, most: int = 10_000) -> None:
        self._most = most
        self._records: OrderedDict[Hashable, SearchRecord] = OrderedDict()

    def get(self, session: Hashable) -> SearchRecord | None:
        """Return a session's last search."""
        if session in self._records:
            self._records.move_to_end(session)
        return self._records.get(session)

    def put(self, session: Hashable, record: SearchRecord) -> None:
        """Remember a session's last search."""
        self._records[session] = record
        self._records.move_to_end(session)
        if len(self._records) > self._most:
            self._records.popitem(last=False)
