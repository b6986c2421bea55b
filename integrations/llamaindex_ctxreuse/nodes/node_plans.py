"""Nodes as text for a prompt, and what of them is known: what retriever and postprocessor share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.llms.types import ChatResponse, CompletionResponse
from llama_index.core.schema import (
    BaseNode,
    ImageNode,
    MetadataMode,
    Node,
    NodeWithScore,
    TextNode,
)

from ctxreuse.context.blocks import ContextBlock
from ctxreuse.context.checks import checked_kind
from ctxreuse.context.rendering import DEFAULT_TEMPLATES, Templates
from ctxreuse.context.scope import current_scope
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.pipeline.document_turn import ItemKind, best_first, shared_names
from ctxreuse.pipeline.formatting import checked_items, cited_items, joined_forms, own_labels
from llamaindex_ctxreuse.nodes.run_nodes import AnnotationNode, node_forms, root_of_call, seen_forms

Label: TypeAlias = str | Callable[[NodeWithScore], object]
"""A node's own label: the name of a field of its metadata, or a function."""


def format_context(
    nodes: Sequence[NodeWithScore],
    text_template: str | None = None,
    separator: str = "\n\n",
    *,
    metadata_mode: MetadataMode = MetadataMode.LLM,
    labels: bool = False,
    label: Label | None = None,
    templates: Templates = DEFAULT_TEMPLATES,
) -> str:
    r"""Return nodes as text for a prompt: as an application joins them, known to us.

    What `text_template` puts around a node's text moves with it where a `ReuseLLM` plans.

    Args:
        nodes: Nodes, as `ReuseRetriever`, `ReusePostprocessor` or any retriever returns them.
        text_template: How each is shown: a string with `{content}`, and at will `{metadata_str}`
            and names of metadata. None shows it as LlamaIndex does.
        separator: What stands between each two.
        metadata_mode: Which metadata is part of a node's text, and of `{metadata_str}`.
        labels: Whether each stands under a label, for answers that cite it, and for later turns
            that leave it out; each node is shown once.
        label: A label of the application's own instead: the name of a field of the metadata, or a
            function from a node to a number, an id, a title.
        templates: The words around labels; pass the planner's if they are not the default.

    Raises:
        InvalidRequestError: wrong type, or a node that lacks what is to be shown of it.

    Example:
        >>> texts = ["first text", "second text"]
        >>> nodes = [NodeWithScore(node=TextNode(text=one, metadata={"n": 1})) for one in texts]
        >>> format_context(nodes, metadata_mode=MetadataMode.NONE)
        'first text\n\nsecond text'
        >>> format_context(nodes, metadata_mode=MetadataMode.NONE, labels=True)
        '[EWUW] first text\n\n[GYJD] second text'
        >>> format_context(nodes[:1], "Number {n}: {content}")
        'Number 1: first text'
    """
    given = checked_nodes(nodes, "format_context")
    texts = _shown(given, text_template, checked_metadata_mode(metadata_mode))
    return joined_forms(
        node_forms(given, texts),
        _shown(given, None, MetadataMode.NONE),
        separator,
        current_scope().tenant or "",
        templates,
        labels=labels,
        own_labels=own_labels(given, label),
        ids=[one.node_id for one in given],
        root=root_of_call(),
    )


def cited_nodes(
    answer: str | CompletionResponse | ChatResponse,
    nodes: Sequence[NodeWithScore],
    text_template: str | None = None,
    *,
    metadata_mode: MetadataMode = MetadataMode.LLM,
    label: Label | None = None,
    templates: Templates = DEFAULT_TEMPLATES,
) -> list[NodeWithScore]:
    """Return the nodes that an answer cites by their labels, in its order.

    Where two nodes have the same label, both are returned.

    Args:
        answer: The answer of a model that was shown `format_context(nodes, labels=True)`.
        nodes: The nodes, those of earlier turns included.
        text_template: As for `format_context`.
        metadata_mode: As for `format_context`.
        label: As for `format_context`.
        templates: As for `format_context`.
    """
    given = checked_nodes(nodes, "cited_nodes")
    if isinstance(answer, ChatResponse):
        answer = answer.message.content or ""
    elif isinstance(answer, CompletionResponse):
        answer = answer.text
    texts = _shown(given, text_template, checked_metadata_mode(metadata_mode))
    return cited_items(answer, given, label, texts, [one.node_id for one in given], templates)


