"""What a workflow has found, as LlamaIndex nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from llama_index.core.schema import BaseNode, NodeWithScore, TextNode

from ctxreuse.adapters.plan_metadata import copied
from ctxreuse.context.blocks import BlockId, ContextBlock
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.workflow.graph.state import Documents

NodeOf: TypeAlias = Callable[[BlockId], BaseNode]
"""From a block's id to the node that it was made from."""


def as_nodes(
    blocks: Documents,
    scores: Sequence[float] | None = None,
    node_of: NodeOf | None = None,
) -> list[NodeWithScore]:
    """Return blocks as nodes, in their order.

    Each has the block's id and text or, with `node_of`, is a copy of the node of that id.

    Args:
        blocks: What was found.
        scores: How near each is, the higher the nearer; None leaves nodes without.
        node_of: The nodes that the blocks were made from; LlamaIndex's ids are strings, but it is
            given the block's own.

    Raises:
        InvalidRequestError: If `node_of` returns something else.
    """
    told = [None] * len(blocks) if scores is None else scores
    return [
        NodeWithScore(node=_node(block, node_of), score=score)
        for block, score in zip(blocks, told, strict=True)
    ]


def checked_node_of(node_of: object) -> None:
    """Check that something is a function, or None.

    Raises:
        InvalidRequestError: If it is something else.
    """
    if node_of is not None and not callable(node_of):
        raise InvalidRequestError(
            f"node_of must be a function from a block's id to a node, not {describe(node_of)}; "
            "of a docstore pass its get_document, of a dict its __getitem__"
        )


def _node(block: ContextBlock, node_of: NodeOf | None) -> BaseNode:
    if node_of is None:
        return TextNode(id_=str(block.id), text=block.text)
    node = node_of(block.id)
    if not isinstance(node, BaseNode):
        raise InvalidRequestError(f"node_of must return a node, not {type(node).__name__}")
    return node.model_copy(update={"metadata": copied(node.metadata)})
