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
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ctxreuse.errors import InvalidRequestError, MissingExtraError, describe
from ctxreuse.workflow.vector_search.faiss_views import openmp_threads, require_faiss
from ctxreuse.workflow.vector_search.hot_tier import ClusterTier, HotTier
from ctxreuse.workflow.vector_search.ivf import IVFIndex, ScannedPairs
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

_LARGEST_BLOCK = 1 << 26
"""Scores that are held on the device at a time: 256 MiB."""

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


@dataclass(frozen=True, slots=True, eq=False)
class GpuCluster:
    """A cluster on the GPU, and in RAM, where the CPU scores its vectors again."""

    vectors: Any  # (n, d) float32 tensor on the device
    squared_norms: Any  # (n,) float32 tensor on the device
    stored: Vectors  # (n, d) as faiss stores them, in RAM
    ids: Ids
    largest_norm: float


class GpuTier(ClusterTier[GpuCluster]):
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

    def _serve(self, copies: Mapping[int, GpuCluster]) -> None:
        scanner = _GpuScanner(self._torch, self._device, self.index, copies) if copies else None
        self.index.accelerate(scanner)


class _GpuScanner:
    """Searches one set of clusters; a `ClusterScanner`."""

    def __init__(
        self, torch: Any, device: Any, index: IVFIndex, copies: Mapping[int, GpuCluster]
    ) -> None:
        self._torch = torch
        self._device = device
        self._higher_is_better = index.higher_is_better
        self._dimension = index.dimension
        self._copies = copies
        self._is_held = np.zeros(index.nlist, dtype=np.bool_)
        self._is_held[list(copies)] = True

    def holds(self, clusters: Ids) -> npt.NDArray[np.bool_]:
        """Return for each cluster whether it is on the device; -1 is not."""
        return (clusters >= 0) & self._is_held[clusters]

    def begin(
        self, vectors: Vectors, rows: Ids, clusters: Ids, k: int
    ) -> Callable[[], ScannedPairs]:
        """Start the device's work; the returned function does the CPU's part."""
        torch = self._torch
        order = np.argsort(clusters, kind="stable")
        asked = vectors[rows[order]]
        chosen, starts = np.unique(clusters[order], return_index=True)
        groups = list(zip(chosen.tolist(), starts, np.append(starts[1:], len(order)), strict=True))
        parts = []
        if _products_are_float32(torch):
            on_device = torch.from_numpy(asked).to(self._device)
            parts = [
                part
                for cluster, start, end in groups
                for part in self._nearest(on_device[start:end], self._copies[cluster], k)
            ]

        def finish() -> ScannedPairs:
            nothing = nothing_found((len(order), k), self._higher_is_better)
            found = ScannedPairs(nothing, np.zeros(len(order), dtype=np.bool_))
            if parts:
                scores = torch.cat([part[0] for part in parts]).cpu().numpy()
                offsets = torch.cat([part[1] for part in parts]).cpu().numpy()
                found = self._scored_again(asked, groups, scores, offsets, k)
            back = np.argsort(order)
            return ScannedPairs(
                Candidates(found.found.scores[back], found.found.ids[back]), found.is_certain[back]
            )

        return finish

    def _nearest(self, asked: Any, cluster: GpuCluster, k: int) -> list[tuple[Any, Any]]:
        """Return blocks of scores (less is better) and offsets of the best k and some more."""
        torch = self._torch
        size = len(cluster.stored)
        width = k + _SPARE
        block = max(1, _LARGEST_BLOCK // size)
        parts = []
        with torch.inference_mode(), torch.autocast(self._device.type, enabled=False):
            for start in range(0, len(asked), block):
                some = asked[start : start + block]
                if self._higher_is_better:
                    scores = -(some @ cluster.vectors.T)
                else:
                    # without the queries' squared norms, which change no order
                    scores = torch.addmm(
                        cluster.squared_norms, some, cluster.vectors.T, beta=1, alpha=-2
                    )
                best, offsets = torch.topk(scores, min(width, size), dim=1, largest=False)
                # scores that a small cluster lacks are infinite
                missing = (0, width - best.shape[1])
                pad = torch.nn.functional.pad
                parts.append((pad(best, missing, value=float("inf")), pad(offsets, missing)))
        return parts

    def _scored_again(
        self,
        asked: Vectors,
        groups: list[tuple[int, int, int]],
        scores: npt.NDArray[np.float32],
        offsets: Ids,
        k: int,
    ) -> ScannedPairs:
        norms = np.sqrt(np.einsum("ij,ij->i", asked, asked, dtype=np.float64))
        largest = np.empty(len(asked))
        is_whole = np.empty(len(asked), dtype=np.bool_)
        for cluster, start, end in groups:
            largest[start:end] = self._copies[cluster].largest_norm
            is_whole[start:end] = len(self._copies[cluster].stored) <= scores.shape[1]
        limits = scores[:, k - 1].astype(np.float64) + self._margins(norms, largest)
        is_candidate = (scores <= limits[:, None]) & np.isfinite(scores)
        # comparisons with NaN are false: such queries are left to faiss
        is_certain = (norms + largest) ** 2 < _LARGEST_SQUARE
        is_certain &= is_whole | (scores[:, -1] > limits)

        pairs, places = np.nonzero(is_candidate & is_certain[:, None])
        of_pairs = offsets[pairs, places]
        ids = np.full(len(pairs), MISSING, dtype=np.int64)
        again = np.empty(len(pairs), dtype=np.float32)
        bounds = np.searchsorted(pairs, [end for _, _, end in groups])
        first = 0
        for (cluster, _, _), last in zip(groups, bounds.tolist(), strict=True):
            copy = self._copies[cluster]
            part = slice(first, last)
            ids[part] = copy.ids[of_pairs[part]]
            again[part] = self._faiss_scores(asked, pairs[part], copy.stored, of_pairs[part])
            first = last
        best = best_by_group(pairs, again, ids, len(asked), k + 1, self._higher_is_better)
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

    def _faiss_scores(self, asked: Vectors, rows: Ids, stored: Vectors, offsets: Ids) -> Vectors:
        faiss = require_faiss()
        inner, squared = faiss.pairwise_indexed_inner_product, faiss.pairwise_indexed_L2sqr
        score = inner if self._higher_is_better else squared
        rows, offsets = np.ascontiguousarray(rows), np.ascontiguousarray(offsets)
        scores = np.empty(len(rows), dtype=np.float32)
        pointer = faiss.swig_ptr
        if len(rows):
            with openmp_threads(1):
                score(
                    self._dimension,
                    len(rows),
                    pointer(asked),
                    pointer(rows),
                    pointer(stored),
                    pointer(offsets),
                    pointer(scores),
                )
        return scores


def _products_are_float32(torch: Any) -> bool:
    """Return whether matrix products are not shortened to TF32 or bfloat16."""
    try:
        return bool(torch.get_float32_matmul_precision() == "highest")
    except RuntimeError:  # set through torch's newer settings, which have no single answer
        return False


def _is_plain(index: IVFIndex) -> bool:
    faiss = require_faiss()
    return isinstance(faiss.downcast_index(index.faiss_index), faiss.IndexIVFFlat)
