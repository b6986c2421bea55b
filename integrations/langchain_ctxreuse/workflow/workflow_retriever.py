"""A retriever over a workflow engine: searches of all requests share its scans."""

from __future__ import annotations

from functools import partial
from typing import Any

from langchain_core.callbacks import (
    AsyncCallbackManagerForRetrieverRun,
    CallbackManagerForRetrieverRun,
)
from langchain_core.documents import Document
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import get_config_list
from pydantic import ConfigDict, Field, field_validator

from ctxreuse.serving.aio import sync_bridge
from ctxreuse.workflow.engine import WorkflowEngine
from langchain_ctxreuse.scope import CarryingRetriever
from langchain_ctxreuse.workflow.langchain_documents import (
    DocumentOf,
    as_documents,
    checked_document_of,
)


class WorkflowRetriever(CarryingRetriever):
    """Retrieves with an engine that is shared by all requests, without a graph.

    Searches that run at the same time are embedded and scanned together, whether they come from
    `invoke` in threads, `batch`, `ainvoke`, or the engine's workflows. In a conversation, named by
    `config={"configurable": {"thread_id": ...}}` or `ctxreuse.request_context`, a search begins
    where the last one found something. Results are those of a plain search.

    A document has the block's id and text, and in its metadata the "score" if the retriever gives
    one: the higher, the nearer. To get the documents of a vector store, pass `document_of`.

    Args:
        engine: The engine; it may have no model.
        k: How many documents to find; `invoke(query, k=3)` overrides it.
        retriever: Which of the engine's retrievers to use; None uses the default one.
        document_of: From a block's id to the document that it was made from, which is returned as a
            copy; None makes one.

    Raises:
        ValueError: wrong type or out of range.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    engine: WorkflowEngine = Field(repr=False)
    k: int = Field(default=5, ge=1)
    retriever: str | None = None
    document_of: DocumentOf | None = Field(default=None, repr=False)

    _check_document_of = field_validator("document_of", mode="before")(checked_document_of)

    def batch(
        self,
        inputs: list[str],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any | None,
    ) -> list[list[Document]]:
        """Return the documents for each query, in the order of the queries, all at once."""
        configs = get_config_list(config, len(inputs))
        work = partial(self.abatch, inputs, configs, return_exceptions=return_exceptions, **kwargs)
        return sync_bridge.run(work, lasting=True)

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        return sync_bridge.run(partial(self._found, query, **kwargs), lasting=True)

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        return await self._found(query, **kwargs)

    async def _found(self, query: str, k: int | None = None) -> list[Document]:
        scope = self._carried.scope
        found = await self.engine.retrieve(
            query,
            self.k if k is None else k,
            retriever=self.retriever,
            tenant=scope.tenant,
            session=scope.conversation_id,
        )
        return as_documents(found.documents, found.scores, self.document_of)
