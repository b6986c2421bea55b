"""A workflow engine for LlamaIndex: a retriever, a query engine, and models to serve in it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from copy import deepcopy
from functools import partial
from typing import Any, TypeAlias

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.response.schema import (
    RESPONSE_TYPE,
    AsyncStreamingResponse,
    Response,
    StreamingResponse,
)
from llama_index.core.callbacks import CallbackManager, CBEventType, EventPayload
from llama_index.core.llms import LLM, ChatMessage
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL
from llama_index.core.prompts.mixin import PromptDictType, PromptMixinType
from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore, QueryBundle, TextNode
from llama_index.core.settings import Settings

from ctxreuse.context.blocks import BlockId, ContextBlock
from ctxreuse.context.checks import check_function, checked_integer, checked_kind, reported_count
from ctxreuse.errors import InvalidRequestError
from ctxreuse.serving.aio import sync_bridge
from ctxreuse.serving.client.request import Prompt, check_params
from ctxreuse.workflow.engine import WorkflowEngine
from ctxreuse.workflow.graph.state import Documents
from ctxreuse.workflow.library import speculative_rag_graph
from ctxreuse.workflow.models.language_model import Piece, converted_messages
from ctxreuse.workflow.retrievers import check_search
from ctxreuse.workflow.runtime.events import DocumentsFound, TextDelta
from llamaindex_ctxreuse.nodes.node_plans import (
    checked_metadata_mode,
    checked_nodes,
    checked_retriever,
    node_block,
)
from llamaindex_ctxreuse.nodes.run_nodes import as_retrieved

NodeOf: TypeAlias = Callable[[BlockId], BaseNode]
"""From a block's id to the node that it was made from."""

_TEMPLATE = "text_qa_template"


