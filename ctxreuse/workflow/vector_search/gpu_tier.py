"""The tier on a GPU: hot clusters are searched there, with the results of faiss.

A GPU adds up in another order than a CPU, so its scores differ in the last bits, and its best k may
differ. So it only narrows the choice. All vectors whose score is within a proven margin of the k-th
best go back to the CPU, which scores them again with faiss's own function. For a sum of d products
in float32, in any order, with or without fused operations (Higham, "Accuracy and Stability of
Numerical Algorithms", section 3.1):

    |computed - exact| <= gamma * sum(|products|),   gamma = d * u / (1 - d * u),   u = 2 ** -24

The sum is at most |x| * |y|; a squared distance is at most (|x| + |y|) ** 2. If E bounds the error
of the GPU's scores and F that of faiss's, then each vector among faiss's best k has on the GPU a
score within 2 * (E + F) of the k-th best there.

torch is imported only where this tier is used.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ctxreuse.errors import InvalidRequestError, MissingExtraError, describe
from ctxreuse.workflow.vector_search.hot_tier import ClusterTier, HotTier
from ctxreuse.workflow.vector_search.ivf import (
    IVFIndex,
    ScannedPairs,
    one_openmp_thread,
    require_faiss,
)
from ctxreuse.workflow.vector_search.top_k import (
    MISSING,
    Candidates,
    Ids,
    Vectors,
    best_by_group,
    nothing_found,
)

_SPARE = 32
"""Candidates beyond k that a pair may have within its margin; faiss scans a pair with more."""

_QUERIES_OF_A_GROUP = 8
"""Queries that one copy of a cluster meets in a product; those that it lacks are zeros."""

_LARGEST_PRODUCT = 1 << 26
"""Numbers of the clusters that are copied for a product: 256 MiB."""

_UNIT_ROUNDOFF = 2.0**-24
_SMALLEST_NORMAL = 2.0**-126
_LARGEST_SQUARE = 2.0**126


def gpu_is_usable() -> bool:
    """Return whether torch is installed and sees a GPU."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


def fastest_tier(index: IVFIndex, capacity_bytes: int) -> GpuTier | HotTier:
    """Return a `GpuTier` if there is a GPU and it can hold the index, else a `HotTier`.

    `capacity_bytes` are on the device of the tier.
    """
    if gpu_is_usable() and _is_plain(index):
        return GpuTier(index, capacity_bytes)
    return HotTier(index, capacity_bytes)


class GpuCluster(NamedTuple):
    """A cluster on the GPU, and in RAM, where the CPU scores its vectors again."""

    vectors: Any  # (n, d) float32 tensor on the device
    squared_norms: Any  # (n,) float32 tensor on the device
    stored: Vectors  # (n, d) as faiss stores them, in RAM
    ids: Ids
    largest_norm: float


class GpuTier(ClusterTier):
    """The tier on a GPU, for an `IndexIVFFlat`.

    Matrix products must be done in full float32, torch's default
    (`torch.set_float32_matmul_precision("highest")`); else faiss scans all.

    Args:
        index: An index that stores plain vectors.
        capacity_bytes: Size limit on the device; RAM holds the same vectors a second time.
        device: torch's name of it.
        every: As for `HotTier`.
        decay: As for `HotTier`.

    Raises:
        InvalidRequestError: The index compresses its vectors.
        MissingExtraError: torch is not installed.
    """

    def __init__(
        self,
        index: IVFIndex,
        capacity_bytes: int,
        *,
        device: str = "cuda",
        every: int = 50,
        decay: float = 0.5,
    ) -> None:
        super().__init__(index, capacity_bytes, every=every, decay=decay)
        if not _is_plain(index):
            raise InvalidRequestError(
                f"the GPU tier holds plain vectors, not {describe(index.code_size)} bytes for "
                f"{index.dimension} dimensions; use HotTier, or an IndexIVFFlat"
            )
        try:
            self._torch = importlib.import_module("torch")
        except ImportError as error:
            raise MissingExtraError("the GPU tier", "gpu") from error
        self._device = self._torch.device(device)
        if self._device.type == "cuda" and not self._torch.cuda.is_available():
            raise InvalidRequestError(
                "torch sees no GPU here, so nothing can be held on it; take "
                "fastest_tier(index, capacity_bytes), which then is a HotTier in RAM"
            )

    def _copy(self, cluster: int) -> GpuCluster:
        torch = self._torch
        stored = self.index.codes_of(cluster).view(np.float32)
        squares = np.einsum("ij,ij->i", stored, stored, dtype=np.float64)
        return GpuCluster(
            vectors=torch.from_numpy(stored).to(self._device, copy=True),
            squared_norms=torch.from_numpy(squares).to(self._device, torch.float32),
            stored=stored,
            ids=self.index.ids_of(cluster),
            largest_norm=float(np.sqrt(squares.max())),
        )

    def _ready(
        self, copies: dict[int, GpuCluster]
    ) -> tuple[dict[int, GpuCluster], Callable[[], None]]:
        """Lay the copies one behind another, so that one product takes many of them."""
        if not copies:
            return copies, lambda: self.index.accelerate(None)
        torch = self._torch
        scanner = _GpuScanner(torch, self._device, self.index, copies)
        sizes = [len(one.ids) for one in copies.values()]
        ends = np.cumsum(sizes)[:-1]
        kept = zip(
            torch.split(scanner.vectors, sizes),
            torch.split(scanner.squared_norms, sizes),
            np.split(scanner.stored, ends),
            np.split(scanner.ids, ends),
            (one.largest_norm for one in copies.values()),
            strict=True,
        )
        held = dict(zip(copies, map(GpuCluster._make, kept), strict=True))
        return held, lambda: self.index.accelerate(scanner)


