"""The papers' context distance under its public name."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from ctxreuse.context.checks import checked_list, checked_number
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.policy import paper

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
    return paper.context_distance(_ids("ids_a", ids_a), _ids("ids_b", ids_b), alpha)


def _ids(name: str, ids: Any) -> list[Hashable]:
    known = list(ids) if isinstance(ids, str) else checked_list(name, ids, "a list of block ids")
    for one in known:
        try:
            hash(one)
        except TypeError:
            raise InvalidRequestError(
                f"{name} holds {describe(one)}; block ids are strings or integers"
            ) from None
    return known
