"""Dense retrieval in steps: an index, its blocks, and an embedder."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ctxreuse.context.blocks import ContextBlock
from ctxreuse.context.checks import checked_integer, checked_kind, checked_list
from ctxreuse.context.fork_safety import ForkSafeLock
from ctxreuse.errors import InvalidRequestError
from ctxreuse.workflow.graph.state import Documents
from ctxreuse.workflow.models.embedders import Embedder, checked_embedder, checked_vectors
from ctxreuse.workflow.retrievers import check_search
from ctxreuse.workflow.vector_search.ivf import IVFIndex, integers
from ctxreuse.workflow.vector_search.top_k import Ids, Vectors, best_by_group

if TYPE_CHECKING:
    from ctxreuse.workflow.vector_search.hot_tier import ClusterTier

Blocks: TypeAlias = Sequence[ContextBlock | str] | Callable[[int], ContextBlock]
"""The block of each id of an index."""


class VectorRetriever:
    """A vector index whose searches a workflow engine runs step by step, or `retrieve` in one call.

    Args:
        index: A stock faiss IVF index, or an `IVFIndex`.
        blocks: The block of each id: a sequence, or a function.
        embedder: Makes a query's vector.
        nprobe: Clusters that each search scans; the index's own by default. One that finds fewer
            than k there goes on until it has k, or has scanned all.
        hot: Keeps the clusters that are used most in fast memory: a `HotTier` or `GpuTier` over the
            same `IVFIndex`.

    Attributes:
        probed_further: How many searches went on.

    Raises:
        InvalidRequestError: the parts do not fit each other.
    """

    def __init__(
        self,
        index: object,
        blocks: Blocks,
        embedder: Embedder,
        *,
        nprobe: int | None = None,
        hot: ClusterTier | None = None,
    ) -> None:
        self.index = index if isinstance(index, IVFIndex) else IVFIndex(index)
        if nprobe is None:
            nprobe = self.index.nprobe
        checked_integer("nprobe", nprobe, 1)
        if checked_embedder(embedder).dimension != self.index.dimension:
            raise InvalidRequestError(
                f"the embedder makes vectors of {embedder.dimension} dimensions, the index holds "
                f"vectors of {self.index.dimension}; use the embedder that the index was made with"
            )
        if not callable(blocks):
            wanted = "a list of blocks, or a function from id to block"
            if len(checked_kind("blocks", blocks, Sequence, wanted)) < self.index.size:
                raise InvalidRequestError(
                    f"blocks has {len(blocks)} entries for an index of {self.index.size} vectors; "
                    "give one for each, or a function from id to block"
                )
        if hot is not None and getattr(hot, "index", None) is not self.index:
            raise InvalidRequestError(
                "the hot tier is over another index; make IVFIndex(...) once, and give it to both"
            )
        self.nprobe = min(nprobe, self.index.nlist)
        self.hot = hot
        self._blocks = blocks
        self._embedder = embedder
        self.probed_further = 0
        self._counting = ForkSafeLock()

    def prepare(self, queries: Sequence[str], k: Sequence[int]) -> tuple[Vectors, list[Ids]]:
        """Return the queries' vectors and the clusters to probe for k of each, nearest first.

        Raises:
            InvalidRequestError: There is not one k for each query, or the embedder does not return
                one finite vector.
        """
        queries = checked_list("queries", queries, "a list of queries")
        most = integers(k, "k", None, None, len(queries)).tolist()
        vectors = checked_vectors(
            self._embedder.embed(queries), len(queries), self.index.dimension, "the embedder"
        )
        sizes, probed = self.index.cluster_sizes, []
        nearest = self.index.nearest_clusters(vectors, self.nprobe)
        for vector, clusters, wanted in zip(vectors, nearest, most, strict=True):
            clusters, wanted = clusters[clusters >= 0], min(wanted, self.index.size)
            if sizes[clusters].sum() < wanted:
                with self._counting:
                    self.probed_further += 1
                clusters = self.index.nearest_clusters(vector[None], self.index.nlist)[0]
                clusters = clusters[clusters >= 0]
                clusters = clusters[: int(np.searchsorted(np.cumsum(sizes[clusters]), wanted)) + 1]
            probed.append(clusters)
        return vectors, probed

    async def retrieve(self, query: str, k: int) -> Documents:
        """Return the k blocks nearest to a query, searched in one call in a thread."""
        check_search(query, k)
        return await asyncio.to_thread(self._search, query, k)

    def _search(self, query: str, k: int) -> Documents:
        vectors, [clusters] = self.prepare([query], [k])
        rows = np.zeros(len(clusters), dtype=np.int64)
        k = min(k, self.index.size)
        found = self.index.scan(vectors, rows, clusters, k)
        group = np.zeros(found.ids.size, dtype=np.int64)
        higher = self.index.higher_is_better
        best = best_by_group(group, found.scores.ravel(), found.ids.ravel(), 1, k, higher)
        return self.blocks_of(best.ids[best.ids >= 0].tolist())

    def blocks_of(self, ids: Iterable[int]) -> Documents:
        """Return the blocks of ids, in their order."""
        blocks = self._blocks
        wanted = checked_list("ids", ids, "a list of ids of the index")
        for one in wanted:
            checked_kind("an id", one, (int, np.integer), "an integer")
            if not callable(blocks) and not 0 <= one < len(blocks):
                raise InvalidRequestError(f"there are {len(blocks)} blocks, and no id {one}")
        return Documents(blocks(i) if callable(blocks) else blocks[i] for i in wanted)
