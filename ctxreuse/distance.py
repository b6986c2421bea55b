"""The papers' distance between two contexts."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from ctxreuse.context.checks import checked_list, checked_number
from ctxreuse.errors import InvalidRequestError, describe

__all__ = ["context_distance"]


def context_distance(
    ids_a: Sequence[Hashable], ids_b: Sequence[Hashable], alpha: float = 0.001
) -> float:
    """Return Equation 1 of ContextPilot (section 4.1).

        d = 1 - |S| / max(|A|, |B|) + alpha * sum(|rank in A - rank in B| over S) / |S|

    The equation divides by zero for disjoint contexts; here their distance is 1. A repeated id
    counts at its first position.

    Args:
        ids_a: Block ids, best first.
        ids_b: Block ids, best first.
        alpha: Weight of the ranks; the papers use 0.001 to 0.01.

    Returns:
        0 for equal contexts, 1 for disjoint ones (two empty ones included).

    Raises:
        InvalidRequestError: wrong type or out of range.
    """
    checked_number("alpha", alpha)
    ranks_a, ranks_b = _ranks("ids_a", ids_a), _ranks("ids_b", ids_b)
    shared = ranks_a.keys() & ranks_b.keys()
    if not shared:
        return 1.0
    moved = sum(abs(ranks_a[block] - ranks_b[block]) for block in shared)
    return 1 - len(shared) / max(len(ranks_a), len(ranks_b)) + alpha * moved / len(shared)


def _ranks(name: str, ids: Any) -> dict[Hashable, int]:
    known = list(ids) if isinstance(ids, str) else checked_list(name, ids, "a list of block ids")
    for one in known:
        try:
            hash(one)
        except TypeError:
            raise InvalidRequestError(
                f"{name} holds {describe(one)}; block ids are strings or integers"
            ) from None
    return {block: rank for rank, block in enumerate(dict.fromkeys(known))}
