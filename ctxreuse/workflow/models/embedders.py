"""Embedders turn texts into vectors: static embeddings, TF-IDF, or a framework's."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ctxreuse.context.checks import checked_integer, checked_texts
from ctxreuse.context.tokens import well_formed
from ctxreuse.errors import InvalidRequestError, MissingExtraError, describe

Vectors: TypeAlias = NDArray[np.float32]
"""Shape (n, dimension)."""


@runtime_checkable
class Embedder(Protocol):
    """Turns queries into vectors; called in a thread, with several queries at once."""

    dimension: int

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Return the vectors of n queries, shape (n, dimension), in their order."""


class TfidfEmbedder:
    """TF-IDF vectors reduced to few dimensions by a truncated SVD: latent semantic analysis.

    A text without a known word gets the zero vector, others length 1.

    Args:
        texts: The corpus, or a sample of it, with 2 different words that count at least.
        dimensions: Length of a vector; at most the number of words, and of texts.

    Raises:
        MissingExtraError: scikit-learn is not installed.

    Source: Deerwester et al., Indexing by Latent Semantic Analysis, 1990.
    """

    def __init__(self, texts: Sequence[str], dimensions: int = 256) -> None:
        try:
            from sklearn.decomposition import TruncatedSVD
            from sklearn.feature_extraction.text import TfidfVectorizer
        except ImportError as error:
            raise MissingExtraError("TfidfEmbedder", "workflow") from error
        checked_integer("dimensions", dimensions, 1)
        known = checked_texts("texts", texts)
        tfidf = TfidfVectorizer(sublinear_tf=True, stop_words="english")
        try:
            weights = tfidf.fit_transform(known)
            svd = TruncatedSVD(min(dimensions, *weights.shape), random_state=0)
            with np.errstate(invalid="ignore"):  # the variance explained, of texts all alike
                svd.fit(weights)
        except ValueError as error:
            raise InvalidRequestError(
                f"the {len(known)} texts have fewer than 2 different words that count; "
                "fit it on texts like those that it will embed"
            ) from error
        self._tfidf = tfidf
        self.dimension = len(svd.components_)
        # sparse times dense wants the dense one by rows; else it is copied with every call
        self._by_word = np.ascontiguousarray(svd.components_.T, dtype=np.float32)

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Return the texts' vectors, shape (n, dimension)."""
        known = checked_texts("texts", texts)
        if not known:
            return np.zeros((0, self.dimension), np.float32)
        weights = self._tfidf.transform(known).astype(np.float32)
        vectors = np.asarray(weights @ self._by_word, dtype=np.float32)
        return _normalized(vectors)


class WordLlamaEmbedder:
    """Static English embeddings of the package wordllama: the mean of a text's token vectors.

    Nothing is downloaded. Vectors have 256 components and length 1, or are zero without a token.

    Raises:
        MissingExtraError: wordllama is not installed.

    Source: Miller, WordLlama: Recycled Token Embeddings from Large Language Models, 2024.
    """

    def __init__(self) -> None:
        package = find_spec("wordllama")
        try:
            from safetensors.numpy import load_file
            from tokenizers import Tokenizer
        except ImportError as error:
            raise MissingExtraError("WordLlamaEmbedder", "embeddings") from error
        if package is None or package.origin is None:
            raise MissingExtraError("WordLlamaEmbedder", "embeddings")
        # its data alone: importing the package sets up the root logger, and its loader may download
        folder = Path(package.origin).parent
        weights = load_file(folder / "weights" / "l2_supercat_256.safetensors")
        tokenizer = folder / "tokenizers" / "l2_supercat_tokenizer_config.json"
        self._vectors = weights["embedding.weight"].astype(np.float32)
        self._tokenizer = Tokenizer.from_file(str(tokenizer))
        self.dimension = self._vectors.shape[1]

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Return the texts' vectors, shape (n, dimension)."""
        known = checked_texts("texts", texts)
        means = np.zeros((len(known), self.dimension), np.float32)
        for mean, text in zip(means, known, strict=True):
            # each token once, with its number: a long text takes no more memory than the vocabulary
            encoded = self._tokenizer.encode(well_formed(text), add_special_tokens=False)
            tokens, counts = np.unique(np.array(encoded.ids, np.int64), return_counts=True)
            if len(tokens):
                mean[:] = np.average(self._vectors[tokens], axis=0, weights=counts)
        return _normalized(means)


class LangChainEmbedder:
    """Any LangChain `Embeddings`, or an object with its `embed_query`.

    Args:
        dimension: Length of a vector; None embeds a word to find out.
    """

    def __init__(self, embeddings: Any, *, dimension: int | None = None) -> None:
        if isinstance(embeddings, type) or not callable(getattr(embeddings, "embed_query", None)):
            raise InvalidRequestError(
                "embeddings must be LangChain Embeddings with embed_query(), not "
                f"{describe(embeddings)}"
            )
        self._embeddings = embeddings
        self.dimension = 0  # any, until it is known
        self.dimension = dimension or self.embed(["dimension"]).shape[1]

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Return the vectors of n queries, shape (n, dimension), asked for one by one."""
        known = checked_texts("texts", texts)
        vectors = [self._embeddings.embed_query(text) for text in known]
        return checked_vectors(vectors, len(known), self.dimension, "embed_query")


def checked_embedder(embedder: object) -> Embedder:
    """Return the argument if it is an embedder."""
    if isinstance(embedder, type) or not isinstance(embedder, Embedder):
        raise InvalidRequestError(
            f"embedder must have dimension and embed(texts), not be {describe(embedder)}; pass a "
            "WordLlamaEmbedder, a TfidfEmbedder, a LangChainEmbedder or one of your own"
        )
    return embedder


def checked_vectors(vectors: Any, count: int, dimension: int, giver: str) -> Vectors:
    """Return vectors as an array of shape (count, dimension); dimension 0 allows any."""
    if not count:
        return np.zeros((0, dimension), np.float32)
    try:
        array: Vectors = np.ascontiguousarray(vectors, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(
            f"{giver} must return vectors of equal length, not {type(vectors).__name__}"
        ) from error
    wanted = f"({count}, {dimension or 'any length'})"
    if array.ndim != 2 or len(array) != count or (dimension and array.shape[1] != dimension):
        raise InvalidRequestError(f"{giver} must return shape {wanted}, not {array.shape}")
    if not np.isfinite(array).all():
        raise InvalidRequestError(f"{giver} returned numbers that are not finite")
    return array


def _normalized(vectors: Vectors) -> Vectors:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.ascontiguousarray(vectors / np.where(lengths > 0, lengths, 1), dtype=np.float32)
