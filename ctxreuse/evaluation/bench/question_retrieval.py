"""Finds blocks for questions: BM25, FAISS, or a framework's retriever."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any

from ctxreuse.context.blocks import ContextBlock
from ctxreuse.context.tokens import estimate_tokens
from ctxreuse.errors import InvalidRequestError, MissingExtraError, describe
from ctxreuse.evaluation.bench.workload import Found
from ctxreuse.evaluation.datasets import Dataset, Passage, Question
from ctxreuse.evaluation.plugins import RETRIEVERS, registered
from ctxreuse.workflow.models.embedders import TfidfEmbedder
from ctxreuse.workflow.retrievers import KeywordRetriever

_DIMENSIONS = 128


def retrieve(dataset: Dataset, how: str, k: int, advance: Callable[[], object]) -> Found:
    """Return the k blocks that are found for each question, best first.

    A question with a scope is searched in passages of that scope only.

    Args:
        dataset: Passages and questions. Questions that name their blocks keep them.
        how: "bm25", "faiss" (TF-IDF with SVD, exact search), or "module:name" of a LangChain or
            LlamaIndex retriever, or of a function that makes one from a list of passages.
        k: The number of blocks.
        advance: Called once a question.

    Returns:
        Question id -> blocks.

    Raises:
        InvalidRequestError: There is no such retriever, or it does not return a list.
        MissingExtraError: A package that it needs is not installed.
    """
    blocks = {one.id: _block(one) for one in dataset.passages}
    found: dict[str, Sequence[ContextBlock]] = {}
    scopes: dict[str, list[Question]] = {}
    for question in dataset.questions:
        if question.blocks is None:
            scopes.setdefault(question.scope, []).append(question)
        else:
            found[question.id] = tuple(blocks[one] for one in question.blocks[:k])
            advance()
    for scope, questions in scopes.items():
        passages = [one for one in dataset.passages if not scope or one.scope == scope]
        search = _search(how, [blocks[one.id] for one in passages], passages)
        queries = [question.text for question in questions]
        for question, best in zip(questions, search(queries, k), strict=True):
            found[question.id] = best
            advance()
    return found


_Search = Callable[[Sequence[str], int], Iterator[Sequence[ContextBlock]]]
"""From queries and k to the blocks found for each query, best first."""


def _search(how: str, blocks: Sequence[ContextBlock], passages: Sequence[Passage]) -> _Search:
    match how:
        case "bm25":
            return _bm25(blocks)
        case "faiss":
            return _faiss(blocks)
    return _framework(how, passages)


def _block(passage: Passage) -> ContextBlock:
    tokens = estimate_tokens(passage.text) if passage.tokens is None else passage.tokens
    return ContextBlock(id=passage.id, text=passage.text, tokens=tokens)


def _bm25(blocks: Sequence[ContextBlock]) -> _Search:
    _check_installed("bm25s", for_="bm25")
    retriever = KeywordRetriever(blocks)

    def search(queries: Sequence[str], k: int) -> Iterator[Sequence[ContextBlock]]:
        with asyncio.Runner() as runner:
            for query in queries:
                yield runner.run(retriever.retrieve(query, k))

    return search


def _faiss(blocks: Sequence[ContextBlock]) -> _Search:
    faiss = _check_installed("faiss", "sklearn", for_="faiss")[0]
    texts = [block.text for block in blocks]
    embedder = TfidfEmbedder.fit(texts, _DIMENSIONS)
    index = faiss.IndexFlatIP(embedder.dimension)
    index.add(embedder.embed(texts))

    def search(queries: Sequence[str], k: int) -> Iterator[Sequence[ContextBlock]]:
        _, found = index.search(embedder.embed(queries), min(k, len(blocks)))
        for row in found:
            yield [blocks[int(position)] for position in row]

    return search


def _check_installed(*modules: str, for_: str) -> list[Any]:
    try:
        return [import_module(module) for module in modules]
    except ImportError as error:
        raise MissingExtraError(f"--retriever {for_}", "bench") from error


def _framework(how: str, passages: Sequence[Passage]) -> _Search:
    module, separator, name = how.partition(":")
    if not separator:
        raise InvalidRequestError(
            f"there is no retriever {describe(how)}; take bm25, faiss, or module:name of a "
            "LangChain or LlamaIndex retriever"
        )
    sys.path.insert(0, "")  # as python -m has it, so that a file here can be named
    try:
        retriever = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InvalidRequestError(f"--retriever {describe(how)}: {error}") from error
    finally:
        sys.path.remove("")
    methods = registered(RETRIEVERS)
    if isinstance(retriever, type) or not any(hasattr(retriever, one) for one in methods):
        retriever = retriever(passages)
    for method, entry in methods.items():
        if hasattr(retriever, method):
            retrieve_one, block_of = getattr(retriever, method), entry.load()
            return lambda queries, k: (
                _found(retrieve_one(one), block_of, k, how) for one in queries
            )
    raise InvalidRequestError(
        f"--retriever {describe(how)} is {type(retriever).__name__}, which has none of the methods "
        f"{', '.join(methods)} of a framework's retriever"
    )


def _found(
    found: Any, block_of: Callable[[Any], ContextBlock], k: int, how: str
) -> list[ContextBlock]:
    if not isinstance(found, list):
        raise InvalidRequestError(
            f"--retriever {describe(how)} must return a list, not {type(found).__name__}"
        )
    return [block_of(one) for one in found[:k]]
