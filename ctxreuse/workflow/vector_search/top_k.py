"""The canonical top k: best score, then the smaller id, however a search is split; numpy only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Vectors = npt.NDArray[np.float32]
Scores = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

MISSING = -1
"""The id that stands where nothing was found."""

_LARGEST = float(np.finfo(np.float32).max)
WORST = {True: -_LARGEST, False: _LARGEST}
"""The score that stands where nothing was found, as faiss presets it, by `higher_is_better`."""

_SIGN_BIT = np.uint32(1 << 31)


class Candidates(NamedTuple):
    """What a scan found: ids and their scores, in arrays of one shape."""

    scores: Scores  # `WORST` where nothing was found
    ids: Ids  # `MISSING` where nothing was found


def nothing_found(shape: tuple[int, ...], higher_is_better: bool) -> Candidates:
    """Return candidates in which nothing was found, of a shape such as (queries, k)."""
    scores = np.full(shape, WORST[higher_is_better], dtype=np.float32)
    return Candidates(scores, np.full(shape, MISSING, dtype=np.int64))


def best_by_group(
    groups: npt.NDArray[Any],
    scores: Scores,
    ids: Ids,
    n_groups: int,
    k: int,
    higher_is_better: bool,
) -> Candidates:
    """Return the k best of each group, in order, as (n_groups, k) padded with `MISSING`."""
    found = np.flatnonzero(ids != MISSING)
    groups = np.asarray(groups, dtype=np.int64)[found]
    order = _canonical_order(groups, scores[found], ids[found], higher_is_better)
    groups = groups[order]
    starts = np.searchsorted(groups, np.arange(n_groups))
    ranks = np.arange(len(groups)) - starts[groups]
    kept = ranks < k
    chosen = found[order[kept]]
    merged = nothing_found((n_groups, k), higher_is_better)
    merged.scores[groups[kept], ranks[kept]] = scores[chosen]
    merged.ids[groups[kept], ranks[kept]] = ids[chosen]
    return merged


def _canonical_order(
    groups: npt.NDArray[np.int64], scores: Scores, ids: Ids, higher_is_better: bool
) -> npt.NDArray[np.intp]:
    """Return the order by (group, score with the best first, id)."""
    # one integer of group and score sorts an order of magnitude faster than three keys: radix
    # sort's transformation of the score's bits; adding zero turns -0.0 into 0.0
    ascending = (-scores if higher_is_better else scores) + np.float32(0)
    bits = np.ascontiguousarray(ascending, dtype=np.float32).view(np.uint32)
    bits = np.where(bits & _SIGN_BIT, ~bits, bits | _SIGN_BIT)
    keys = (groups.astype(np.uint64) << np.uint64(32)) | bits.astype(np.uint64)
    order = np.argsort(keys)
    in_order = keys[order]
    if np.any(in_order[1:] == in_order[:-1]):
        return np.lexsort((ids, keys))
    return order


@dataclass(frozen=True, slots=True, eq=False)
class ClusterFindings:
    """What a batch of scans found that may count, all of shape (m,)."""

    rows: npt.NDArray[np.intp]  # which of the batch's searches each is for
    scores: Scores
    ids: Ids
    clusters: Ids


@dataclass(frozen=True, slots=True, eq=False)
class TopK:
    """The best results of a search so far, best first; all of shape (n,)."""

    scores: Scores
    ids: Ids
    found_in: Ids  # the cluster of each


class TopKTable:
    """The best results of many searches, one row (a slot) for each."""

    def __init__(self, higher_is_better: bool) -> None:
        self.width = 1
        self._higher_is_better = higher_is_better
        self.scores, self._ids = nothing_found((0, self.width), higher_is_better)
        self._found_in = self._ids.copy()

    def __len__(self) -> int:
        return len(self.scores)

    def resize(self, slots: int, width: int) -> None:
        """Add slots, and columns to every slot."""
        more = ((0, slots - len(self)), (0, width - self.width))
        self.scores = np.pad(self.scores, more, constant_values=WORST[self._higher_is_better])
        self._ids = np.pad(self._ids, more, constant_values=MISSING)
        self._found_in = np.pad(self._found_in, more, constant_values=MISSING)
        self.width = width

    def clear(self, slot: int) -> None:
        """Forget the results in a slot."""
        self.scores[slot] = WORST[self._higher_is_better]
        self._ids[slot] = self._found_in[slot] = MISSING

    def best(self, slot: int, most: int) -> TopK:
        """Return a copy of the best results in a slot, at most `most`."""
        n = min(most, int((self._ids[slot] >= 0).sum()))
        return TopK(
            self.scores[slot, :n].copy(),
            self._ids[slot, :n].copy(),
            self._found_in[slot, :n].copy(),
        )

    def merge(
        self,
        slots: npt.NDArray[np.intp],
        groups: npt.NDArray[np.intp],
        found: ClusterFindings,
        counts: npt.NDArray[np.bool_],
    ) -> npt.NDArray[np.bool_]:
        """Merge findings into slots; return which places, (n, width), hold another id."""
        group = np.concatenate([np.repeat(np.arange(len(slots)), self.width), groups])
        scores = np.concatenate([self.scores[slots].ravel(), found.scores[counts]])
        ids = np.concatenate([self._ids[slots].ravel(), found.ids[counts]])
        found_in = np.concatenate([self._found_in[slots].ravel(), found.clusters[counts]])
        order = _canonical_order(group, scores, ids, self._higher_is_better)
        # every group has at least `width` entries: its own best ones so far, or what fills them up
        first = np.searchsorted(group[order], np.arange(len(slots)))
        places = order[first[:, None] + np.arange(self.width)]
        before, after = self._ids[slots], ids[places]
        self.scores[slots], self._ids[slots] = scores[places], after
        self._found_in[slots] = found_in[places]
        differs: npt.NDArray[np.bool_] = before != after
        return differs
