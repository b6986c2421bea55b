"""Nodes in their planned order, and as text: what the postprocessor and the retriever share.

A planned node is a copy that carries its rank, label and plan in its metadata, where neither the
model nor an embedding sees it; the retriever's own nodes are never changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.llms.types import ChatResponse, CompletionResponse
from llama_index.core.schema import BaseNode, ImageNode, MetadataMode, Node, NodeWithScore, TextNode

from ctxreuse.adapters.document_planner import (
    AnnotationMode,
    MetadataPlanner,
    RetrievedItems,
    shared_names,
)
from ctxreuse.adapters.formatting import cited_positions, format_documents
from ctxreuse.adapters.plan_metadata import (
    METADATA_KEY,
    PlannedDocument,
    believed,
    left_out_words,
    marked,
    retrievers_order,
    unmarked,
)
from ctxreuse.adapters.rendered_contexts import ContextRegistry
from ctxreuse.context.blocks import ContextBlock
from ctxreuse.context.checks import checked_kind
from ctxreuse.context.rendering import DEFAULT_TEMPLATES, Templates
from ctxreuse.context.scope import RequestScope, current_scope
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.planner import ReusePlanner

_PLANNED_ON_THE_LOOP = 200
"""More nodes than these are planned in a thread, so that the event loop stays responsive."""


class AnnotationNode(TextNode):
    """Stands behind planned nodes and says their order and places, in words."""

    @classmethod
    def class_name(cls) -> str:
        """Return the name that serialized nodes carry."""
        return "CtxreuseAnnotationNode"


class NodePlanner(MetadataPlanner[NodeWithScore]):
    """Puts nodes into their planned order; an internal error lets them through as they came.

    Args:
        planner: Plans the contexts; None makes a new one.
        annotation: Where annotations go.
        metadata_mode: Which metadata is part of a node's text when it is rendered.
        component: The adapter's name, for the log.

    Raises:
        InvalidRequestError: wrong type, or no such annotation mode or metadata mode.
    """

    def __init__(
        self,
        planner: ReusePlanner | None,
        annotation: AnnotationMode,
        metadata_mode: MetadataMode,
        component: str,
    ) -> None:
        self._metadata_mode = checked_metadata_mode(metadata_mode)
        super().__init__(
            planner,
            annotation,
            component,
            block_of=self._identity,
            without_plan=without_plan,
            carrying=planned_copy,
            annotation_item=_annotation,
        )

    def plan(self, nodes: Sequence[NodeWithScore], query: str) -> list[NodeWithScore]:
        """Return copies of the nodes in their planned order, the annotation behind them if any."""
        return self.plan_batch([RetrievedItems(nodes, query, current_scope())])[0]

    async def aplan(self, nodes: Sequence[NodeWithScore], query: str) -> list[NodeWithScore]:
        """Do what `plan` does; many nodes do not block the event loop."""
        if len(nodes) > _PLANNED_ON_THE_LOOP:
            return await asyncio.to_thread(self.plan, nodes, query)
        return self.plan(nodes, query)

    def _identity(self, scored: NodeWithScore) -> ContextBlock:
        """Return a block that tells a node from others: its text as rendered, and its media."""
        node = scored.node
        block = node_block(node, self._metadata_mode)
        if isinstance(node, Node):
            has_media = bool(node.image_resource or node.audio_resource or node.video_resource)
        else:
            has_media = isinstance(node, ImageNode) or not isinstance(node, TextNode)
        # no text in a prompt shows an image, so no text may stand for one
        return replace(block, text=f"{block.text}\n{node.hash}") if has_media else block


def format_context(
    nodes: Sequence[NodeWithScore],
    metadata_mode: MetadataMode = MetadataMode.LLM,
    templates: Templates = DEFAULT_TEMPLATES,
    registry: ContextRegistry | None = None,
) -> str:
    r"""Return nodes as text for a prompt: labels, blocks, annotations.

    Nodes in the order of one plan are shown as that plan says, even if some of them were taken
    away since. Other nodes are shown in the order given, labels counted from 1, and a `ReuseLLM`
    plans the text in one prompt of the same tenant, which `ctxreuse.request_context` names; format
    the nodes for each prompt anew.

    Args:
        nodes: Nodes, as `ReuseRetriever`, `ReusePostprocessor` or any retriever returns them.
        metadata_mode: Which metadata is part of a node's text; pass the postprocessor's.
        templates: The words around the nodes; pass the planner's.
        registry: Where the text is remembered, for a `ReuseLLM` that has the same registry; None
            takes the one of this process.

    Raises:
        InvalidRequestError: wrong type, or no such metadata mode.

    Example:
        >>> from llama_index.core.schema import TextNode
        >>> texts = ["first text", "second text"]
        >>> format_context([NodeWithScore(node=TextNode(text=text)) for text in texts])
        '[Doc_1] first text\n\n[Doc_2] second text'
    """
    mode = checked_metadata_mode(metadata_mode)
    given = checked_nodes(nodes, "format_context")
    documents = planned_documents(given, mode)
    return format_documents(documents, templates, registry, current_scope().tenant)


def cited_nodes(
    answer: str | CompletionResponse | ChatResponse,
    nodes: Sequence[NodeWithScore],
    metadata_mode: MetadataMode = MetadataMode.LLM,
    templates: Templates = DEFAULT_TEMPLATES,
) -> list[NodeWithScore]:
    """Return the nodes that an answer cites by their labels, each once, in its order.

    A label that stands for none of the nodes is passed over.

    Args:
        answer: The answer of a model that was shown `format_context(nodes)`. A response of a
            `ReuseLLM` says what its labels stand for, so that the nodes of earlier turns can be
            among them; for a text, they are those of this prompt, as they were formatted.
        nodes: The nodes.
        metadata_mode: As for `format_context`.
        templates: As for `format_context`.

    Raises:
        InvalidRequestError: wrong type, or no such metadata mode.

    Example:
        >>> from llama_index.core.schema import TextNode
        >>> texts = ["first text", "second text"]
        >>> nodes = [NodeWithScore(node=TextNode(text=text)) for text in texts]
        >>> [one.text for one in cited_nodes("It is so [Doc_2].", nodes)]
        ['second text']
    """
    given = checked_nodes(nodes, "cited_nodes")
    documents = planned_documents(given, checked_metadata_mode(metadata_mode))
    sources: Mapping[str, Any] = {}
    if isinstance(answer, (CompletionResponse, ChatResponse)):
        sources = (answer.additional_kwargs.get(METADATA_KEY) or {}).get("labels") or {}
        text = answer.message.content if isinstance(answer, ChatResponse) else answer.text
        answer = text or ""
    return [given[n] for n in cited_positions(answer, documents, templates, sources)]


def node_block(node: BaseNode, metadata_mode: MetadataMode) -> ContextBlock:
    """Return a node as a context block, with its text as rendered."""
    return ContextBlock(id=node.node_id, text=node.get_content(metadata_mode=metadata_mode))


def planned_documents(
    nodes: Iterable[NodeWithScore], metadata_mode: MetadataMode = MetadataMode.NONE
) -> list[PlannedDocument]:
    """Return nodes as documents that may carry a plan."""
    found = [one.node for one in nodes]
    return [PlannedDocument(node_block(node, metadata_mode), node.metadata) for node in found]


def without_plan(
    nodes: Sequence[NodeWithScore], scope: RequestScope | None = None
) -> list[NodeWithScore] | None:
    """Return nodes as they were before an earlier plan, so that plans never nest.

    None says that they have to stay as they are; see `plan_metadata.retrievers_order`.
    """
    order = retrievers_order(planned_documents(nodes), scope)
    return None if order is None else [_unplanned(nodes[position]) for position in order]


def without_annotations(nodes: Iterable[NodeWithScore]) -> list[NodeWithScore]:
    """Return nodes without the annotations that earlier plans put behind them."""
    return [one for one in nodes if not isinstance(one.node, AnnotationNode)]


def retrieved_nodes(nodes: Sequence[NodeWithScore]) -> tuple[list[NodeWithScore], list[str]]:
    """Return nodes as they were retrieved, and where an earlier plan says that others stand."""
    unplanned, words = without_plan(nodes), list[str]()
    if unplanned is None:
        unplanned, words = list(nodes), left_out_words(believed(planned_documents(nodes)))
    return without_annotations(unplanned), words


def planned_copy(scored: NodeWithScore, plan_metadata: dict[str, Any]) -> NodeWithScore:
    """Return a copy that carries plan metadata, which is shown nowhere."""
    return _with_metadata(scored, marked(scored.node.metadata, plan_metadata))


def _unplanned(scored: NodeWithScore) -> NodeWithScore:
    if METADATA_KEY not in scored.node.metadata:
        return scored
    return _with_metadata(scored, unmarked(scored.node.metadata))


def _with_metadata(scored: NodeWithScore, metadata: dict[str, Any]) -> NodeWithScore:
    """Return a copy with other metadata; models and embeddings do not see the plan's."""
    node = scored.node
    update: dict[str, Any] = {"metadata": metadata, "relationships": dict(node.relationships)}
    for name in ("excluded_llm_metadata_keys", "excluded_embed_metadata_keys"):
        update[name] = [key for key in getattr(node, name) if key != METADATA_KEY]
        if METADATA_KEY in metadata:
            update[name].append(METADATA_KEY)
    return NodeWithScore(node=node.model_copy(update=update), score=scored.score)