def node_block(node: BaseNode, metadata_mode: MetadataMode) -> ContextBlock:
    """Return a node as a context block with its id, and its text as rendered."""
    return ContextBlock(id=node.node_id, text=node.get_content(metadata_mode=metadata_mode))


def node_kind(metadata_mode: MetadataMode) -> ItemKind[NodeWithScore]:
    """Return what is to be known of nodes that a prompt shows with this metadata."""
    return ItemKind(
        partial(_identity, metadata_mode=metadata_mode),
        partial(seen_forms, metadata_mode=metadata_mode),
        _annotation_node,
        ranked,
        node_forms,
    )


def ranked(nodes: Sequence[NodeWithScore]) -> list[NodeWithScore]:
    """Return nodes best first; those without a score keep their places, all with distances too."""
    scores = {place: one.score for place, one in enumerate(nodes)}
    scored = {place: one for place, one in scores.items() if one is not None and one == one}
    falling = sorted(scored, key=scored.__getitem__, reverse=True)
    if sorted(scored, key=scored.__getitem__) == [*scores]:  # distances, or a plan has put them so
        texts = _shown(nodes, None, MetadataMode.NONE)
        if best_first([*scores], texts, current_scope().tenant or "") != falling:
            return list(nodes)
    following = iter(falling)
    return [nodes[next(following) if place in scored else place] for place in scores]


def checked_nodes(nodes: object, taker: str) -> list[NodeWithScore]:
    """Return the nodes as a list."""
    words = "NodeWithScore", "NodeWithScore(node=...)"
    return checked_items(nodes, NodeWithScore, taker, words)


def checked_metadata_mode(mode: object) -> MetadataMode:
    """Return the metadata mode."""
    for known in MetadataMode:
        if mode in (known, known.value):
            return known
    names = ", ".join(map(str, MetadataMode))
    raise InvalidRequestError(f"there is no metadata mode {describe(mode)}; choose one of {names}")


def checked_retriever(retriever: object) -> BaseRetriever:
    """Return the retriever."""
    remedy = "a LlamaIndex BaseRetriever; an index gives one with as_retriever()"
    return checked_kind("retriever", retriever, BaseRetriever, remedy)


def _shown(nodes: Sequence[NodeWithScore], template: str | None, mode: MetadataMode) -> list[str]:
    if template is None:
        return [one.get_content(mode) for one in nodes]
    if not isinstance(template, str) or "{content" not in template.replace("{{", ""):
        raise InvalidRequestError(
            f"text_template must be a string with {{content}} in it, not {describe(template)}"
        )
    shown: list[str] = []
    for place, one in enumerate(nodes):
        fields = {
            **one.metadata,
            "content": one.get_content(MetadataMode.NONE),
            "metadata_str": one.node.get_metadata_str(mode=mode),
        }
        try:
            shown.append(template.format_map(fields))
        except (LookupError, ValueError, TypeError, AttributeError) as error:
            raise InvalidRequestError(
                f"text_template: nodes[{place}], id {one.node_id!r:.60}: {error!r}; its metadata "
                f"has {', '.join(map(repr, one.metadata)) or 'nothing'}; put it there, leave it "
                "out, or write {{ for a brace"
            ) from error
    return shown


def _identity(scored: NodeWithScore, metadata_mode: MetadataMode) -> ContextBlock:
    """Return a block that tells a node from others: its text as rendered, and its media."""
    node = scored.node
    text = node.get_content(metadata_mode=metadata_mode)
    if isinstance(node, Node):
        has_media = bool(node.image_resource or node.audio_resource or node.video_resource)
    else:
        has_media = isinstance(node, ImageNode) or not isinstance(node, TextNode)
    # no text in a prompt shows an image, so no text may stand for one
    return ContextBlock(text=f"{text}\n{node.hash}" if has_media else text)


def _annotation_node(text: str, nodes: Sequence[NodeWithScore]) -> NodeWithScore:
    """Return the annotation on nodes as a node that shows no metadata."""
    shared = shared_names([one.node.metadata for one in nodes])
    node = AnnotationNode(
        text=text,
        extra_info=shared,
        excluded_llm_metadata_keys=list(shared),
        excluded_embed_metadata_keys=list(shared),
    )
    # the lowest score: sorting leaves it at the end, and no cut-off takes it alone
    score = min((one.score for one in nodes if one.score is not None), default=None)
    return NodeWithScore(node=node, score=score)
