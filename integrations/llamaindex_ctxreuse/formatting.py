"""Nodes as the text that a prompt shows."""

from __future__ import annotations

from collections.abc import Sequence

from llama_index.core.schema import MetadataMode, NodeWithScore

from ctxreuse.adapters.formatting import format_documents
from ctxreuse.context.rendering import DEFAULT_TEMPLATES, Templates
from llamaindex_ctxreuse.nodes.node_plans import (
    checked_metadata_mode,
    checked_nodes,
    planned_documents,
)


def format_context(
    nodes: Sequence[NodeWithScore],
    metadata_mode: MetadataMode = MetadataMode.LLM,
    templates: Templates = DEFAULT_TEMPLATES,
) -> str:
    r"""Return nodes as text for a prompt: labels, blocks, annotations.

    Nodes in the order of one plan are shown as that plan says, even if some of them were taken
    away since. Other nodes are shown in the order given, labels counted from 1, and a `ReuseLLM`
    that finds the text in a prompt plans it then.

    Args:
        nodes: Nodes, as `ReuseRetriever`, `ReusePostprocessor` or any retriever returns them.
        metadata_mode: Which metadata is part of a node's text; pass the postprocessor's.
        templates: The words around the nodes; pass the planner's.

    Raises:
        InvalidRequestError: not a list of NodeWithScore, or no such mode.

    Example:
        >>> from llama_index.core.schema import TextNode
        >>> texts = ["first text", "second text"]
        >>> format_context([NodeWithScore(node=TextNode(text=text)) for text in texts])
        '[Doc_1] first text\n\n[Doc_2] second text'
    """
    mode = checked_metadata_mode(metadata_mode)
    given = checked_nodes(nodes, "format_context")
    return format_documents(planned_documents(given, mode), templates)
