"""A LangChain retriever as an atomic retrieval stage of a workflow."""

from __future__ import annotations

from typing import Any

from langchain_core.documents import Document
from langchain_core.retrievers import RetrieverLike
from langchain_core.vectorstores import VectorStoreRetriever

from ctxreuse.context.blocks import ContextBlock
from ctxreuse.errors import InvalidRequestError
from langchain_ctxreuse.documents.document_plans import document_block, without_plan
from langchain_ctxreuse.documents.retriever import checked_retriever


class RetrieverStage:
    """Serves a LangChain retriever to a workflow.

    It is asked by `ainvoke`, which is the retriever's own where it has one and LangChain's thread
    where it has none; a thread cannot be stopped, so what is cancelled then ends unheard. A vector
    store's retriever is asked for k documents. Others know no k: set theirs to the largest that
    the workflow wants; what is more is left out. A document is known by its id or, without one, by
    its text; where a `ReuseRetriever` has planned the documents, the workflow plans them anew.

    Args:
        retriever: Any retriever, or any runnable from a string to documents.

    Raises:
        InvalidRequestError: If it is something else.

    Example:
        >>> import asyncio
        >>> from langchain_core.runnables import RunnableLambda
        >>> stage = RetrieverStage(RunnableLambda(lambda query: [Document("one"), Document("two")]))
        >>> [block.text for block in asyncio.run(stage.retrieve("Which?", 1))]
        ['one']
    """

    def __init__(self, retriever: RetrieverLike) -> None:
        checked_retriever(retriever)
        self._retriever = retriever

    async def retrieve(self, query: str, k: int) -> tuple[ContextBlock, ...]:
        """Return the first k documents for a query, as blocks.

        Raises:
            InvalidRequestError: If the retriever returns something else than documents.
        """
        # what a vector store's retriever is called with comes before its search_kwargs
        wanted: dict[str, Any] = (
            {"k": k} if isinstance(self._retriever, VectorStoreRetriever) else {}
        )
        documents = _checked_documents(await self._retriever.ainvoke(query, **wanted))
        unplanned = without_plan(documents)
        return tuple(map(document_block, (documents if unplanned is None else unplanned)[:k]))


def _checked_documents(documents: object) -> list[Document]:
    if not isinstance(documents, (list, tuple)):
        raise InvalidRequestError(
            f"the retriever must return a list of Document, not {type(documents).__name__}"
        )
    for one in documents:
        if not isinstance(one, Document):
            raise InvalidRequestError(
                f"the retriever must return a list of Document, not one with {type(one).__name__} "
                "in it"
            )
    return list(documents)
