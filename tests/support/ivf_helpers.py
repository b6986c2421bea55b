"""Small faiss indexes and plain references for the tests of step-wise search."""

from functools import cache
from typing import Any

import faiss
import numpy as np

from ctxreuse.workflow.vector_search.ivf import IVFIndex
from ctxreuse.workflow.vector_search.top_k import Candidates, best_by_group

DIMENSION, NLIST, SIZE = 16, 32, 5000
METRICS = {"L2": faiss.METRIC_L2, "inner product": faiss.METRIC_INNER_PRODUCT}


@cache
def some_vectors(seed: int = 0, count: int = SIZE) -> np.ndarray:
    vectors = np.random.default_rng(seed).normal(size=(count, DIMENSION)).astype(np.float32)
    vectors.flags.writeable = False
    return vectors


def build_index(metric: str, vectors: np.ndarray | None = None, nlist: int = NLIST) -> Any:
    vectors = some_vectors() if vectors is None else vectors
    dimension, kind = vectors.shape[1], METRICS[metric]
    index = faiss.IndexIVFFlat(faiss.IndexFlat(dimension, kind), dimension, nlist, kind)
    index.cp.min_points_per_centroid = 1
    index.train(vectors)
    index.add(vectors)
    return index


def compressing_index(
    nlist: int = 4, metric: int = faiss.METRIC_L2, by_residual: bool = True
) -> Any:
    """Return an index, not yet trained, that holds a byte for each number."""
    kind = faiss.ScalarQuantizer.QT_8bit
    coarse = faiss.IndexFlatL2(DIMENSION)
    return faiss.IndexIVFScalarQuantizer(coarse, DIMENSION, nlist, kind, metric, by_residual)


@cache
def shared_index(metric: str) -> Any:
    """Return an index that many tests search and none changes."""
    return build_index(metric)


def scan_all(searched: IVFIndex, queries: np.ndarray, clusters: np.ndarray, k: int) -> Candidates:
    """Return the k best of each query over its (n, nprobe) clusters, scanned sorted by cluster."""
    rows = np.repeat(np.arange(len(queries)), clusters.shape[1])
    order = np.argsort(clusters.ravel(), kind="stable")
    return scan_pairs(searched, queries, rows[order], clusters.ravel()[order], k)


def scan_pairs(
    searched: IVFIndex, queries: np.ndarray, rows: np.ndarray, clusters: np.ndarray, k: int
) -> Candidates:
    return merge(searched, len(queries), rows, searched.scan(queries, rows, clusters, k))


def merge(searched: IVFIndex, queries: int, rows: np.ndarray, found: Candidates) -> Candidates:
    k = found.ids.shape[1]
    return best_by_group(
        np.repeat(rows, k),
        found.scores.ravel(),
        found.ids.ravel(),
        queries,
        k,
        searched.higher_is_better,
    )


def assert_same(found: Candidates, scores: np.ndarray, ids: np.ndarray) -> None:
    np.testing.assert_array_equal(found.ids, ids)
    np.testing.assert_array_equal(found.scores, scores)