class _GpuScanner:
    """Searches one set of clusters; a `ClusterScanner`."""

    def __init__(
        self, torch: Any, device: Any, index: IVFIndex, copies: Mapping[int, GpuCluster]
    ) -> None:
        self._torch = torch
        self._device = device
        self._higher_is_better = index.higher_is_better
        self._dimension = index.dimension
        held = list(copies.values())
        self.vectors = torch.cat([one.vectors for one in held])
        self.squared_norms = torch.cat([one.squared_norms for one in held])
        self.stored = np.concatenate([one.stored for one in held])
        self.ids = np.concatenate([one.ids for one in held])
        self._sizes = np.zeros(index.nlist, dtype=np.int64)
        self._sizes[list(copies)] = [len(one.ids) for one in held]
        self._starts = np.cumsum(self._sizes) - self._sizes
        self._largest_norms = np.zeros(index.nlist)
        self._largest_norms[list(copies)] = [one.largest_norm for one in held]

    def holds(self, clusters: Ids) -> npt.NDArray[np.bool_]:
        """Return for each cluster whether it is on the device; -1 is not."""
        return (clusters >= 0) & (self._sizes[clusters] > 0)

    def begin(
        self, vectors: Vectors, rows: Ids, clusters: Ids, k: int
    ) -> Callable[[], ScannedPairs]:
        """Start the device's work; the returned function does the CPU's part."""
        order = np.lexsort((clusters, -self._sizes[clusters]))  # clusters of like sizes together
        asked, where = vectors[rows[order]], clusters[order]
        try:  # products may be shortened to TF32 or bfloat16
            is_float32 = self._torch.get_float32_matmul_precision() == "highest"
        except RuntimeError:  # set through torch's newer settings, which have no single answer
            is_float32 = False
        parts = self._nearest(asked, where, k) if is_float32 else []

        def finish() -> ScannedPairs:
            nothing = nothing_found((len(order), k), self._higher_is_better)
            found = ScannedPairs(nothing, np.zeros(len(order), dtype=np.bool_))
            if parts:
                scores, places = (
                    self._torch.cat(several).cpu().numpy() for several in zip(*parts, strict=True)
                )
                found = self._scored_again(asked, where, scores, places, k)
            back = np.argsort(order)
            return ScannedPairs(
                Candidates(found.found.scores[back], found.found.ids[back]), found.is_certain[back]
            )

        return finish

    def _nearest(self, asked: Vectors, clusters: Ids, k: int) -> list[tuple[Any, Any]]:
        """Return scores (less is better) and places of each pair's best k and some more.

        The queries of a cluster are taken a few at a time, and such groups in one product, as long
        as none is shorter than half of the longest.
        """
        torch = self._torch
        first = np.flatnonzero(np.diff(clusters, prepend=-1))
        counts = np.diff(first, append=len(clusters))
        wide = min(_QUERIES_OF_A_GROUP, int(counts.max()))
        groups = -(-counts // wide)
        which = np.arange(len(clusters)) - np.repeat(first, counts)  # of its cluster's queries
        group = np.repeat(np.cumsum(groups) - groups, counts) + which // wide
        of_groups = np.repeat(clusters[first], groups)
        sizes = self._sizes[of_groups]
        parts, end = list[tuple[Any, Any]](), 0
        with torch.inference_mode(), torch.autocast(self._device.type, enabled=False):
            queries = torch.from_numpy(asked).to(self._device)
            while end < len(of_groups):
                start, longest = end, int(sizes[end])
                most = _LARGEST_PRODUCT // (longest * max(self._dimension, wide))
                end = int(np.searchsorted(-sizes, -(longest // 2), side="right"))
                end = min(end, start + max(1, most))
                some = of_groups[start:end]
                low, high = np.searchsorted(group, [start, end])
                slots = self._on_device(group[low:high] - start, which[low:high] % wide)
                parts.append(self._product(queries[low:high], slots, some, wide, k + _SPARE))
        return parts

    def _product(
        self, queries: Any, slots: tuple[Any, Any], clusters: Ids, wide: int, width: int
    ) -> tuple[Any, Any]:
        """Return scores and places for queries, of which each stands in a slot of a group."""
        torch = self._torch
        starts, sizes = self._on_device(self._starts[clusters], self._sizes[clusters])
        offsets = torch.arange(int(self._sizes[clusters].max()), device=self._device)
        places = starts[:, None] + torch.minimum(offsets, sizes[:, None] - 1)
        grouped = queries.new_zeros(len(clusters), wide, self._dimension)
        grouped[slots] = queries
        vectors = self.vectors[places].transpose(1, 2)
        if self._higher_is_better:
            scores = -torch.bmm(grouped, vectors)
        else:  # without the queries' squared norms, which change no order
            norms = self.squared_norms[places][:, None]
            scores = torch.baddbmm(norms, grouped, vectors, beta=1, alpha=-2)
        scores.masked_fill_((offsets >= sizes[:, None])[:, None], float("inf"))
        best, at = torch.topk(scores, min(width, len(offsets)), dim=2, largest=False)
        best, at = best[slots], at[slots] + starts[slots[0]][:, None]
        # scores that a small cluster lacks are infinite
        missing = (0, width - best.shape[1])
        pad = torch.nn.functional.pad
        return pad(best, missing, value=float("inf")), pad(at, missing)

    def _on_device(self, *arrays: Ids) -> tuple[Any, ...]:
        return tuple(self._torch.from_numpy(one).to(self._device) for one in arrays)

    def _scored_again(
        self, asked: Vectors, clusters: Ids, scores: Vectors, places: Ids, k: int
    ) -> ScannedPairs:
        norms = np.sqrt(np.einsum("ij,ij->i", asked, asked, dtype=np.float64))
        largest = self._largest_norms[clusters]
        limits = scores[:, k - 1].astype(np.float64) + self._margins(norms, largest)
        is_candidate = (scores <= limits[:, None]) & np.isfinite(scores)
        # comparisons with NaN are false: such queries are left to faiss
        is_certain = (norms + largest) ** 2 < _LARGEST_SQUARE
        is_certain &= (self._sizes[clusters] <= scores.shape[1]) | (scores[:, -1] > limits)
        pairs, columns = np.nonzero(is_candidate & is_certain[:, None])
        of_pairs = places[pairs, columns]
        again = self._faiss_scores(asked, pairs, of_pairs)
        best = best_by_group(
            pairs, again, self.ids[of_pairs], len(asked), k + 1, self._higher_is_better
        )
        # faiss decides which of those that tie at the end is kept
        ties = (best.scores[:, k - 1] == best.scores[:, k]) & (best.ids[:, k] != MISSING)
        found = Candidates(best.scores[:, :k], best.ids[:, :k])
        return ScannedPairs(found, is_certain & ~ties)

    def _margins(
        self, norms: npt.NDArray[np.float64], largest: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64]:
        """Return 2 * (E + F) for each pair, where E and F bound the errors of the scores."""
        # 4 for the operations around the sum: differences, squares, norms, their addition
        terms = self._dimension + 4
        gamma = terms * _UNIT_ROUNDOFF / (1 - terms * _UNIT_ROUNDOFF)
        if self._higher_is_better:
            both = 2 * gamma * norms * largest
        else:
            both = 3 * gamma * (norms + largest) ** 2
        # of products
        underflow = 4 * terms * _SMALLEST_NORMAL * (1 + norms + largest)
        return 2 * (both + underflow) * (1 + 1e-6)

    def _faiss_scores(self, asked: Vectors, rows: Ids, offsets: Ids) -> Vectors:
        faiss = require_faiss()
        inner, squared = faiss.pairwise_indexed_inner_product, faiss.pairwise_indexed_L2sqr
        score = inner if self._higher_is_better else squared
        rows, offsets = np.ascontiguousarray(rows), np.ascontiguousarray(offsets)
        scores = np.empty(len(rows), dtype=np.float32)
        pointer = faiss.swig_ptr
        if len(rows):
            with one_openmp_thread(faiss):
                score(
                    self._dimension,
                    len(rows),
                    pointer(asked),
                    pointer(rows),
                    pointer(self.stored),
                    pointer(offsets),
                    pointer(scores),
                )
        return scores


def _is_plain(index: IVFIndex) -> bool:
    faiss = require_faiss()
    return isinstance(faiss.downcast_index(index.faiss_index), faiss.IndexIVFFlat)
