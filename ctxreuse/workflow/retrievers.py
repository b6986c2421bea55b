"""Retrievers that search in one call: a function, BM25, or several whose ranks are fused."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from ctxreuse.context.blocks import BlockKey, ContextBlock, ContextRequest
from ctxreuse.context.checks import check_function, checked_integer, checked_kind, checked_texts
from ctxreuse.errors import InvalidRequestError, MissingExtraError, describe
from ctxreuse.serving.aio.concurrency import all_of
from ctxreuse.workflow.errors import WorkflowError
from ctxreuse.workflow.graph.state import Documents

Found: TypeAlias = Sequence[ContextBlock | str]
"""The result of a user's search, best first."""


@runtime_checkable
class Retriever(Protocol):
    """A search that is one stage, without partial results."""

    async def retrieve(self, query: str, k: int) -> Sequence[ContextBlock]:
        """Return the k blocks that fit a query best, best first; fewer where there are no more."""


class CallableRetriever:
    """A retriever made of a function.

    Args:
        search: From a query and k to blocks or texts, best first. An async function runs in the
            event loop, any other one in threads, where the search of a cancelled stage runs to its
            end.

    Example:
        >>> retriever = CallableRetriever(lambda query, k: ["one text", "another"][:k])
    """

    def __init__(self, search: Callable[[str, int], Found | Awaitable[Found]]) -> None:
        check_function("search", search, "a function of a query and k")
        self._search: Callable[[str, int], Any] = search
        self._is_async = _is_async(search)

    async def retrieve(self, query: str, k: int) -> tuple[ContextBlock, ...]:
        """Return the first k blocks that the function finds.

        Raises:
            InvalidRequestError: the function does not return blocks or texts.
        """
        check_search(query, k)
        if self._is_async:
            found = await self._search(query, k)
        else:
            found = await asyncio.to_thread(self._search, query, k)
            if inspect.isawaitable(found):  # a lambda around an async function
                found = await found
        return found_blocks(found, k, "search")


def check_search(query: object, k: object) -> None:
    """Check what a search is asked for."""
    checked_kind("query", query, str, "a text")
    checked_integer("k", k)


def checked_retriever(retriever: object, name: str = "retriever") -> Retriever:
    """Return the argument if it is a retriever."""
    if isinstance(retriever, type) or not isinstance(retriever, Retriever):
        raise InvalidRequestError(
            f"{name} must have retrieve(query, k), not be {describe(retriever)}; wrap a function "
            "in CallableRetriever, a LangChain or LlamaIndex retriever in its RetrieverStage"
        )
    if not _is_async(retriever.retrieve):
        raise InvalidRequestError(
            f"retrieve of {name} ({type(retriever).__name__}) must be an async function; wrap it: "
            "CallableRetriever(it.retrieve)"
        )
    return retriever


def found_blocks(found: object, k: int, finder: str) -> Documents:
    """Return the first k findings."""
    wanted = f"{finder} must return a list of ContextBlock or str, not "
    if isinstance(found, (str, bytes)) or not isinstance(found, Sequence):
        raise InvalidRequestError(wanted + type(found).__name__)
    for one in found:
        if not isinstance(one, (ContextBlock, str)):
            raise InvalidRequestError(f"{wanted}one with {type(one).__name__} in it")
    return Documents(found[:k])


def _is_async(function: object) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  # an object's method, not a question
    )


