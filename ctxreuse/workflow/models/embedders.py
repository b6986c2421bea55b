"""Embedders turn texts into vectors: static embeddings, a model, TF-IDF, or a framework's."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ctxreuse.context.checks import checked_integer, checked_texts
from ctxreuse.context.files import written_file
from ctxreuse.errors import InputFileError, InvalidRequestError, MissingExtraError, describe

Vectors: TypeAlias = NDArray[np.float32]
"""Shape (n, dimension)."""

_EXTRA = "workflow"


@runtime_checkable
class Embedder(Protocol):
    """Turns queries into vectors; called in a thread, with several queries at once."""

    dimension: int

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Return the vectors of n queries, shape (n, dimension), in their order."""


class TfidfEmbedder:
    """TF-IDF vectors reduced to few dimensions by a truncated SVD: latent semantic analysis.

    Made by `fit` or `load`. A text without a known word gets the zero vector, others length 1.

    Args:
        words: The words that count, n of them, each once.
        idf: (n,) their inverse document frequencies.
        components: (dimension, n) the rows of the SVD.

    Raises:
        MissingExtraError: scikit-learn is not installed.

    Source: Deerwester et al., Indexing by Latent Semantic Analysis, 1990.
    """

    def __init__(self, words: Sequence[str], idf: NDArray[Any], components: Vectors) -> None:
        try:
            from sklearn.feature_extraction.text import TfidfVectorizer
        except ImportError as error:
            raise MissingExtraError("TF-IDF embeddings", _EXTRA) from error
        known, idf, components = _tfidf_parts(words, idf, components)
        self.dimension = len(components)
        self._words = tuple(known)
        self._components = components
        # sparse times dense wants the dense one by rows; else it is copied with every call
        self._by_word = np.ascontiguousarray(components.T)
        self._tfidf = TfidfVectorizer(
            sublinear_tf=True, vocabulary={word: number for number, word in enumerate(known)}
        )
        self._tfidf.idf_ = idf

    @classmethod
    def fit(cls, texts: Sequence[str], dimensions: int = 256) -> TfidfEmbedder:
        """Return an embedder for texts like these.

        Args:
            texts: The corpus, or a sample of it, with 2 different words that count at least.
            dimensions: Length of a vector; at most the number of words, and of texts.
        """
        try:
            from sklearn.decomposition import TruncatedSVD
            from sklearn.feature_extraction.text import TfidfVectorizer
        except ImportError as error:
            raise MissingExtraError("TF-IDF embeddings", _EXTRA) from error
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
        return cls(
            tfidf.get_feature_names_out().tolist(),
            tfidf.idf_,
            np.ascontiguousarray(svd.components_, dtype=np.float32),
        )

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Return the texts' vectors, shape (n, dimension)."""
        known = checked_texts("texts", texts)
        if not known:
            return np.zeros((0, self.dimension), np.float32)
        weights = self._tfidf.transform(known).astype(np.float32)
        vectors = np.asarray(weights @ self._by_word, dtype=np.float32)
        return _normalized(vectors)

    def embed_passages(self, texts: Sequence[str]) -> Vectors:
        """`embed`, since queries and passages are alike."""
        return self.embed(texts)

    def save(self, path: str | Path) -> None:
        """Write the embedder to a file (npz), which `load` reads.

        Raises:
            InputFileError: it cannot be written.
        """
        words = np.frombuffer("\n".join(self._words).encode(), dtype=np.uint8)
        with written_file(path) as file:
            np.savez_compressed(
                file, words=words, idf=self._tfidf.idf_, components=self._components
            )

    @classmethod
    def load(cls, path: str | Path) -> TfidfEmbedder:
        """Read a file that `save` has written; nothing in the file is run.

        Raises:
            InputFileError: not such a file.
        """
        try:
            with Path(path).open("rb") as file, np.load(file, allow_pickle=False) as stored:
                words = np.asarray(stored["words"], np.uint8).tobytes().decode().split("\n")
                parts = _tfidf_parts(words, stored["idf"], stored["components"])
        except (
            Exception
        ) as error:  # broken bytes reach numpy, zipfile, several packers and a parser
            raise InputFileError(
                f"{describe(str(path))} cannot be read as a TfidfEmbedder; write one with save()"
            ) from error
        return cls(*parts)


