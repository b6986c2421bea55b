"""A retriever over a workflow engine: searches of all requests share its scans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.callbacks import CallbackManager
from llama_index.core.schema import BaseNode, NodeWithScore, QueryBundle, TextNode

from ctxreuse.adapters.plan_metadata import copied
from ctxreuse.context.blocks import BlockId, ContextBlock
from ctxreuse.context.checks import checked_integer, checked_kind
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.serving.aio import sync_bridge
from ctxreuse.workflow.engine import WorkflowEngine
from ctxreuse.workflow.graph.state import Documents

NodeOf: TypeAlias = Callable[[BlockId], BaseNode]
"""From a block's id to the node that it was made from."""


class WorkflowRetriever(BaseRetriever):
    """Retrieves with an engine that all requests share, without a graph.

    Searches that run at the same time are embedded and scanned together, whether `retrieve` in
    threads, `aretrieve` or the engine's workflows started them. In a conversation, named by
    `ctxreuse.request_context`, a search begins where the last one has found something. Results are
    those of a plain search; the engine embeds the query's text.

    Nodes have the block's id and text, and a score if the engine's retriever returns one: the
    higher, the nearer. To have the nodes of an index, pass `node_of`.

    Args:
        engine: The engine; it may have no model.
        k: How many nodes to return.
        retriever: The name of one of the engine's retrievers; None takes the default one.
        node_of: From a block's id to the node that it was made from, of which a copy is returned;
            None makes a node.
        callback_manager: Where events go.

    Raises:
        InvalidRequestError: wrong type or out of range.
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
        if isinstance(k, bool):
            raise InvalidRequestError(f"k must be an integer from 1, not {describe(k)}")
        self.k = checked_integer("k", k, 1)
        if node_of is not None and not callable(node_of):
            raise InvalidRequestError(
                f"node_of must be a function from a block's id to a node, not {describe(node_of)}; "
                "of a docstore pass its get_document, of a dict its __getitem__"
            )
        self.retriever = retriever
        self.node_of = node_of
        super().__init__(callback_manager=callback_manager)

    def as_nodes(
        self, blocks: Documents, scores: Sequence[float] | None = None
    ) -> list[NodeWithScore]:
        """Return found blocks as nodes, in their order.

        Args:
            blocks: What was found.
            scores: How near each is, the higher the nearer; None leaves nodes without.

        Raises:
            InvalidRequestError: `node_of` returns something else than a node.
        """
        told = [None] * len(blocks) if scores is None else scores
        return [
            NodeWithScore(node=self._node(block), score=score)
            for block, score in zip(blocks, told, strict=True)
        ]

    def _node(self, block: ContextBlock) -> BaseNode:
        if self.node_of is None:
            return TextNode(id_=str(block.id), text=block.text)
        node = self.node_of(block.id)
        if not isinstance(node, BaseNode):
            raise InvalidRequestError(f"node_of must return a node, not {type(node).__name__}")
        return node.model_copy(update={"metadata": copied(node.metadata)})

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return sync_bridge.run(partial(self._aretrieve, query_bundle), lasting=True)

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        found = await self.engine.retrieve(query_bundle.query_str, self.k, retriever=self.retriever)
        return self.as_nodes(found.documents, found.scores)