class KeywordRetriever:
    """Finds the blocks whose words fit a query best, with bm25s; it searches in a thread.

    Blocks that share no word with the query are not found; equally good ones stay in the order of
    the corpus.

    Args:
        blocks: The corpus: blocks or texts; a block that occurs twice counts once.
        stopwords: Words that do not count: a language that bm25s knows, or a list; None counts all.
        stemmer: Reduces words to their stems, such as PyStemmer's `Stemmer.Stemmer("english")`;
            None leaves words as they are.

    Raises:
        InvalidRequestError: no block has a word that counts.
        MissingExtraError: bm25s is not installed.

    Source: Robertson and Zaragoza, The Probabilistic Relevance Framework: BM25 and Beyond, 2009;
    Lucene's variant, as in bm25s (Lù, 2024).
    """

    def __init__(
        self,
        blocks: Iterable[ContextBlock | str],
        *,
        stopwords: str | Sequence[str] | None = "english",
        stemmer: Callable[..., Any] | None = None,
    ) -> None:
        try:
            import bm25s
        except ImportError as error:
            raise MissingExtraError("KeywordRetriever", "workflow") from error
        self._blocks = tuple(ContextRequest(blocks).unique_blocks.values())
        self._bm25s = bm25s
        if stopwords is not None and not isinstance(stopwords, str):
            wanted = "the name of a language, a list of words, or None"
            stopwords = checked_texts("stopwords", stopwords, wanted)
        self._stopwords = stopwords
        if stemmer is not None and not callable(getattr(stemmer, "stemWord", stemmer)):
            raise InvalidRequestError(
                f"stemmer must be a function, or have stemWord as PyStemmer's has, "
                f"not {describe(stemmer)}"
            )
        self._stemmer = stemmer
        try:
            self._words([""])
        except ValueError as error:
            raise InvalidRequestError(
                f"bm25s knows no stopwords {describe(stopwords)}; "
                'pass "english", another language, a list of words, or None'
            ) from error
        words = self._words([block.text for block in self._blocks])
        if not any(words):
            raise InvalidRequestError(
                f"none of the {len(self._blocks)} blocks has a word that counts; "
                "give blocks with text, or fewer stopwords"
            )
        self._index = bm25s.BM25(method="lucene")
        self._index.index(words, show_progress=False)

    async def retrieve(self, query: str, k: int) -> tuple[ContextBlock, ...]:
        """Return the k blocks that fit a query best, best first; fewer if fewer share a word."""
        check_search(query, k)
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


class RetrieverError(WorkflowError, RuntimeError):
    """One of several retrievers failed; its own error is the cause."""


def reciprocal_rank_fusion(rankings: Sequence[Sequence[ContextBlock]]) -> tuple[ContextBlock, ...]:
    """Rank blocks by the sum of 1 / (60 + rank) (Cormack et al., 2009), then by best rank."""
    blocks: dict[BlockKey, ContextBlock] = {}
    ranks: dict[BlockKey, list[int]] = {}
    for ranking in rankings:
        distinct = {block.key: block for block in ranking}
        for rank, (key, block) in enumerate(distinct.items(), start=1):
            blocks.setdefault(key, block)
            ranks.setdefault(key, []).append(rank)

    def goodness(key: BlockKey) -> tuple[float, int]:
        # fsum: the sum of the same ranks is the same in any order
        return -math.fsum(1 / (60 + rank) for rank in ranks[key]), min(ranks[key])

    return tuple(blocks[key] for key in sorted(blocks, key=goodness))


class FusedRetriever:
    """Asks several retrievers side by side and fuses their results; one atomic stage.

    Args:
        retrievers: The retrievers, by name: `{"dense": ..., "keyword": ...}`. Each is asked for
            twice as many blocks as are wanted.
    """

    def __init__(self, retrievers: Mapping[str, Retriever]) -> None:
        if not isinstance(retrievers, Mapping) or not retrievers:
            raise InvalidRequestError(
                "retrievers must be a dict from names to retrievers, not "
                f"{describe(retrievers)}; pass {{'dense': ..., 'keyword': ...}}"
            )
        self._retrievers = {
            name: checked_retriever(one, f"retriever {name!r}") for name, one in retrievers.items()
        }

    async def retrieve(self, query: str, k: int) -> tuple[ContextBlock, ...]:
        """Return the k blocks that all the retrievers together find best.

        Raises:
            RetrieverError: One of them fails; the others are then cancelled.
        """
        check_search(query, k)
        wanted = 2 * k

        async def ask(name: str, retriever: Retriever) -> Documents:
            try:
                found = await retriever.retrieve(query, wanted)
                return found_blocks(found, wanted, f"retriever {name!r}")
            except Exception as error:
                raise RetrieverError(
                    f"retriever {name!r} failed with {type(error).__name__}; its error is the cause"
                ) from error

        rankings = await all_of(ask(*named) for named in self._retrievers.items())
        return reciprocal_rank_fusion(rankings)[:k]
