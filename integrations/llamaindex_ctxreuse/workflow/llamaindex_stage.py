"""A LlamaIndex retriever as an atomic retrieval stage of a workflow."""

from __future__ import annotations

import asyncio

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.schema import MetadataMode

from ctxreuse.context.blocks import ContextBlock
from ctxreuse.errors import InvalidRequestError, describe
from llamaindex_ctxreuse.nodes.node_plans import (
    checked_metadata_mode,
    checked_nodes,
    node_block,
    without_plan,
)
from llamaindex_ctxreuse.nodes.retriever import checked_retriever


class RetrieverStage:
    """Serves a LlamaIndex retriever to a workflow.

    LlamaIndex retrievers without an async search of their own run their blocking one in the event
    loop, where it would hold up everybody; here they run in a thread. A thread cannot be stopped,
    so what is cancelled then ends unheard. Retrievers know no k for one query: set
    `similarity_top_k` to the largest that the workflow wants; what is more is left out. Where a
    `ReuseRetriever` has planned the nodes, the workflow plans them anew.

    Args:
        retriever: Any retriever.
        metadata_mode: Which metadata is part of a node's text where the prompt shows it.
        in_thread: Whether its blocking search is run in a thread; None does so where its class has
            no async one. True helps where the async one only passes on to another one that blocks.

    Raises:
        InvalidRequestError: If the retriever or the metadata mode is none.

    Example:
        >>> from llama_index.core.schema import NodeWithScore, TextNode
        >>> class Fixed(BaseRetriever):
        ...     def _retrieve(self, query_bundle):
        ...         return [NodeWithScore(node=TextNode(text=text)) for text in ("one", "two")]
        >>> [block.text for block in asyncio.run(RetrieverStage(Fixed()).retrieve("Which?", 1))]
        ['one']
    """

    def __init__(
        self,
        retriever: BaseRetriever,
        *,
        metadata_mode: MetadataMode = MetadataMode.LLM,
        in_thread: bool | None = None,
    ) -> None:
        if in_thread not in (True, False, None):
            raise InvalidRequestError(
                f"in_thread must be True, False or None, not {describe(in_thread)}"
            )
        self._retriever = checked_retriever(retriever)
        self._metadata_mode = checked_metadata_mode(metadata_mode)
        blocks = type(retriever)._aretrieve is BaseRetriever._aretrieve
        self._in_thread = blocks if in_thread is None else in_thread

    async def retrieve(self, query: str, k: int) -> tuple[ContextBlock, ...]:
        """Return the first k nodes for a query, as blocks with their ids.

        Raises:
            InvalidRequestError: If the retriever returns something else than nodes.
        """
        if self._in_thread:
            found = await asyncio.to_thread(self._retriever.retrieve, query)
        else:
            found = await self._retriever.aretrieve(query)
        nodes = checked_nodes(found, type(self).__name__)
        unplanned = without_plan(nodes)
        shown = (nodes if unplanned is None else unplanned)[:k]
        return tuple(node_block(one.node, self._metadata_mode) for one in shown)
