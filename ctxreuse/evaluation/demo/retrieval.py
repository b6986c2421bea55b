"""Local retrieval: TF-IDF and truncated SVD as embeddings, FAISS for the search."""

from __future__ import annotations

from collections.abc import Sequence

from ctxreuse.errors import MissingExtraError

_DIMENSIONS = 128


def retrieve(
    texts: Sequence[str], queries: Sequence[str], k: int, dimensions: int = _DIMENSIONS
) -> list[list[int]]:
    """Return for each query the positions of the k nearest texts, best first.

    Args:
        texts: What is searched.
        queries: The questions.
        k: How many texts a question gets.
        dimensions: Size of the embeddings.

    Raises:
        MissingExtraError: If the extra `demo` is not installed.
    """
    try:
        import faiss
        import numpy as np
        from sklearn.decomposition import TruncatedSVD
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import Normalizer
    except ImportError as error:
        raise MissingExtraError("the demo's retrieval", "demo") from error

    embed = make_pipeline(
        TfidfVectorizer(sublinear_tf=True, stop_words="english"),
        TruncatedSVD(dimensions, random_state=0),
        Normalizer(copy=False),
    )
    vectors = np.ascontiguousarray(embed.fit_transform(texts), dtype=np.float32)
    index = faiss.IndexFlatIP(dimensions)
    index.add(vectors)
    _, found = index.search(np.ascontiguousarray(embed.transform(queries), dtype=np.float32), k)
    return [[int(position) for position in row] for row in found]
