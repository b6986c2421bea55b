"""A retriever over a workflow engine: searches of all requests share its scans."""

from __future__ import annotations

from functools import partial

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.callbacks import CallbackManager
from llama_index.core.schema import NodeWithScore, QueryBundle

from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.serving.aio import sync_bridge
from ctxreuse.workflow.engine import WorkflowEngine
from llamaindex_ctxreuse.workflow.found_nodes import NodeOf, as_nodes, checked_node_of


class WorkflowRetriever(BaseRetriever):
    """Retrieves with an engine that is shared by all requests, without a graph.

    Searches that go on at the same time are embedded and scanned together, however they are asked
    for: `retrieve` in threads, `aretrieve`, or by the engine's workflows. In a conversation, named
    by `ctxreuse.request_context`, a search begins where the last one has found something. Results
    are those of a plain search; the engine embeds the query's text.

    Nodes have the block's id and text, and a score where the engine's retriever tells one: the
    higher, the nearer. To have the nodes of an index, give `node_of`.

    Args:
        engine: The engine; it may have no model.
        k: How many nodes are wanted.
        retriever: Which of the engine's retrievers is asked; None takes the default one.
        node_of: From a block's id to the node that it was made from, which is returned as a copy;
            None makes one.
        callback_manager: Where events go.

    Raises:
        InvalidRequestError: If an argument is of the wrong kind.
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
        if not isinstance(engine, WorkflowEngine):
            raise InvalidRequestError(f"engine must be a WorkflowEngine, not {describe(engine)}")
        if not isinstance(k, int) or isinstance(k, bool) or k < 1:
            raise InvalidRequestError(f"k must be an integer from 1, not {describe(k)}")
        checked_node_of(node_of)
        self.engine = engine
        self.k = k
        self.retriever = retriever
        self.node_of = node_of
        super().__init__(callback_manager=callback_manager)

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return sync_bridge.run(partial(self._aretrieve, query_bundle), lasting=True)

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        found = await self.engine.retrieve(query_bundle.query_str, self.k, retriever=self.retriever)
        return as_nodes(found.documents, found.scores, self.node_of)
