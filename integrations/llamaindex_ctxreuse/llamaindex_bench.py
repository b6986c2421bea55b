"""What `ctxreuse bench` takes from LlamaIndex: its retrievers' nodes, and its own order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llama_index.core.postprocessor import LongContextReorder
from llama_index.core.schema import MetadataMode, NodeWithScore, TextNode

from ctxreuse.context.blocks import ContextBlock
from llamaindex_ctxreuse.nodes.node_plans import node_block


def retrieved_block(found: NodeWithScore) -> ContextBlock:
    """Return a node that a retriever has found as a block."""
    return node_block(found.node, MetadataMode.NONE)


def long_context_reorder() -> Callable[[Sequence[ContextBlock]], list[ContextBlock]]:
    """Return LlamaIndex's `LongContextReorder` for blocks: the best at the ends."""
    reorder = LongContextReorder()

    def reordered(blocks: Sequence[ContextBlock]) -> list[ContextBlock]:
        nodes = [
            NodeWithScore(node=TextNode(id_=str(at)), score=float(-at)) for at in range(len(blocks))
        ]
        return [blocks[int(one.node.node_id)] for one in reorder.postprocess_nodes(nodes)]

    return reordered
