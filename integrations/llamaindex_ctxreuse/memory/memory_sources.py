"""Where a memory block's memories come from: Mem0, a vector store, an index or any retriever."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.indices.base import BaseIndex
from llama_index.core.schema import MetadataMode, NodeWithScore, TextNode
from llama_index.core.settings import Settings
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
)

from ctxreuse.adapters.memory_owners import ENTITIES, tenant_of
from ctxreuse.adapters.plan_metadata import METADATA_KEY
from ctxreuse.context.blocks import ContextBlock
from ctxreuse.errors import InvalidRequestError
from llamaindex_ctxreuse.llm.planned_prompts import message_text, openai_role
from llamaindex_ctxreuse.nodes.node_plans import node_block, retrieved_nodes


@dataclass(frozen=True, slots=True)
class FoundMemories:
    """The result of a search.

    Attributes:
        blocks: The memories, best first.
        left_out: Words of an earlier plan that say where the memories stand that it left out.
    """

    blocks: tuple[ContextBlock, ...]
    left_out: tuple[str, ...] = ()


class Mem0Source:
    """Mem0's memories: `Memory`, `AsyncMemory`, hosted clients, or anything with their methods.

    Their owner is the tenant.
    """

    def __init__(self, memory: Any, top_k: int, filters: Mapping[str, Any] | None) -> None:
        self._memory = memory
        self._top_k = top_k
        self._filters = dict(filters or {})
        self.tenant = tenant_of(self._filters)

    async def search(self, query: str, session_id: str | None) -> FoundMemories:
        """Return the memories that Mem0 finds."""
        found = await _called(
            self._memory.search, query, filters=dict(self._filters), top_k=self._top_k
        )
        return FoundMemories(
            tuple(ContextBlock(id=str(one["id"]), text=one["memory"]) for one in _as_ranked(found))
        )

    async def add(self, messages: Sequence[ChatMessage], session_id: str | None) -> None:
        """Let Mem0 remember what it finds worth remembering in the messages."""
        entities = {name: self._filters[name] for name in ENTITIES if name in self._filters}
        said = [
            {"role": openai_role(message.role), "content": text}
            for message in messages
            if (text := message_text(message))
        ]
        if said:
            await _called(self._memory.add, said, **entities)


class RetrieverSource:
    """The nodes of a retriever; messages are stored if there is a function that inserts them."""

    tenant: str = ""

    def __init__(
        self,
        retriever: Callable[[], BaseRetriever],
        metadata_mode: MetadataMode,
        insert: Callable[[list[TextNode]], Any] | None = None,
    ) -> None:
        self._retriever = retriever
        self._metadata_mode = metadata_mode
        self._insert = insert

    async def search(self, query: str, session_id: str | None) -> FoundMemories:
        """Return the nodes that the retriever finds."""
        return _found_nodes(await self._retriever().aretrieve(query), self._metadata_mode)

    async def add(self, messages: Sequence[ChatMessage], session_id: str | None) -> None:
        """Insert the messages as one node."""
        node = _messages_node(messages, session_id)
        if self._insert is not None and node is not None:
            await self._insert([node])


class VectorStoreSource:
    """The nodes of a vector store, those of one session, as in LlamaIndex's VectorMemoryBlock."""

    tenant: str = ""

    def __init__(
        self,
        store: BasePydanticVectorStore,
        top_k: int,
        embed_model: BaseEmbedding | None,
        metadata_mode: MetadataMode,
    ) -> None:
        if not store.stores_text:
            raise InvalidRequestError(
                f"{type(store).__name__} does not store the texts of its nodes; "
                "pass the VectorStoreIndex that is built on it"
            )
        self._store = store
        self._top_k = top_k
        self._embed_model = embed_model or Settings.embed_model
        self._metadata_mode = metadata_mode

    async def search(self, query: str, session_id: str | None) -> FoundMemories:
        """Return the session's nodes that are nearest to the query."""
        filters = None
        if session_id is not None:
            filters = MetadataFilters(filters=[MetadataFilter(key="session_id", value=session_id)])
        result = await self._store.aquery(
            VectorStoreQuery(
                query_str=query,
                query_embedding=await self._embed_model.aget_query_embedding(query),
                similarity_top_k=self._top_k,
                filters=filters,
            )
        )
        nodes = [NodeWithScore(node=node) for node in result.nodes or []]
        return _found_nodes(nodes, self._metadata_mode)

    async def add(self, messages: Sequence[ChatMessage], session_id: str | None) -> None:
        """Store the messages as one node."""
        node = _messages_node(messages, session_id)
        if node is not None:
            node.embedding = await self._embed_model.aget_text_embedding(node.text)
            await self._store.async_add([node])