def _tfidf_parts(
    words: Sequence[str], idf: NDArray[Any], components: Vectors
) -> tuple[list[str], NDArray[Any], Vectors]:
    known = checked_texts("words", words)
    try:
        frequencies = np.asarray(idf, np.float64)
        rows = np.ascontiguousarray(components, np.float32)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequestError(
            "idf and components must be arrays of numbers, not "
            f"{type(idf).__name__} and {type(components).__name__}; use TfidfEmbedder.fit"
        ) from error
    wanted = (len(known),)
    if not known or frequencies.shape != wanted or rows.shape[1:] != wanted or not len(rows):
        raise InvalidRequestError(
            f"{len(known)} words need idf and rows of components of that length, and a row at "
            f"least, not {frequencies.shape} and {rows.shape}; use TfidfEmbedder.fit"
        )
    if len(set(known)) < len(known):
        raise InvalidRequestError("words must be different ones; use TfidfEmbedder.fit")
    if not (np.isfinite(frequencies).all() and np.isfinite(rows).all()):
        raise InvalidRequestError("idf and components must be finite; use TfidfEmbedder.fit")
    return known, frequencies, rows


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
            raise MissingExtraError("static embeddings", "embeddings") from error
        if package is None or package.origin is None:
            raise MissingExtraError("static embeddings", "embeddings")
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
            tokens, counts = np.unique(self._tokens(text), return_counts=True)
            if len(tokens):
                mean[:] = np.average(self._vectors[tokens], axis=0, weights=counts)
        return _normalized(means)

    def embed_passages(self, texts: Sequence[str]) -> Vectors:
        """`embed`, since queries and passages are alike."""
        return self.embed(texts)

    def _tokens(self, text: str) -> NDArray[np.int64]:
        known = text.encode(errors="replace").decode()  # lone surrogates are in no vocabulary
        encoded = self._tokenizer.encode(known, add_special_tokens=False)
        return np.array(encoded.ids, np.int64)


class SentenceTransformerEmbedder:
    """A model of sentence-transformers, whose results must be vectors.

    Args:
        model: Its name, its folder, or the `SentenceTransformer` itself.
        query_prefix: The text that the model expects before a query, such as "query: " for E5.
        passage_prefix: The text that it expects before a passage.
        batch_size: Texts of one batch.
        normalize: Whether vectors get length 1, as for inner products and cosine.

    Raises:
        MissingExtraError: sentence-transformers is not installed.
    """

    def __init__(
        self,
        model: Any,
        *,
        query_prefix: str = "",
        passage_prefix: str = "",
        batch_size: int = 32,
        normalize: bool = True,
    ) -> None:
        if isinstance(model, str):
            model = _sentence_transformer(model)
        if not callable(getattr(model, "encode", None)):
            raise InvalidRequestError(
                f"model must be a SentenceTransformer or the name of one, not {describe(model)}"
            )
        self._model = model
        self._query_prefix = query_prefix
        self._passage_prefix = passage_prefix
        self._batch_size = batch_size
        self._normalize = normalize
        self.dimension = 0
        # the model's own methods for this have changed their names
        self.dimension = len(self._encoded(["dimension"])[0])

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Return the vectors of n queries, shape (n, dimension)."""
        return self._encoded([self._query_prefix + text for text in checked_texts("texts", texts)])

    def embed_passages(self, texts: Sequence[str]) -> Vectors:
        """Return the vectors of n passages, shape (n, dimension), for an index."""
        return self._encoded(
            [self._passage_prefix + text for text in checked_texts("texts", texts)]
        )

    def _encoded(self, texts: list[str]) -> Vectors:
        if not texts:
            return np.zeros((0, self.dimension), np.float32)
        vectors = self._model.encode(
            texts,
            batch_size=self._batch_size,
            normalize_embeddings=self._normalize,
            convert_to_numpy=True,
            show_progress_bar=False,
        )
        return checked_vectors(vectors, len(texts), self.dimension, "the model")


class LangChainEmbedder:
    """Any LangChain `Embeddings`, or an object with its two methods.

    Args:
        embeddings: The embeddings.
        dimension: Length of a vector; None embeds a word to find out.
    """

    def __init__(self, embeddings: Any, *, dimension: int | None = None) -> None:
        for name in ("embed_query", "embed_documents"):
            if isinstance(embeddings, type) or not callable(getattr(embeddings, name, None)):
                raise InvalidRequestError(
                    f"embeddings must be LangChain Embeddings with {name}(), "
                    f"not {describe(embeddings)}"
                )
        self._embeddings = embeddings
        self.dimension = dimension or 0
        if dimension is None:
            self.dimension = self.embed(["dimension"]).shape[1]

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Return the vectors of n queries, shape (n, dimension), asked for one by one."""
        known = checked_texts("texts", texts)
        vectors = [self._embeddings.embed_query(text) for text in known]
        return checked_vectors(vectors, len(known), self.dimension, "embed_query")

    def embed_passages(self, texts: Sequence[str]) -> Vectors:
        """Return the vectors of n passages, shape (n, dimension), for an index."""
        known = checked_texts("texts", texts)
        vectors = self._embeddings.embed_documents(known)
        return checked_vectors(vectors, len(known), self.dimension, "embed_documents")


def checked_embedder(embedder: object) -> Embedder:
    """Return the argument if it is an embedder."""
    if isinstance(embedder, type) or not isinstance(embedder, Embedder):
        raise InvalidRequestError(
            f"embedder must have dimension and embed(texts), not be {describe(embedder)}; pass a "
            "WordLlamaEmbedder, a TfidfEmbedder, a SentenceTransformerEmbedder, a "
            "LangChainEmbedder or one of your own"
        )
    return embedder


def _sentence_transformer(name: str) -> Any:
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise MissingExtraError("embedding with sentence-transformers", _EXTRA) from error
    return SentenceTransformer(name)


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
