"""A retriever over a workflow engine, and a chain that answers while the search goes on."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForChainRun
from langchain_core.documents import Document
from langchain_core.prompts import BasePromptTemplate
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import get_config_list, patch_config
from langchain_core.runnables.utils import AddableDict
from pydantic import ConfigDict, Field, field_validator

from ctxreuse.context.checks import checked_kind, checked_list
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.serving.aio import sync_bridge
from ctxreuse.workflow.engine import WorkflowEngine
from ctxreuse.workflow.library import speculative_rag_graph
from ctxreuse.workflow.models.language_model import Piece
from ctxreuse.workflow.runtime.events import DocumentsFound, TextDelta
from langchain_ctxreuse.scope import CarryingRetriever, scope_from_config
from langchain_ctxreuse.workflow.served_components import (
    DocumentOf,
    as_documents,
    checked_document_of,
    checked_model,
    streamed,
)
from langchain_ctxreuse.workflow.workflow_runnable import EngineRunnable


class WorkflowRetriever(CarryingRetriever):
    """Retrieves with an engine that is shared by all requests, without a graph.

    Searches that run at the same time are embedded and scanned together. In a conversation
    (`thread_id` in `config["configurable"]`, or `ctxreuse.request_context`) a search begins where
    the last one found something. Results are those of a plain search. A document has the block's id
    and text, and in its metadata the "score" if there is one: the higher, the nearer.

    Args:
        engine: The engine; it may have no model.
        k: How many documents to find; `invoke(query, k=3)` overrides it.
        retriever: Which of the engine's retrievers to use; None uses the default one.
        document_of: From a block's id to the document that it was made from, which is returned as a
            copy; None makes one.
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
        **options: Any,
    ) -> list[list[Document]]:
        """Return the documents for each query, in the order of the queries, all at once."""
        inputs = checked_list("inputs", inputs, "a list of queries")
        configs = get_config_list(config, len(inputs))
        return sync_bridge.run(partial(self.abatch, inputs, configs, **options), lasting=True)

    def _get_relevant_documents(
        self, query: str, *, run_manager: Any, **kwargs: Any
    ) -> list[Document]:
        work = partial(self._aget_relevant_documents, query, run_manager=run_manager, **kwargs)
        return sync_bridge.run(work, lasting=True)

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: Any, k: int | None = None
    ) -> list[Document]:
        scope = self._carried.scope
        found = await self.engine.retrieve(
            query,
            self.k if k is None else k,
            retriever=self.retriever,
            tenant=scope.tenant,
            session=scope.conversation_id,
        )
        return as_documents(found.documents, found.scores, self.document_of)


class SpeculativeRAGChain(EngineRunnable[Any, dict[str, Any]]):
    """Answers from what it retrieves, as `create_retrieval_chain` does, but begins earlier.

    The engine calls the model with the documents that the search has found so far. If the search
    ends with the same documents the answer counts, else the engine calls again: the output is
    always that of retrieving first. Callbacks see a wrong guess as a call that was cancelled.

    The input is a dict with the prompt's variables, or the query alone; the output has the inputs,
    the documents (`context`), best first, and the `answer`. The prompt shows the documents as text,
    with labels, in the planned order.

    Args:
        retriever: A retriever over an engine.
        prompt: The prompt template; one of its variables takes the documents.
        llm: A chat model, as it is or bound to arguments.
        query_key: The input that is searched for.
        context_key: The prompt's variable for the documents.
        answer_key: The name of the answer in the output.
        name: The run's name for callbacks.
    """

    def __init__(
        self,
        *,
        retriever: WorkflowRetriever,
        prompt: BasePromptTemplate[Any],
        llm: Runnable[Any, Any],
        query_key: str = "input",
        context_key: str = "context",
        answer_key: str = "answer",
        name: str | None = None,
    ) -> None:
        wanted = "a WorkflowRetriever; give the one that you have to an engine: WorkflowRetriever("
        wanted += "engine=WorkflowEngine(retriever=RetrieverStage(it)))"
        self._retriever = checked_kind("retriever", retriever, WorkflowRetriever, wanted)
        wanted = "a prompt template; pass ChatPromptTemplate.from_messages(...)"
        self._prompt = checked_kind("prompt", prompt, BasePromptTemplate, wanted)
        for key in (query_key, context_key, answer_key):
            checked_kind("a key", key, str, "a string")
        if context_key not in prompt.input_variables:
            raise InvalidRequestError(
                f"the prompt has no variable {context_key!r} for the documents, only "
                f"{', '.join(map(repr, prompt.input_variables)) or 'none'}; name it with "
                "context_key="
            )
        self.name = type(self).__name__ if name is None else name
        self._llm = checked_model(llm)
        self._query_key = query_key
        self._context_key = context_key
        self._answer_key = answer_key
        self._needed = {query_key, *prompt.input_variables} - {context_key}

    @property
    def OutputType(self) -> Any:  # noqa: N802  # the base class names it so
        """The type of the output, for schemas."""
        return dict[str, Any]

    async def _pieces(
        self,
        input: Any,  # noqa: A002
        run_manager: AsyncCallbackManagerForChainRun,
        config: RunnableConfig,
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the inputs, the documents, and the answer piece by piece."""
        inputs = self._checked_inputs(input)
        yield AddableDict({key: one for key, one in inputs.items() if key != self._answer_key})
        source, query = self._retriever, inputs[self._query_key]
        inside = patch_config(config, callbacks=run_manager.get_child())
        said = partial(self._said, inputs, inside)
        graph = speculative_rag_graph(self.get_name(), said, source.k, source.retriever)
        scope = scope_from_config(config)
        events = source.engine.stream(
            graph, query, tenant=scope.tenant, session=scope.conversation_id
        )
        callbacks = run_manager.get_child()
        search = await callbacks.on_retriever_start(None, query, name=source.get_name())
        found: list[Document] | None = None
        is_empty = True
        try:
            async with aclosing(events):
                async for event in events:
                    if isinstance(event, DocumentsFound):
                        found = as_documents(event.documents, event.scores, source.document_of)
                        await search.on_retriever_end(found)
                        yield AddableDict({self._context_key: found})
                    elif isinstance(event, TextDelta):
                        is_empty = False
                        yield AddableDict({self._answer_key: event.text})
        except BaseException as error:
            if found is None:
                await search.on_retriever_error(error)
            raise
        if is_empty:
            yield AddableDict({self._answer_key: ""})

    async def _said(
        self, inputs: Mapping[str, Any], config: RunnableConfig, context: str
    ) -> AsyncGenerator[Piece, None]:
        """Put documents into the prompt, and yield what the model says to that."""
        filled = await self._prompt.aformat_prompt(**{**inputs, self._context_key: context})
        async with aclosing(streamed(self._llm, filled, config, {})) as pieces:
            async for piece in pieces:
                yield piece

    def _checked_inputs(self, given: Any) -> dict[str, Any]:
        inputs = dict(given) if isinstance(given, Mapping) else {self._query_key: given}
        missing = sorted(self._needed - set(inputs))
        if missing:
            raise InvalidRequestError(
                f"the input lacks {', '.join(map(repr, missing))}; pass a dict with "
                f"{', '.join(map(repr, sorted(self._needed)))}"
            )
        if not isinstance(inputs[self._query_key], str):
            raise InvalidRequestError(
                f"{self._query_key!r} is searched for, so it must be a string, "
                f"not {describe(inputs[self._query_key])}; name another one with query_key="
            )
        return inputs
