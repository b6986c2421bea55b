"""Retriever, template and model as one query engine, whose answer begins during the search."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.response.schema import (
    RESPONSE_TYPE,
    AsyncStreamingResponse,
    Response,
    StreamingResponse,
)
from llama_index.core.callbacks import CallbackManager, CBEventType, EventPayload
from llama_index.core.llms import LLM
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL
from llama_index.core.prompts.mixin import PromptDictType, PromptMixinType
from llama_index.core.schema import NodeWithScore, QueryBundle
from llama_index.core.settings import Settings

from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.serving.aio import sync_bridge
from ctxreuse.serving.client.request import Prompt
from ctxreuse.workflow.library import context_of, speculative_rag_graph
from ctxreuse.workflow.models.language_model import Piece
from ctxreuse.workflow.runtime.events import DocumentsFound, TextDelta
from llamaindex_ctxreuse.workflow.engine_retriever import WorkflowRetriever
from llamaindex_ctxreuse.workflow.llamaindex_stage import checked_llm

_TEMPLATE = "text_qa_template"


class SpeculativeRAGQueryEngine(BaseQueryEngine):
    """Answers from what it retrieves, as `RetrieverQueryEngine` does, but begins earlier.

    The engine asks the model with the nodes that the search has found so far; it keeps the answer
    if the search ends with these nodes, else it drops the answer and asks again. So the response is
    always that of retrieving first. The gain depends on how long a search takes.

    The prompt shows all nodes in one call, as text with labels, in the order that the engine's
    planner gives them; source nodes are best first.

    Args:
        retriever: A retriever over a workflow engine.
        llm: The LLM; None takes that of LlamaIndex's Settings.
        text_qa_template: The template, with `{context_str}` and `{query_str}`.
        streaming: Whether responses are streamed; the source nodes are there at once.
        callback_manager: Where events go; None takes that of the retriever.

    Raises:
        InvalidRequestError: wrong type, or a template without room for the documents.
    """

    def __init__(
        self,
        retriever: WorkflowRetriever,
        *,
        llm: LLM | None = None,
        text_qa_template: BasePromptTemplate | None = None,
        streaming: bool = False,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        if not isinstance(retriever, WorkflowRetriever):
            raise InvalidRequestError(
                f"retriever must be a WorkflowRetriever, not {describe(retriever)}; pass the one "
                "that you have to an engine: "
                "WorkflowRetriever(WorkflowEngine(retriever=RetrieverStage(it)))"
            )
        super().__init__(callback_manager=callback_manager or retriever.callback_manager)
        self._retriever = retriever
        self._llm = checked_llm(Settings.llm if llm is None else llm)
        self._template = checked_template(text_qa_template or DEFAULT_TEXT_QA_PROMPT_SEL)
        self._streaming = streaming

    def retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        """Return the nodes for a query, without an answer."""
        return self._retriever.retrieve(query_bundle)

    async def aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        """Return the nodes for a query, without an answer."""
        return await self._retriever.aretrieve(query_bundle)

    def _get_prompts(self) -> dict[str, Any]:
        return {_TEMPLATE: self._template}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        if _TEMPLATE in prompts:
            self._template = checked_template(prompts[_TEMPLATE])

    def _get_prompt_modules(self) -> PromptMixinType:
        return {}

    def _query(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        with self._event(query_bundle) as event:
            response: RESPONSE_TYPE
            if self._streaming:
                parts: Any = sync_bridge.iterate(partial(self._parts, query_bundle), lasting=True)
                response = StreamingResponse(source_nodes=next(parts), response_gen=parts)
                response.metadata = _metadata(response.source_nodes)
            else:
                response = sync_bridge.run(partial(self._response, query_bundle), lasting=True)
            event.on_end(payload={EventPayload.RESPONSE: response})
        return response

    async def _aquery(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        with self._event(query_bundle) as event:
            response: RESPONSE_TYPE
            if self._streaming:
                parts: Any = self._parts(query_bundle)
                response = AsyncStreamingResponse(
                    source_nodes=await anext(parts), response_gen=parts
                )
                response.metadata = _metadata(response.source_nodes)
            else:
                response = await self._response(query_bundle)
            event.on_end(payload={EventPayload.RESPONSE: response})
        return response

    async def _response(self, query_bundle: QueryBundle) -> Response:
        nodes: list[NodeWithScore] = []
        texts: list[str] = []
        async with aclosing(self._parts(query_bundle)) as parts:
            async for part in parts:
                if isinstance(part, str):
                    texts.append(part)
                else:
                    nodes = part
        return Response("".join(texts), source_nodes=nodes, metadata=_metadata(nodes))

    async def _parts(
        self, query_bundle: QueryBundle
    ) -> AsyncGenerator[list[NodeWithScore] | str, None]:
        """Yield the nodes, then the answer piece by piece."""
        source, query = self._retriever, query_bundle.query_str
        asked = _TemplateModel(self._llm, self._template, query)
        graph = speculative_rag_graph(type(self).__name__, asked, source.k, source.retriever)
        retrieval = self.callback_manager.on_event_start(
            CBEventType.RETRIEVE, payload={EventPayload.QUERY_STR: query}
        )
        async with aclosing(source.engine.stream(graph, query)) as events:
            async for event in events:
                if isinstance(event, DocumentsFound):
                    nodes = source.as_nodes(event.documents, event.scores)
                    self.callback_manager.on_event_end(
                        CBEventType.RETRIEVE,
                        payload={EventPayload.NODES: nodes},
                        event_id=retrieval,
                    )
                    yield nodes
                elif isinstance(event, TextDelta):
                    yield event.text

    def _event(self, query_bundle: QueryBundle) -> Any:
        return self.callback_manager.event(
            CBEventType.QUERY, payload={EventPayload.QUERY_STR: query_bundle.query_str}
        )


class _TemplateModel:
    """The model of one run: sends the template with the documents to the LLM."""

    def __init__(self, llm: LLM, template: BasePromptTemplate, query: str) -> None:
        self._llm = llm
        self._template = template
        self._query = query

    async def stream(
        self, prompt: Prompt, params: Mapping[str, Any]
    ) -> AsyncGenerator[Piece, None]:
        texts: Any = await self._llm.astream(
            self._template, context_str=context_of(prompt), query_str=self._query
        )
        async with aclosing(texts):
            async for text in texts:
                if text:
                    yield Piece(text, 1)


def checked_template(template: object) -> BasePromptTemplate:
    """Return the template if it has room for the documents.

    Raises:
        InvalidRequestError: wrong type, or a template without `context_str`.
    """
    if not isinstance(template, BasePromptTemplate):
        raise InvalidRequestError(
            f"text_qa_template must be a prompt template, not {describe(template)}; "
            "pass PromptTemplate('...{context_str}...{query_str}...')"
        )
    known = {*template.template_vars, *(template.template_var_mappings or {})}
    if "context_str" not in known:
        raise InvalidRequestError(
            "text_qa_template has no variable context_str for the documents, only "
            f"{', '.join(map(repr, template.template_vars)) or 'none'}; add {{context_str}}, or "
            "map it with template_var_mappings"
        )
    return template


def _metadata(nodes: list[NodeWithScore]) -> dict[str, Any]:
    return {one.node.node_id: one.node.metadata for one in nodes}


LinkedQueryEngine = SpeculativeRAGQueryEngine
"""The former name of `SpeculativeRAGQueryEngine`."""
