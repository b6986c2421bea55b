"""The papers' context distance: few shared blocks are far, shared blocks at other ranks farther."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


def context_distance(
    ids_a: Sequence[Hashable], ids_b: Sequence[Hashable], alpha: float = 0.001
) -> float:
    """Return Equation 1 of ContextPilot (section 4.1).

        d = 1 - |S| / max(|A|, |B|) + alpha * sum(|rank in A - rank in B| over S) / |S|

    The equation divides by zero for disjoint contexts; their distance is 1, the largest that
    overlap alone can give. A repeated id counts at its first position.

    Args:
        ids_a: Block ids, best first.
        ids_b: Block ids, best first.
        alpha: Weight of the ranks; the papers use 0.001 to 0.01.

    Returns:
        0 for equal contexts, 1 for disjoint ones (two empty ones included).
    """
    ranks_a = {block: rank for rank, block in enumerate(dict.fromkeys(ids_a))}
    ranks_b = {block: rank for rank, block in enumerate(dict.fromkeys(ids_b))}
    shared = ranks_a.keys() & ranks_b.keys()
    if not shared:
        return 1.0
    moved = sum(abs(ranks_a[block] - ranks_b[block]) for block in shared)
    return 1 - len(shared) / max(len(ranks_a), len(ranks_b)) + alpha * moved / len(shared)


def pairwise_distances(
    contexts: Sequence[Sequence[int]], alpha: float = 0.001, chunk_pairs: int = 4_000_000
) -> npt.NDArray[np.float64]:
    """Return Equation 1 for all pairs of contexts.

    Only pairs that share a block are looked at: each block's holders are joined with themselves,
    a bounded number of pairs at a time; every other pair is at distance 1.

    Args:
        contexts: For each context its blocks as integers from 0, best first, without repeats.
        alpha: Weight of the ranks.
        chunk_pairs: How many (context, context, block) triples may be held at once.

    Returns:
        The condensed upper triangle, as `scipy.cluster.hierarchy.linkage` takes it:
        n * (n - 1) / 2 distances in row order.
    """
    import numpy as np  # only known batches under the papers' strategy need it

    n = len(contexts)
    sizes = np.array([len(context) for context in contexts], dtype=np.int64)
    distances = np.ones(n * (n - 1) // 2)
    if not sizes.sum():
        return distances
    block = np.concatenate([np.asarray(context, dtype=np.int64) for context in contexts])
    owner = np.repeat(np.arange(n), sizes)
    rank = np.arange(len(block)) - np.repeat(np.cumsum(sizes) - sizes, sizes)

    # entries sorted by block, and by context within a block: a block's holders stand together
    by_block = np.argsort(block, kind="stable")
    holders, ranks = owner[by_block], rank[by_block]
    ends = np.searchsorted(block[by_block], block, side="right")
    here = np.empty_like(by_block)
    here[by_block] = np.arange(len(block))
    partners = ends - here - 1  # holders of the same block in later contexts

    row_cost = np.bincount(owner, weights=partners, minlength=n)
    for first, last in _row_chunks(row_cost, chunk_pairs):
        low, high = np.searchsorted(owner, [first, last])
        count = partners[low:high]
        left = np.repeat(np.arange(low, high), count)
        if not len(left):
            continue
        offset = np.arange(len(left)) - np.repeat(np.cumsum(count) - count, count)
        right = here[left] + 1 + offset
        pair = (owner[left] - first) * n + holders[right]
        width = (last - first) * n
        shared = np.bincount(pair, minlength=width)
        moved = np.bincount(pair, weights=np.abs(rank[left] - ranks[right]), minlength=width)
        i, j = np.divmod(np.flatnonzero(shared), n)
        s, m = shared[shared > 0], moved[shared > 0]
        i += first
        distance = 1 - s / np.maximum(sizes[i], sizes[j]) + alpha * m / s
        distances[i * n - i * (i + 1) // 2 + j - i - 1] = distance
    return distances


def _row_chunks(row_cost: npt.NDArray[Any], limit: int) -> list[tuple[int, int]]:
    """Cut rows 0..n into runs that cost at most `limit` (a single row may cost more)."""
    chunks: list[tuple[int, int]] = []
    first, cost, n = 0, 0.0, len(row_cost)
    for row in range(n):
        row_width = max(float(row_cost[row]), n)
        if row > first and cost + row_width > limit:
            chunks.append((first, row))
            first, cost = row, 0.0
        cost += row_width
    chunks.append((first, n))
    return chunks
