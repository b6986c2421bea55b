"""Several retrievers as one, their results fused by rank (such as dense + keyword)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence

from ctxreuse.context.blocks import BlockKey, ContextBlock
from ctxreuse.context.checks import checked_number, checked_optional_integer
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.workflow.errors import WorkflowError
from ctxreuse.workflow.retrievers.atomic import Retriever, checked_retriever, found_blocks


class RetrieverError(WorkflowError, RuntimeError):
    """One of several retrievers failed; its own error is the cause."""


def reciprocal_rank_fusion(
    rankings: Sequence[Sequence[ContextBlock]], *, constant: float = 60, limit: int | None = None
) -> tuple[ContextBlock, ...]:
    """Return one ranking of all blocks of several rankings, each block once.

    A block scores the sum of 1 / (constant + rank) over the rankings that hold it, ranks counted
    from 1. Blocks with the same score are ordered by their best rank, then by the order of the
    rankings.

    Args:
        rankings: Blocks, best first; if a ranking holds a block twice, its first place counts.
        constant: From 0; the larger, the less the first ranks stand out.
        limit: How many blocks are returned; None is all.

    Returns:
        The blocks, best first.

    Raises:
        InvalidRequestError: wrong type or out of range.

    Source: Cormack, Clarke and Büttcher, Reciprocal Rank Fusion outperforms Condorcet and
    individual Rank Learning Methods, 2009.

    Example:
        >>> a, b, c = (ContextBlock(text=text) for text in "abc")
        >>> [block.text for block in reciprocal_rank_fusion([[a, b], [b, c]])]
        ['b', 'a', 'c']
    """
    checked_number("constant", constant)
    checked_optional_integer("limit", limit)
    blocks: dict[BlockKey, ContextBlock] = {}
    ranks: dict[BlockKey, list[int]] = {}
    for ranking in rankings:
        distinct = {block.key: block for block in reversed(ranking)}
        for rank, (key, block) in enumerate(reversed(distinct.items()), start=1):
            blocks.setdefault(key, block)
            ranks.setdefault(key, []).append(rank)

    def goodness(key: BlockKey) -> tuple[float, int]:
        # fsum: the sum of the same ranks is the same in any order
        return -math.fsum(1 / (constant + rank) for rank in ranks[key]), min(ranks[key])

    return tuple(blocks[key] for key in sorted(blocks, key=goodness)[:limit])


class FusedRetriever:
    """Asks several retrievers side by side and fuses their results; one atomic stage.

    Blocks with the same id and text are the same.

    Args:
        retrievers: The retrievers, by name: `{"dense": ..., "keyword": ...}`.
        candidates: How many blocks each is asked for, at least as many as are wanted; None is twice
            as many as are wanted.
        constant: That of `reciprocal_rank_fusion`.

    Raises:
        InvalidRequestError: no retrievers, wrong type or out of range.
    """

    def __init__(
        self,
        retrievers: Mapping[str, Retriever],
        *,
        candidates: int | None = None,
        constant: float = 60,
    ) -> None:
        if not isinstance(retrievers, Mapping) or not retrievers:
            raise InvalidRequestError(
                "retrievers must be a dict from names to retrievers, not "
                f"{describe(retrievers)}; pass {{'dense': ..., 'keyword': ...}}"
            )
        checked_optional_integer("candidates", candidates, 1)
        checked_number("constant", constant)
        self._retrievers = {
            name: checked_retriever(one, f"retriever {name!r}") for name, one in retrievers.items()
        }
        self._candidates = candidates
        self._constant = constant

    async def retrieve(self, query: str, k: int) -> tuple[ContextBlock, ...]:
        """Return the k blocks that all the retrievers together find best.

        Raises:
            RetrieverError: One of them fails; the others are then cancelled.
        """
        wanted = max(k, 2 * k if self._candidates is None else self._candidates)
        failed: list[RetrieverError] = []
        try:
            async with asyncio.TaskGroup() as group:
                asking = [
                    group.create_task(self._ask(name, one, query, wanted))
                    for name, one in self._retrievers.items()
                ]
        except* RetrieverError as errors:
            failed += [one for one in errors.exceptions if isinstance(one, RetrieverError)]
        if failed:
            raise failed[0]
        return reciprocal_rank_fusion(
            [task.result() for task in asking], constant=self._constant, limit=k
        )

    @staticmethod
    async def _ask(name: str, retriever: Retriever, query: str, k: int) -> tuple[ContextBlock, ...]:
        try:
            return found_blocks(await retriever.retrieve(query, k), k, f"retriever {name!r}")
        except Exception as error:
            raise RetrieverError(
                f"retriever {name!r} failed with {type(error).__name__}; its error is the cause"
            ) from error
