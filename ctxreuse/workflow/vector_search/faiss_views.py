"""Stock faiss as `IVFIndex` uses it: which indexes will do, and views of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ctxreuse.errors import InvalidRequestError, MissingExtraError, describe

_OTHER_INDEXES = (
    "other indexes serve a workflow as one atomic stage: "
    "CallableRetriever(a function that searches it)"
)

_BY_PAIR = 2
"""faiss mode that spreads pairs of query and cluster over its threads. Results are the same."""


def require_faiss() -> Any:
    """Return the module faiss."""
    try:
        import faiss
    except ImportError as error:
        raise MissingExtraError("step-wise vector search", "workflow") from error
    return faiss


@contextmanager
def openmp_threads(threads: int | None) -> Iterator[None]:
    """Set how many OpenMP threads faiss uses for the calling thread, which has its own number."""
    faiss = require_faiss()
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(before if threads is None else threads)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


def checked_faiss_index(faiss: Any, index: Any) -> Any:
    """Return a faiss index, downcast, if it can be searched cluster by cluster."""
    if not isinstance(index, faiss.Index):
        raise InvalidRequestError(
            f"an IVFIndex is built over a faiss index, not over {describe(type(index).__name__)}"
        )
    index = faiss.downcast_index(index)
    kind = type(index)
    if kind not in (faiss.IndexIVFFlat, faiss.IndexIVFScalarQuantizer):
        raise InvalidRequestError(
            f"{kind.__name__} cannot be searched cluster by cluster, IndexIVFFlat and "
            f"IndexIVFScalarQuantizer can; {_remedy(faiss, index)}"
        )
    if index.metric_type not in (faiss.METRIC_L2, faiss.METRIC_INNER_PRODUCT):
        raise InvalidRequestError(
            f"the index's metric must be L2 or inner product, not {index.metric_type}"
        )
    inner = index.metric_type == faiss.METRIC_INNER_PRODUCT
    if kind is faiss.IndexIVFScalarQuantizer and index.by_residual and inner:
        raise InvalidRequestError(
            "a scalar quantizer with inner products must be built with by_residual=False"
        )
    if not index.is_trained:
        raise InvalidRequestError("the index must be trained before it can be searched")
    return index


def _remedy(faiss: Any, index: Any) -> str:
    if isinstance(index, faiss.IndexPreTransform):
        return "transform the vectors first (apply_chain) and give the inner index"
    if isinstance(index, faiss.IndexIDMap):
        return "build the inner index with add_with_ids, which an IVF index can do itself"
    return _OTHER_INDEXES


def view_of(faiss: Any, index: Any, lists: Any) -> Any:
    """Return an index that shares the quantizer of another one, and searches the lists."""
    if type(index) is faiss.IndexIVFFlat:
        view = faiss.IndexIVFFlat(index.quantizer, index.d, index.nlist, index.metric_type)
    else:
        view = faiss.IndexIVFScalarQuantizer(
            index.quantizer,
            index.d,
            index.nlist,
            index.sq.qtype,
            index.metric_type,
            index.by_residual,
        )
        view.sq = index.sq
    view.replace_invlists(lists, False)
    view.parallel_mode = _BY_PAIR
    view.is_trained = True
    view.ntotal = index.ntotal
    return view