def _annotation(
    text: str, plan_metadata: dict[str, Any], nodes: Sequence[NodeWithScore]
) -> NodeWithScore:
    """Return the annotation behind nodes as a node that shows no metadata."""
    shared = shared_names(one.node.metadata for one in nodes)
    node = AnnotationNode(
        text=text,
        extra_info=shared,
        excluded_llm_metadata_keys=list(shared),
        excluded_embed_metadata_keys=list(shared),
    )
    # the lowest score: sorting leaves it at the end, and no cut-off takes it alone
    score = min((one.score for one in nodes if one.score is not None), default=None)
    return planned_copy(NodeWithScore(node=node, score=score), plan_metadata)


def checked_nodes(nodes: object, taker: str) -> list[NodeWithScore]:
    """Return the nodes as a list.

    Raises:
        InvalidRequestError: not a list of NodeWithScore.
    """
    if not isinstance(nodes, Sequence) or isinstance(nodes, (str, bytes)):
        raise InvalidRequestError(
            f"{taker} takes a list of NodeWithScore, not {type(nodes).__name__}; "
            "pass what a retriever returns"
        )
    for node in nodes:
        if not isinstance(node, NodeWithScore):
            raise InvalidRequestError(
                f"{taker} takes a list of NodeWithScore, not one with {type(node).__name__} in "
                "it; put NodeWithScore(node=...) into it"
            )
    return list(nodes)


def checked_metadata_mode(mode: object) -> MetadataMode:
    """Return the metadata mode if it hides what ctxreuse writes into the metadata.

    Raises:
        InvalidRequestError: no such mode, or a mode that shows all metadata.
    """
    for known in MetadataMode:
        if mode in (known, known.value):
            break
    else:
        names = ", ".join(str(one) for one in MetadataMode if one is not MetadataMode.ALL)
        raise InvalidRequestError(
            f"there is no metadata mode {describe(mode)}; choose one of {names}"
        )
    if known is MetadataMode.ALL:
        raise InvalidRequestError(
            "MetadataMode.ALL shows the model the plan that ctxreuse keeps in the metadata; choose "
            "MetadataMode.LLM, EMBED or NONE"
        )
    return known


def checked_retriever(retriever: object) -> BaseRetriever:
    """Return the retriever.

    Raises:
        InvalidRequestError: wrong type.
    """
    remedy = "a LlamaIndex BaseRetriever; an index gives one with as_retriever()"
    return checked_kind("retriever", retriever, BaseRetriever, remedy)
