"""Puts the findings of single clusters together: the canonical top k.

A search that is cut into sub-stages finds the same candidates in another order, and where scores
tie that order would decide who stays. So the order of the result is fixed here: best score first,
and of equal scores the smaller id. What is merged does not depend on the order or split of the
search. numpy only, so that it can be read and tested without faiss.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Scores = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

MISSING = -1
"""The id that stands where nothing was found."""

_SIGN_BIT = np.uint32(1 << 31)


class Candidates(NamedTuple):
    """What a search found: ids and their scores, in arrays of one shape.

    Attributes:
        scores: float32; `worst_score` where nothing was found.
        ids: int64; `MISSING` where nothing was found.
    """

    scores: Scores
    ids: Ids


def worst_score(higher_is_better: bool) -> float:
    """Return the score of what was not found, as faiss presets it.

    Args:
        higher_is_better: True for inner products, False for distances.
    """
    largest = float(np.finfo(np.float32).max)
    return -largest if higher_is_better else largest


def nothing_found(shape: tuple[int, ...], higher_is_better: bool) -> Candidates:
    """Return candidates in which nothing was found yet.

    Args:
        shape: The arrays' shape, such as (queries, k).
        higher_is_better: True for inner products, False for distances.
    """
    scores = np.full(shape, worst_score(higher_is_better), dtype=np.float32)
    return Candidates(scores, np.full(shape, MISSING, dtype=np.int64))


def best(scores: Scores, ids: Ids, k: int, higher_is_better: bool) -> Candidates:
    """Return the k best of one search's candidates in canonical order.

    Args:
        scores: (m,) float32, in any order.
        ids: (m,) int64; entries that are `MISSING` are left out.
        k: How many are wanted.
        higher_is_better: True for inner products, False for distances.

    Returns:
        At most k candidates, without padding. An id that was given twice is returned twice.
    """
    found = np.flatnonzero(ids != MISSING)
    order = found[
        _canonical_order(
            np.zeros(len(found), np.int64), scores[found], ids[found], higher_is_better
        )
    ][:k]
    return Candidates(scores[order], ids[order])


def best_by_group(
    groups: npt.NDArray[Any],
    scores: Scores,
    ids: Ids,
    n_groups: int,
    k: int,
    higher_is_better: bool,
) -> Candidates:
    """Return the k best candidates of each group in canonical order.

    Args:
        groups: (m,) integers from 0 to n_groups - 1: whose candidate it is.
        scores: (m,) float32, in any order.
        ids: (m,) int64; entries that are `MISSING` are left out.
        n_groups: How many groups there are, those without a candidate included.
        k: How many are wanted for each.
        higher_is_better: True for inner products, False for distances.

    Returns:
        Arrays of shape (n_groups, k), padded at the end with `worst_score` and `MISSING`.
    """
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
    """Return the order by (group, score with the best first, id).

    Group and score are packed into one integer, which numpy sorts an order of magnitude faster
    than three keys; the ids are looked at only where this integer is the same twice.
    """
    keys = (groups.astype(np.uint64) << np.uint64(32)) | _ascending_bits(scores, higher_is_better)
    order = np.argsort(keys)
    in_order = keys[order]
    if np.any(in_order[1:] == in_order[:-1]):
        return np.lexsort((ids, keys))
    return order


def _ascending_bits(scores: Scores, higher_is_better: bool) -> npt.NDArray[np.uint64]:
    """Return integers that ascend as the scores get worse; scores that are equal stay equal.

    The bits of positive floats ascend as they do and those of negative ones descend: the usual
    radix sort transformation. Adding zero turns -0.0 into 0.0.
    """
    ascending = (-scores if higher_is_better else scores) + np.float32(0)
    bits = np.ascontiguousarray(ascending, dtype=np.float32).view(np.uint32)
    return np.where(bits & _SIGN_BIT, ~bits, bits | _SIGN_BIT).astype(np.uint64)