MemorySource: TypeAlias = Mem0Source | RetrieverSource | VectorStoreSource
"""Searches and stores memories; its `tenant` is their owner, "" if that is not known."""


def memory_source(
    memory: object,
    *,
    top_k: int,
    filters: Mapping[str, Any] | None,
    embed_model: BaseEmbedding | None,
    metadata_mode: MetadataMode,
) -> MemorySource:
    """Return the source that reads from and writes to a user's memory.

    Args:
        memory: Mem0 (anything with `search(query, filters=..., top_k=...)`), a vector store that
            stores texts, an index, or a retriever.
        top_k: How many memories to ask for; a retriever asks for its own number.
        filters: Mem0's filters, such as `{"user_id": "alice"}`.
        embed_model: For a vector store; None is that of LlamaIndex's Settings.
        metadata_mode: Which metadata is part of a node's text.

    Raises:
        InvalidRequestError: none of these, or an argument that it does not take.
    """
    if filters is not None and isinstance(
        memory, (BasePydanticVectorStore, BaseIndex, BaseRetriever)
    ):
        raise InvalidRequestError(
            "filters are Mem0's; for an index pass a retriever that has them: "
            "index.as_retriever(filters=...)"
        )
    if isinstance(memory, BasePydanticVectorStore):
        return VectorStoreSource(memory, top_k, embed_model, metadata_mode)
    if isinstance(memory, BaseIndex):
        return RetrieverSource(
            # a new one for each search, because a retriever knows only the nodes of its creation
            lambda: memory.as_retriever(similarity_top_k=top_k),
            metadata_mode,
            memory.ainsert_nodes,
        )
    if isinstance(memory, BaseRetriever):
        return RetrieverSource(lambda: memory, metadata_mode)
    if callable(getattr(memory, "search", None)):
        return Mem0Source(memory, top_k, filters)
    raise InvalidRequestError(
        f"memory must be a Mem0 memory, a vector store, an index or a retriever, not "
        f"{type(memory).__name__}"
    )


def _found_nodes(nodes: list[NodeWithScore], metadata_mode: MetadataMode) -> FoundMemories:
    found, words = retrieved_nodes(nodes)
    return FoundMemories(tuple(node_block(one.node, metadata_mode) for one in found), tuple(words))


def _messages_node(messages: Sequence[ChatMessage], session_id: str | None) -> TextNode | None:
    """Return messages as one node, written as LlamaIndex's VectorMemoryBlock writes them."""
    texts = [
        f"<message role='{message.role.value}'>{text}</message>"
        for message in messages
        if (text := message_text(message))
    ]
    if not texts:
        return None
    return TextNode(text="\n".join(texts), metadata={"session_id": session_id})


async def _called(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the result of a method, asynchronous or not; the latter runs in a thread."""
    if inspect.iscoroutinefunction(method):
        return await method(*args, **kwargs)
    result = await asyncio.to_thread(method, *args, **kwargs)
    return await result if inspect.isawaitable(result) else result


def _as_ranked(found: Any) -> list[Mapping[str, Any]]:
    """Return memories best first, even if an earlier plan has put them into another order."""
    memories = list(found["results"] if isinstance(found, Mapping) else found)
    plan = found.get(METADATA_KEY) if isinstance(found, Mapping) else None
    if not isinstance(plan, Mapping):
        return memories
    ranks = [place["rank"] for place in plan["memories"]]
    return [memory for _, memory in sorted(zip(ranks, memories, strict=True), key=lambda p: p[0])]
