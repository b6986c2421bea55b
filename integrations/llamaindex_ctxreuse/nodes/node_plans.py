"""Nodes in their planned order: what the postprocessor and the retriever share.

A planned node is a copy that carries its rank, label and plan in its metadata, where neither the
model nor an embedding sees it; what came in is never changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from llama_index.core.schema import (
    BaseNode,
    ImageNode,
    MetadataMode,
    Node,
    NodeWithScore,
    TextNode,
)

from ctxreuse.adapters.document_planner import (
    AnnotationMode,
    DocumentPlanner,
    PlannedItems,
    appended_annotation,
)
from ctxreuse.adapters.plan_metadata import (
    METADATA_KEY,
    PlannedDocument,
    copied,
    document_metadata,
    retrievers_order,
)
from ctxreuse.context.blocks import ContextBlock
from ctxreuse.context.fail_open import FailOpen
from ctxreuse.context.scope import RequestScope
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.planner import ReusePlanner
from ctxreuse.planning.plan import Plan


class AnnotationNode(TextNode):
    """What stands behind planned nodes and says their order and places, in words."""

    @classmethod
    def class_name(cls) -> str:
        """Return the name that serialized nodes carry."""
        return "CtxreuseAnnotationNode"


class NodePlanner:
    """Puts nodes into their planned order; a fault of ours lets them through as they came.

    Args:
        planner: Plans the contexts.
        annotation: Where annotations go.
        metadata_mode: Which metadata is part of a node's text when it is rendered.
        component: The adapter's name, for the log.

    Raises:
        InvalidRequestError: If the planner, the annotation mode or the metadata mode is none.
    """

    def __init__(
        self,
        planner: ReusePlanner,
        annotation: AnnotationMode,
        metadata_mode: MetadataMode,
        component: str,
    ) -> None:
        self._metadata_mode = checked_metadata_mode(metadata_mode)
        self._arranger: DocumentPlanner[NodeWithScore] = DocumentPlanner(
            planner, self._identity, annotation, component
        )
        self._annotation = annotation
        self._fail_open = FailOpen(component)

    @property
    def faults(self) -> int:
        """How often nodes went through as they came."""
        return self._arranger.faults + self._fail_open.faults

    def arrange(
        self, nodes: Sequence[NodeWithScore], query: str, scope: RequestScope
    ) -> list[NodeWithScore]:
        """Return copies of the nodes in their planned order, the annotation behind them if any."""
        return self._fail_open.attempt(
            lambda: self._arrange(nodes, query, scope), lambda: list(nodes)
        )

    def _arrange(
        self, nodes: Sequence[NodeWithScore], query: str, scope: RequestScope
    ) -> list[NodeWithScore]:
        unplanned = without_plan(nodes)
        if unplanned is None:
            return list(nodes)
        arranged = self._arranger.arrange(unplanned, query, scope)
        if arranged.plan is None:
            return list(nodes)
        return self._marked(arranged, arranged.plan)

    def _identity(self, scored: NodeWithScore) -> ContextBlock:
        """Return what makes the node the node that it is: its text as rendered, and its media."""
        node = scored.node
        block = node_block(node, self._metadata_mode)
        if _is_text_alone(node):
            return block
        # no text in a prompt shows an image, so no text may stand for one
        return ContextBlock(id=block.id, text=f"{block.text}\n{node.hash}")

    def _marked(self, arranged: PlannedItems[NodeWithScore], plan: Plan) -> list[NodeWithScore]:
        marks = document_metadata(plan, with_order=self._annotation != "off")
        nodes = [
            NodeWithScore(
                node=marked_copy(one.thing.node, marks.position(one.rank, one.label or "")),
                score=one.thing.score,
            )
            for one in arranged.placed
        ]
        annotation = arranged.annotation
        if not nodes and self._annotation == "metadata":
            annotation = appended_annotation(plan, [])  # no node is left to carry it
        if annotation is not None:
            shown = arranged.placed or arranged.left_out
            scores = [one.thing.score for one in shown if one.thing.score is not None]
            node = marked_copy(
                _annotation_node(annotation, [one.thing.node for one in shown]),
                marks.annotation(annotation),
            )
            # the lowest: sorting by score leaves it at the end, and no cut-off takes it alone
            nodes.append(NodeWithScore(node=node, score=min(scores, default=None)))
        return nodes


def _annotation_node(text: str, nodes: Iterable[BaseNode]) -> AnnotationNode:
    """Return the annotation as a node.

    It has the metadata names that all the nodes it speaks of have, empty and shown nowhere, because
    who lists the sources of an answer expects them.
    """
    names = [set(node.metadata) for node in nodes]
    shared = sorted(set.intersection(*names)) if names else []
    return AnnotationNode(
        text=text,
        extra_info=dict.fromkeys(shared, ""),
        excluded_llm_metadata_keys=shared,
        excluded_embed_metadata_keys=shared,
    )


def node_block(node: BaseNode, metadata_mode: MetadataMode) -> ContextBlock:
    """Return a node as a context block, with the text that is rendered of it."""
    return ContextBlock(id=node.node_id, text=node.get_content(metadata_mode=metadata_mode))


def marked_documents(
    nodes: Iterable[NodeWithScore], metadata_mode: MetadataMode = MetadataMode.NONE
) -> list[PlannedDocument]:
    """Return nodes as documents that may carry a plan."""
    found = [one.node for one in nodes]
    return [PlannedDocument(node_block(node, metadata_mode), node.metadata) for node in found]


def without_plan(nodes: Sequence[NodeWithScore]) -> list[NodeWithScore] | None:
    """Return nodes as they were before an earlier plan of ours, so that plans never nest.

    None says that they have to stay as they are; see `plan_metadata.retrievers_order`.
    """
    order = retrievers_order(marked_documents(nodes))
    return None if order is None else [_unmarked(nodes[position]) for position in order]


def marked_copy(node: BaseNode, mark: dict[str, Any]) -> BaseNode:
    """Return a copy with a mark in its metadata that is shown nowhere."""
    update: dict[str, Any] = {
        "metadata": {**copied(node.metadata), METADATA_KEY: mark},
        "relationships": dict(node.relationships),
    }
    for name in ("excluded_llm_metadata_keys", "excluded_embed_metadata_keys"):
        hidden = [key for key in getattr(node, name) if key != METADATA_KEY]
        update[name] = [*hidden, METADATA_KEY]
    return node.model_copy(update=update)


def checked_nodes(nodes: object, taker: str) -> list[NodeWithScore]:
    """Return nodes as a list if they are ones.

    Raises:
        InvalidRequestError: If they are something else.
    """
    if isinstance(nodes, Sequence) and not isinstance(nodes, (str, bytes)):
        strange = [one for one in nodes if not isinstance(one, NodeWithScore)]
        if not strange:
            return list(nodes)
        raise InvalidRequestError(
            f"{taker} takes a list of NodeWithScore, not one with {type(strange[0]).__name__} in "
            "it; put NodeWithScore(node=...) into it"
        )
    raise InvalidRequestError(
        f"{taker} takes a list of NodeWithScore, not {type(nodes).__name__}; "
        "pass what a retriever returns"
    )


def checked_metadata_mode(mode: object) -> MetadataMode:
    """Return the metadata mode if it is one that hides what ctxreuse writes into the metadata.

    Raises:
        InvalidRequestError: If there is no such mode, or if it shows all metadata.
    """
    known = [one for one in MetadataMode if mode in (one, one.value)]
    if not known:
        names = ", ".join(str(one) for one in MetadataMode if one is not MetadataMode.ALL)
        raise InvalidRequestError(
            f"there is no metadata mode {describe(mode)}; choose one of {names}"
        )
    if known[0] is MetadataMode.ALL:
        raise InvalidRequestError(
            "MetadataMode.ALL shows the model the plan that ctxreuse keeps in the metadata; choose "
            "MetadataMode.LLM, EMBED or NONE"
        )
    return known[0]


def _is_text_alone(node: BaseNode) -> bool:
    if isinstance(node, Node):
        return not (node.image_resource or node.audio_resource or node.video_resource)
    return isinstance(node, TextNode) and not isinstance(node, ImageNode)


def _unmarked(scored: NodeWithScore) -> NodeWithScore:
    node = scored.node
    if METADATA_KEY not in node.metadata:
        return scored
    update: dict[str, Any] = {
        "metadata": {name: one for name, one in node.metadata.items() if name != METADATA_KEY}
    }
    for name in ("excluded_llm_metadata_keys", "excluded_embed_metadata_keys"):
        update[name] = [key for key in getattr(node, name) if key != METADATA_KEY]
    return NodeWithScore(node=node.model_copy(update=update), score=scored.score)
