"""Local retrieval: TF-IDF and truncated SVD as embeddings, FAISS for the search."""

from __future__ import annotations

from collections.abc import Sequence

from ctxreuse.errors import MissingExtraError
from ctxreuse.workflow.models.embedders import TfidfEmbedder


def retrieve(
    texts: Sequence[str], queries: Sequence[str], k: int, dimensions: int = 128
) -> list[list[int]]:
    """Return for each query the positions of the k nearest texts, best first.

    Args:
        texts: What is searched.
        queries: The questions.
        k: The number of texts a question gets.
        dimensions: Size of the embeddings.

    Raises:
        MissingExtraError: The extra `demo` is not installed.
    """
    try:
        import faiss
        import sklearn  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("the demo's retrieval", "demo") from error
    embedder = TfidfEmbedder.fit(texts, dimensions)
    index = faiss.IndexFlatIP(embedder.dimension)
    index.add(embedder.embed(texts))
    _, found = index.search(embedder.embed(queries), k)
    return [[int(position) for position in row] for row in found]
