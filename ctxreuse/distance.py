"""The papers' context distance under its public name."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

from ctxreuse.context.checks import checked_integer, checked_list, checked_number
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.policy import paper

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["context_distance", "pairwise_distances"]


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


def pairwise_distances(
    contexts: Sequence[Sequence[int]], alpha: float = 0.001, chunk_pairs: int = 4_000_000
) -> npt.NDArray[np.float64]:
    """Return Equation 1 for all pairs of contexts; see `ordering.paper.pairwise_distances`."""
    checked_number("alpha", alpha)
    checked_integer("chunk_pairs", chunk_pairs, 1)
    return paper.pairwise_distances(
        list(map(_numbers, checked_list("contexts", contexts, "a list of contexts"))),
        alpha,
        chunk_pairs,
    )


def _numbers(context: Any) -> list[int]:
    numbers = [
        checked_integer("a block", one)
        for one in checked_list("a context", context, "a list of blocks")
    ]
    if len(set(numbers)) < len(numbers) or max(numbers, default=0) >= 2**63:
        raise InvalidRequestError(
            f"a context must name each block once, by an integer below 2**63, not "
            f"{describe(context)}"
        )
    return numbers


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