class WorkflowRetriever(BaseRetriever):
    """Retrieves with an engine that all requests share, without a graph.

    Searches that run at the same time are embedded and scanned together. In a conversation, named
    by `ctxreuse.request_context`, a search begins where the last one has found something. Results
    are those of a plain search. Nodes have block ids, texts and any scores: the higher, the nearer.

    Args:
        engine: The engine; it may have no model.
        k: How many nodes to return.
        retriever: The name of one of the engine's retrievers; None takes the default one.
        node_of: From a block's id to the node to return a copy of; None makes one.
        callback_manager: Where events go.
    """

    def __init__(
        self,
        engine: WorkflowEngine,
        *,
        k: int = 5,
        retriever: str | None = None,
        node_of: NodeOf | None = None,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        self.engine = checked_kind("engine", engine, WorkflowEngine, "a WorkflowEngine")
        self.k = checked_integer("k", k, 1)
        words = "a function from a block's id to a node, or None"
        remedy = "of a docstore pass its get_document, of a dict its __getitem__"
        check_function("node_of", node_of, f"{words}; {remedy}")
        self.retriever = retriever
        self.node_of = node_of
        super().__init__(callback_manager=callback_manager)

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return sync_bridge.run(partial(self._aretrieve, query_bundle), lasting=True)

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        found = await self.engine.retrieve(query_bundle.query_str, self.k, retriever=self.retriever)
        return _as_nodes(found.documents, found.scores, self.node_of)


def _as_nodes(
    blocks: Documents, scores: Sequence[float] | None, node_of: NodeOf | None
) -> list[NodeWithScore]:
    """Return found blocks as nodes, in their order, or as copies of `node_of` them."""
    found: list[NodeWithScore] = []
    known = [None] * len(blocks) if scores is None else scores
    for block, score in zip(blocks, known, strict=True):
        if node_of is None:
            node: BaseNode = TextNode(id_=str(block.id), text=block.text)
        else:
            node = node_of(block.id)
            if not isinstance(node, BaseNode):
                raise InvalidRequestError(f"node_of must return a node, not {type(node).__name__}")
            node = node.model_copy(update={"metadata": deepcopy(node.metadata)})
        found.append(NodeWithScore(node=node, score=score))
    return found


class SpeculativeRAGQueryEngine(BaseQueryEngine):
    """Answers from what it retrieves, as `RetrieverQueryEngine` does, but begins earlier.

    The engine asks the model with the nodes that the search has found so far; if the search ends
    with other nodes, it drops the answer and asks again: the response is always that of retrieving
    first. One call shows all nodes, in the planned order; source nodes are best first.

    Args:
        retriever: A retriever over a workflow engine.
        llm: The LLM; None takes that of LlamaIndex's Settings.
        text_qa_template: The template, with `{context_str}` and `{query_str}`.
        streaming: Whether responses are streamed; the source nodes are there at once.
        callback_manager: Where events go; None takes that of the retriever.
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
        kind = (
            "a WorkflowRetriever; pass the one that you have to an engine: "
            "WorkflowRetriever(WorkflowEngine(retriever=RetrieverStage(it)))"
        )
        checked_kind("retriever", retriever, WorkflowRetriever, kind)
        super().__init__(callback_manager=callback_manager or retriever.callback_manager)
        self._retriever = retriever
        llm = Settings.llm if llm is None else llm
        self._llm = checked_kind("llm", llm, LLM, "a LlamaIndex LLM")
        self._template = checked_template(text_qa_template or DEFAULT_TEXT_QA_PROMPT_SEL)
        self._streaming = streaming

    def retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        """Return the nodes for a query, without an answer."""
        checked_kind("query_bundle", query_bundle, (QueryBundle, str), "a QueryBundle or a text")
        return self._retriever.retrieve(query_bundle)

    async def aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        """`retrieve`, awaited."""
        checked_kind("query_bundle", query_bundle, (QueryBundle, str), "a QueryBundle or a text")
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
                nodes = next(parts)
                response = StreamingResponse(parts, nodes, _metadata(nodes))
            else:
                response = sync_bridge.run(partial(self._response, query_bundle), lasting=True)
            event.on_end(payload={EventPayload.RESPONSE: response})
        return response

    async def _aquery(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        with self._event(query_bundle) as event:
            response: RESPONSE_TYPE
            if self._streaming:
                parts: Any = self._parts(query_bundle)
                nodes = await anext(parts)
                response = AsyncStreamingResponse(parts, nodes, _metadata(nodes))
            else:
                response = await self._response(query_bundle)
            event.on_end(payload={EventPayload.RESPONSE: response})
        return response

    async def _response(self, query_bundle: QueryBundle) -> Response:
        parts: Any = self._parts(query_bundle)
        async with aclosing(parts):
            nodes = await anext(parts)
            texts = [text async for text in parts]
        return Response("".join(texts), source_nodes=nodes, metadata=_metadata(nodes))

    async def _parts(
        self, query_bundle: QueryBundle
    ) -> AsyncGenerator[list[NodeWithScore] | str, None]:
        """Yield the nodes, then the answer piece by piece."""
        source, query = self._retriever, query_bundle.query_str
        said = partial(self._said, query)
        graph = speculative_rag_graph(type(self).__name__, said, source.k, source.retriever)
        retrieval = self.callback_manager.on_event_start(
            CBEventType.RETRIEVE, payload={EventPayload.QUERY_STR: query}
        )
        async with aclosing(source.engine.stream(graph, query)) as events:
            async for event in events:
                if isinstance(event, DocumentsFound):
                    nodes = _as_nodes(event.documents, event.scores, source.node_of)
                    self.callback_manager.on_event_end(
                        CBEventType.RETRIEVE,
                        payload={EventPayload.NODES: nodes},
                        event_id=retrieval,
                    )
                    yield nodes
                elif isinstance(event, TextDelta):
                    yield event.text

    async def _said(self, query: str, context: str) -> AsyncGenerator[Piece, None]:
        """Send the template with the documents to the LLM, and yield what it says."""
        texts: Any = await self._llm.astream(self._template, context_str=context, query_str=query)
        async with aclosing(texts):
            async for text in texts:
                if text:
                    yield Piece(text, 1)

    def _event(self, query_bundle: QueryBundle) -> Any:
        return self.callback_manager.event(
            CBEventType.QUERY, payload={EventPayload.QUERY_STR: query_bundle.query_str}
        )


def checked_template(template: object) -> BasePromptTemplate:
    """Return the template if it has room for the documents."""
    kind = "a prompt template; pass PromptTemplate('...{context_str}...{query_str}...')"
    checked = checked_kind("text_qa_template", template, BasePromptTemplate, kind)
    known = {*checked.template_vars, *(checked.template_var_mappings or {})}
    if "context_str" not in known:
        raise InvalidRequestError(
            "text_qa_template has no variable context_str for the documents, only "
            f"{', '.join(map(repr, checked.template_vars)) or 'none'}; add {{context_str}}, or "
            "map it with template_var_mappings"
        )
    return checked


def _metadata(nodes: list[NodeWithScore]) -> dict[str, Any]:
    return {one.node.node_id: one.node.metadata for one in nodes}


class LlamaIndexLLM:
    """Serves a LlamaIndex LLM to a workflow; closing a stream closes the LLM's.

    A chunk with text counts as a token; further tokens in the usage come last, without text.

    Args:
        llm: The LLM. A generation's `params`, such as `max_tokens`, are passed with each call.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = checked_kind("llm", llm, LLM, "a LlamaIndex LLM")

    async def stream(
        self, prompt: Prompt, params: Mapping[str, Any]
    ) -> AsyncGenerator[Piece, None]:
        """Yield the answer piece by piece; see `ctxreuse.workflow.LanguageModel`."""
        check_params(params)
        told = used = 0
        messages = converted_messages(
            prompt, lambda given: [ChatMessage(**one) for one in given], "LlamaIndex"
        )
        chunks: Any = await self._llm.astream_chat(messages, **params)
        async with aclosing(chunks):
            async for chunk in chunks:
                usage = getattr(getattr(chunk, "raw", None), "usage", None)
                used = reported_count(getattr(usage, "completion_tokens", None)) or used
                if chunk.delta:
                    told += 1
                    yield Piece(chunk.delta, 1)
        if used > told:
            yield Piece("", used - told)


class RetrieverStage:
    """Serves a LlamaIndex retriever to a workflow.

    One whose class has no async search runs in a thread; that cannot be stopped. Retrievers take no
    k for one query: set `similarity_top_k` to the largest that the workflow wants. What a
    `ReuseRetriever` has planned is planned anew.

    Args:
        retriever: Any retriever.
        metadata_mode: Which metadata is part of a node's text where the prompt shows it.
    """

    def __init__(
        self, retriever: BaseRetriever, *, metadata_mode: MetadataMode = MetadataMode.LLM
    ) -> None:
        self._retriever = checked_retriever(retriever)
        self._metadata_mode = checked_metadata_mode(metadata_mode)
        self._blocks = type(retriever)._aretrieve is BaseRetriever._aretrieve

    async def retrieve(self, query: str, k: int) -> tuple[ContextBlock, ...]:
        """Return the first k nodes for a query, as blocks with their ids.

        Raises:
            InvalidRequestError: the retriever returns something else than nodes.
        """
        check_search(query, k)
        if self._blocks:
            found = await asyncio.to_thread(self._retriever.retrieve, query)
        else:
            found = await self._retriever.aretrieve(query)
        shown = as_retrieved(checked_nodes(found, type(self).__name__), None)[:k]
        return tuple(node_block(one.node, self._metadata_mode) for one in shown)
