"""A retriever that plans what another one retrieves, and a compressor that plans its input."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from typing import Any, ClassVar, Self

from langchain_core.callbacks import (
    AsyncCallbackManagerForRetrieverRun,
    CallbackManagerForRetrieverRun,
    Callbacks,
)
from langchain_core.documents import BaseDocumentCompressor, Document
from langchain_core.retrievers import BaseRetriever, RetrieverLike
from langchain_core.runnables import Runnable, RunnableConfig, RunnableSerializable
from langchain_core.runnables.config import get_config_list, patch_config, run_in_executor
from pydantic import ConfigDict, PrivateAttr, field_validator

from ctxreuse.context.checks import refuse_wrapped
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.pipeline.document_turn import RETRIEVALS, ItemKind, RetrievedItems
from ctxreuse.pipeline.ordered_release import run_here
from ctxreuse.serving.planning_fields import PlansDocuments
from langchain_ctxreuse.configurable import configurable_around, without_bindings
from langchain_ctxreuse.documents.document_plans import DOCUMENTS
from langchain_ctxreuse.documents.run_documents import follow_runs, log_nested, run_documents
from langchain_ctxreuse.scope import CarryingRetriever, scope_from_config


def checked_retriever(retriever: object) -> object:
    """Return the retriever."""
    if isinstance(retriever, Runnable):
        schema: dict[str, Any] = {}
        if not isinstance(retriever, BaseRetriever):
            with suppress(Exception):  # it cannot tell: any error, of types that have no schema
                schema = retriever.get_input_jsonschema()
        if schema.get("type") == "object" and schema.get("required"):
            raise InvalidRequestError(
                "retriever takes a dict, such as a history-aware one, but a retriever is asked "
                "with the question alone; wrap the retriever inside it: "
                "create_history_aware_retriever(llm, ReuseRetriever(retriever=...), prompt)"
            )
        return retriever
    remedy = "pass a retriever or a runnable from a string to documents"
    if hasattr(retriever, "as_retriever"):
        remedy = "pass its as_retriever()"
    raise InvalidRequestError(f"retriever is {describe(retriever)}; {remedy}")


def retrieved_documents(documents: object) -> list[Document]:
    """Return what a retriever returned as a list."""
    is_list = isinstance(documents, (list, tuple, Iterator))
    found: list[Any] = list(documents) if is_list else []  # type: ignore[call-overload]
    others = [type(one).__name__ for one in found if not isinstance(one, Document)]
    if others or not is_list:
        wrong = f"one with {others[0]} in it" if others else type(documents).__name__
        raise InvalidRequestError(f"the retriever must return a list of Document, not {wrong}")
    return found


class ReuseRetriever(PlansDocuments, CarryingRetriever):
    """Returns what another retriever retrieves in the order that the prefix cache serves best.

    The order alone is its own: the documents are those of the retriever inside, as many as came, a
    repeat behind all others. A `ReuseChatModel` around the model does the rest, and saves without
    it, too; this is for models not yours to wrap. What it saves is unknown to `planner.savings`.

    If planning fails the documents go through as retrieved. Callbacks, config and further arguments
    reach the retriever inside; its errors are not caught. Make it the outermost retriever: inside
    another one it returns the documents as retrieved. `batch` and `abatch` plan all contexts
    together, tenants apart, and so do calls that come at once; none waits longer than 5 ms.

    Args:
        retriever: Any retriever, or any runnable from a string to documents.
        planner: Plans the contexts; None takes the one of this process.
        annotation: Whether the ranking stands behind the documents as one more Document.
        drop_repeats: Whether documents of the same text are returned once.
    """

    model_config = ConfigDict(extra="forbid")

    retriever: RetrieverLike
    _held: ClassVar[str] = "retriever"
    _kind: ClassVar[ItemKind[Document]] = DOCUMENTS
    _is_in_batch: bool = PrivateAttr(default=False)  # then the batch plans

    def _build(self) -> None:
        super()._build()
        follow_runs()  # to know which are nested

    @field_validator("retriever", mode="before")
    @classmethod
    def _check_retriever(cls, retriever: object) -> object:
        refuse_wrapped("retriever", without_bindings(retriever), ReuseRetriever)
        return checked_retriever(retriever)

    def configurable_fields(self, **fields: Any) -> RunnableSerializable[str, list[Document]]:
        """Return a retriever whose fields a config can set, as LangChain's retrievers do."""
        return configurable_around(self, "retriever", super().configurable_fields, fields)

    def batch(
        self,
        inputs: list[str],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        **options: Any,
    ) -> list[list[Document]]:
        """Return the documents for each query, in the order of the queries, planned together."""
        configs = get_config_list(config, len(inputs))
        retrieved = super(ReuseRetriever, self._in_batch()).batch(inputs, configs, **options)
        return self._planned_batch(inputs, configs, retrieved)

    async def abatch(
        self,
        inputs: list[str],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        **options: Any,
    ) -> list[list[Document]]:
        """`batch`, awaited."""
        configs = get_config_list(config, len(inputs))
        retrieved = await super(ReuseRetriever, self._in_batch()).abatch(inputs, configs, **options)
        # a large batch takes long enough to hold up the event loop
        return await run_in_executor(None, self._planned_batch, inputs, configs, retrieved)

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        return run_here(self._found("invoke", query, run_manager, kwargs))

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        return await self._found("ainvoke", query, run_manager, kwargs)

    async def _found(
        self, method: str, query: str, run: Any, arguments: Mapping[str, Any]
    ) -> list[Document]:
        (config, scope), blocks, retrieval = self._carried, method == "invoke", object()
        inside = patch_config(config, callbacks=run.get_child())
        RETRIEVALS[retrieval] = scope.tenant or ""
        try:
            found = getattr(self.retriever, method)(query, inside, **arguments)
            documents: list[Document] = found if blocks else await found
        finally:
            RETRIEVALS.pop(retrieval, None)
        if self._is_in_batch or run_documents().run_of(run.run_id).is_nested:
            if not self._is_in_batch:
                log_nested()
            return documents
        retrieved = _retrieved_items(documents, query, config)
        return self._documents.plan(retrieved) if blocks else await self._documents.aplan(retrieved)

    def _in_batch(self) -> Self:
        """Return a copy whose calls leave the planning to the batch."""
        calling = copy(self)
        calling._is_in_batch = True
        return calling

    def _planned_batch(
        self,
        queries: Sequence[str],
        configs: Sequence[RunnableConfig],
        retrieved: list[list[Document]],
    ) -> list[list[Document]]:
        """Return what a batch retrieved in planned order; exceptions stay in their positions."""
        runs = run_documents()
        batch = {
            position: _retrieved_items(documents, query, config)
            for position, (documents, query, config) in enumerate(
                zip(retrieved, queries, configs, strict=True)
            )
            if not isinstance(documents, Exception) and not runs.run_of(config).is_retriever
        }
        if len(batch) < sum(not isinstance(one, Exception) for one in retrieved):
            log_nested()
        planned = dict(zip(batch, self._documents.plan_batch(list(batch.values())), strict=True))
        return [planned.get(position, given) for position, given in enumerate(retrieved)]


class ReuseCompressor(PlansDocuments, BaseDocumentCompressor):
    """Puts documents into the order in which the engine's prefix cache serves most of them.

    For `ContextualCompressionRetriever` and, as the last one, for `DocumentCompressorPipeline`. As
    for `ReuseRetriever`, the order alone is its own. A `ContextualCompressionRetriever` that is
    invoked on its own passes no config on: name the tenant with `ctxreuse.request_context` there.

    Args:
        planner: Plans the contexts; None takes the one of this process.
        annotation: As for `ReuseRetriever`.
        drop_repeats: As for `ReuseRetriever`.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    _kind: ClassVar[ItemKind[Document]] = DOCUMENTS

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> Sequence[Document]:
        """Return the documents in their planned order."""
        return self._documents.plan(_retrieved_items(documents, query))

    async def acompress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> Sequence[Document]:
        """`compress_documents`, awaited."""
        return await self._documents.aplan(_retrieved_items(documents, query))


def _retrieved_items(
    documents: Sequence[Document], query: str, config: RunnableConfig | None = None
) -> RetrievedItems[Document]:
    root = run_documents().run_of(config).root
    return RetrievedItems(documents, query, scope_from_config(config), root)
