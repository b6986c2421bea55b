"""Nodes as text, and as copies with a plan in metadata that no model and no embedding sees."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.llms.types import ChatResponse, CompletionResponse
from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore, TextNode

from ctxreuse.adapters.document_planner import shared_names
from ctxreuse.adapters.formatting import cited_positions, format_documents
from ctxreuse.adapters.plan_metadata import (
    METADATA_KEY,
    PlannedDocument,
    believed,
    left_out_words,
    marked,
    ranked_positions,
    retrievers_order,
    unmarked,
)
from ctxreuse.adapters.rendered_contexts import ContextRegistry
from ctxreuse.context.blocks import ContextBlock
from ctxreuse.context.checks import checked_kind
from ctxreuse.context.rendering import DEFAULT_TEMPLATES, Templates
from ctxreuse.context.scope import RequestScope, current_scope
from ctxreuse.errors import InvalidRequestError, describe


class AnnotationNode(TextNode):
    """Stands where a conversation shows all nodes already, and says where, in words."""

    @classmethod
    def class_name(cls) -> str:
        """Return the name that serialized nodes carry."""
        return "CtxreuseAnnotationNode"


def format_context(
    nodes: Sequence[NodeWithScore],
    metadata_mode: MetadataMode = MetadataMode.LLM,
    templates: Templates = DEFAULT_TEMPLATES,
    registry: ContextRegistry | None = None,
) -> str:
    r"""Return nodes as text for a prompt: labels, blocks, annotations.

    Nodes in the order of one plan are shown as that plan says, even if some were taken away since.
    Others are shown in the order given, which counts as their ranking; a `ReuseLLM` plans the text
    in one prompt of the same tenant. Format the nodes for each prompt anew.

    Args:
        nodes: Nodes, as `ReuseRetriever`, `ReusePostprocessor` or any retriever returns them.
        metadata_mode: Which metadata is part of a node's text; pass the postprocessor's.
        templates: The words around the nodes; pass the planner's.
        registry: Where the text is remembered, for a `ReuseLLM` that has the same registry; None
            takes the one of this process.

    Example:
        >>> from llama_index.core.schema import TextNode
        >>> texts = ["first text", "second text"]
        >>> format_context([NodeWithScore(node=TextNode(text=text)) for text in texts])
        '[EWUW] first text\n\n[GYJD] second text'
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
    """Return the nodes that an answer cites by their labels, in its order.

    Where two nodes have the same label, both are returned.

    Args:
        answer: The answer of a model that was shown `format_context(nodes)`.
        nodes: The nodes, those of earlier turns included.
        metadata_mode: As for `format_context`.
        templates: As for `format_context`.
    """
    given = checked_nodes(nodes, "cited_nodes")
    documents = planned_documents(given, checked_metadata_mode(metadata_mode))
    if isinstance(answer, (CompletionResponse, ChatResponse)):
        text = answer.message.content if isinstance(answer, ChatResponse) else answer.text
        answer = text or ""
    return [given[n] for n in cited_positions(answer, documents, templates)]


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
    """Return nodes as they were before an earlier plan, so that plans never nest."""
    order = retrievers_order(planned_documents(nodes), scope)
    if order is None:
        return None
    return [_unplanned(nodes[position]) for position in _by_score(nodes, order)]


def by_rank(nodes: Sequence[NodeWithScore]) -> list[NodeWithScore]:
    """Return nodes best first, such as the `source_nodes` of a response: `by_rank(nodes)[:3]`.

    Scores say the ranking; nodes without any are ranked as retrieved, or keep their places.

    Args:
        nodes: Nodes, in any order, planned or not.
    """
    given = checked_nodes(nodes, "by_rank")
    order = ranked_positions(planned_documents(given))
    return [given[position] for position in _by_score(given, order)]


def _by_score(nodes: Sequence[NodeWithScore], order: Sequence[int]) -> list[int]:
    """Return an order in which higher scores stand before lower ones."""
    scores = {position: nodes[position].score for position in order}
    scored = {position: one for position, one in scores.items() if one is not None and one == one}
    best_first = iter(sorted(scored, key=scored.__getitem__, reverse=True))
    return [next(best_first) if position in scored else position for position in order]


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


def annotation_node(
    text: str, plan_metadata: dict[str, Any], nodes: Sequence[NodeWithScore]
) -> NodeWithScore:
    """Return the annotation on nodes as a node that shows no metadata."""
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
    """Return the nodes as a list."""
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
    """Return the metadata mode if it hides what ctxreuse writes into the metadata."""
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
    """Return the retriever."""
    remedy = "a LlamaIndex BaseRetriever; an index gives one with as_retriever()"
    return checked_kind("retriever", retriever, BaseRetriever, remedy)
