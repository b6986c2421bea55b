"""Nodes as the text that a prompt shows."""

from __future__ import annotations

from collections.abc import Sequence

from llama_index.core.schema import MetadataMode, NodeWithScore

from ctxreuse.annotations import DEFAULT_TEMPLATES, Templates
from ctxreuse.renderings import RENDERED
from llamaindex_ctxreuse.marks import (
    left_out_words,
    place_of,
    plan_of,
    render_as_planned,
    stand_as_planned,
)
from llamaindex_ctxreuse.nodes import (
    AnnotationNode,
    checked_metadata_mode,
    checked_nodes,
    node_block,
)


def format_context(
    nodes: Sequence[NodeWithScore],
    metadata_mode: MetadataMode = MetadataMode.LLM,
    templates: Templates = DEFAULT_TEMPLATES,
) -> str:
    r"""Return nodes as text for a prompt: labels, blocks, annotations.

    Nodes that one plan put into order are shown as that plan says, also where some of them were
    taken away since. Any others are shown in the order given, labels counted from 1, and a
    `ReuseLLM` that meets the text plans it then.

    Args:
        nodes: Nodes, as `ReuseRetriever`, `ReusePostprocessor` or any retriever returns them.
        metadata_mode: Which metadata is part of a node's text; the postprocessor's, if it has
            another than the default.
        templates: The words around the nodes; the planner's, if it has others than the default.

    Raises:
        InvalidRequestError: If something else than nodes is given, or there is no such mode.

    Example:
        >>> from llama_index.core.schema import TextNode
        >>> texts = ["first text", "second text"]
        >>> format_context([NodeWithScore(node=TextNode(text=text)) for text in texts])
        '[Doc_1] first text\n\n[Doc_2] second text'
    """
    mode = checked_metadata_mode(metadata_mode)
    given = checked_nodes(nodes, "format_context")
    shown = [one.node for one in given if not isinstance(one.node, AnnotationNode)]
    blocks = [node_block(node, mode) for node in shown]
    places = [place for place in (place_of(node.metadata) for node in shown) if place is not None]
    if len(places) == len(shown) and stand_as_planned(places):
        text_of = {place.label: block.text for place, block in zip(places, blocks, strict=True)}
        if [text_of[place.label] for place in places] == [block.text for block in blocks]:
            return render_as_planned(places, blocks, templates)
    plans = [plan for plan in (plan_of(one.node.metadata) for one in given) if plan is not None]
    words = [said for plan in plans for said in left_out_words(plan)]
    text = [RENDERED.render(blocks, templates)] if blocks else []
    return templates.separator.join([*text, *dict.fromkeys(words)])  # each node repeats its plan
