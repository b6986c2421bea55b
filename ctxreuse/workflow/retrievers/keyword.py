"""Keyword search (BM25) as an atomic retrieval stage."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ctxreuse.context.blocks import ContextBlock
from ctxreuse.errors import InvalidRequestError, MissingExtraError, describe


class KeywordRetriever:
    """Finds the blocks whose words fit a query best, with bm25s; it searches in a thread.

    Blocks that share no word with the query are not found; equally good ones stay in the order of
    the corpus.

    Args:
        blocks: The corpus: blocks or texts; a block that occurs twice counts once.
        stopwords: Words that do not count: a language that bm25s knows, or a list of words; None
            counts all.
        stemmer: Reduces words to their stems, as bm25s takes it, such as PyStemmer's
            `Stemmer.Stemmer("english")`; None leaves words as they are.
        k1: BM25's saturation of repeated words.
        b: BM25's length normalisation, from 0 to 1.

    Raises:
        InvalidRequestError: no blocks, or no block with a word that counts.
        MissingExtraError: bm25s is not installed.

    Source: Robertson and Zaragoza, The Probabilistic Relevance Framework: BM25 and Beyond, 2009;
    Lucene's variant, as in bm25s (Lù, 2024).

    Example:
        >>> retriever = KeywordRetriever(["Paris is in France.", "Rome is in Italy."])
        >>> [block.text for block in asyncio.run(retriever.retrieve("Where is Rome?", 5))]
        ['Rome is in Italy.']
    """

    def __init__(
        self,
        blocks: Iterable[ContextBlock | str],
        *,
        stopwords: str | Sequence[str] | None = "english",
        stemmer: Callable[..., Any] | None = None,
        k1: float = 1.5,
        b: float = 0.75,
    ) -> None:
        try:
            import bm25s
        except ImportError as error:
            raise MissingExtraError("keyword search", "workflow") from error
        self._blocks = _distinct(blocks)
        self._bm25s = bm25s
        self._stopwords = [] if stopwords is None else stopwords
        self._stemmer = stemmer
        words = self._words([block.text for block in self._blocks])
        if not any(words):
            raise InvalidRequestError(
                f"none of the {len(self._blocks)} blocks has a word that counts; "
                "give blocks with text, or fewer stopwords"
            )
        self._index = bm25s.BM25(method="lucene", k1=k1, b=b)
        self._index.index(words, show_progress=False)

    async def retrieve(self, query: str, k: int) -> tuple[ContextBlock, ...]:
        """Return the k blocks that fit a query best, best first; fewer if fewer share a word."""
        return await asyncio.to_thread(self._search, query, k)

    def _search(self, query: str, k: int) -> tuple[ContextBlock, ...]:
        words = self._words([query])[0]
        if not words or k < 1:
            return ()
        scores: np.ndarray[Any, Any] = self._index.get_scores(words)
        found = np.flatnonzero(scores > 0)
        if len(found) > k:  # all as good as the kth, so that their order decides
            kth = np.partition(scores[found], len(found) - k)[len(found) - k]
            found = found[scores[found] >= kth]
        best = found[np.lexsort((found, -scores[found]))][:k]
        return tuple(self._blocks[position] for position in best)

    def _words(self, texts: list[str]) -> list[list[str]]:
        words: list[list[str]] = self._bm25s.tokenize(
            texts,
            stopwords=self._stopwords,
            stemmer=self._stemmer,
            return_ids=False,
            show_progress=False,
        )
        return words


def _distinct(blocks: Iterable[ContextBlock | str]) -> tuple[ContextBlock, ...]:
    if isinstance(blocks, (str, bytes)) or not isinstance(blocks, Iterable):
        raise InvalidRequestError(
            f"blocks must be a list of ContextBlock or str, not {describe(blocks)}"
        )
    distinct: dict[bytes, ContextBlock] = {}
    for one in blocks:
        block = one if isinstance(one, ContextBlock) else ContextBlock(text=one)
        distinct.setdefault(block.key, block)
    if not distinct:
        raise InvalidRequestError("blocks must hold at least one block")
    return tuple(distinct.values())
