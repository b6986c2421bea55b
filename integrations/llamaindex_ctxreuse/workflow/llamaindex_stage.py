"""A LlamaIndex model and retriever, served to a workflow engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.llms import LLM, ChatMessage
from llama_index.core.schema import MetadataMode

from ctxreuse.context.blocks import ContextBlock
from ctxreuse.context.checks import checked_kind
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.serving.client.request import Prompt, messages_of
from ctxreuse.workflow.models.language_model import Piece
from llamaindex_ctxreuse.nodes.node_plans import (
    checked_metadata_mode,
    checked_nodes,
    checked_retriever,
    node_block,
    without_plan,
)


class LlamaIndexLLM:
    """Serves a LlamaIndex LLM to a workflow; closing a stream closes the LLM's.

    A chunk with text counts as a token; tokens that the usage of OpenAI-like models reports besides
    come at the end, as a piece without text.

    Args:
        llm: The LLM. A generation's `params`, such as `max_tokens`, are passed with each call.

    Raises:
        InvalidRequestError: wrong type.

    Example:
        >>> import asyncio
        >>> from llama_index.core.llms import MockLLM
        >>> async def main():
        ...     llm = LlamaIndexLLM(MockLLM(max_tokens=2))
        ...     prompt = [{"role": "user", "content": "Is Paris in France?"}]
        ...     async with aclosing(llm.stream(prompt, {})) as pieces:
        ...         return "".join([piece.text async for piece in pieces])
        >>> asyncio.run(main())
        'text text'
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = checked_kind("llm", llm, LLM, "a LlamaIndex LLM")

    async def stream(
        self, prompt: Prompt, params: Mapping[str, Any]
    ) -> AsyncGenerator[Piece, None]:
        """Answer a prompt piece by piece; see `ctxreuse.workflow.LanguageModel`.

        Args:
            prompt: A plan, or chat messages.
            params: Keyword arguments for the LLM.

        Yields:
            The pieces.
        """
        told = used = 0
        messages = [ChatMessage(**message) for message in messages_of(prompt)]
        chunks: Any = await self._llm.astream_chat(messages, **params)
        async with aclosing(chunks):
            async for chunk in chunks:
                usage = getattr(getattr(chunk, "raw", None), "usage", None)
                used = getattr(usage, "completion_tokens", None) or used
                if chunk.delta:
                    told += 1
                    yield Piece(chunk.delta, 1)
        if used > told:
            yield Piece("", used - told)


class RetrieverStage:
    """Serves a LlamaIndex retriever to a workflow.

    LlamaIndex retrievers without an async search of their own run their blocking one in the event
    loop, where it would hold up all other requests; here it runs in a thread. A thread cannot be
    stopped, so a cancelled search runs to its end and its result is dropped. Retrievers take no k
    for one query: set `similarity_top_k` to the largest that the workflow wants; further nodes are
    left out. If a `ReuseRetriever` has planned the nodes, the workflow plans them anew.

    Args:
        retriever: Any retriever.
        metadata_mode: Which metadata is part of a node's text where the prompt shows it.
        in_thread: Whether its blocking search runs in a thread; None does so if its class has no
            async one. True helps if the async one only calls another one that blocks.

    Raises:
        InvalidRequestError: wrong type, or no such metadata mode.

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
            InvalidRequestError: the retriever returns something else than nodes.
        """
        if self._in_thread:
            found = await asyncio.to_thread(self._retriever.retrieve, query)
        else:
            found = await self._retriever.aretrieve(query)
        nodes = checked_nodes(found, type(self).__name__)
        unplanned = without_plan(nodes)
        shown = (nodes if unplanned is None else unplanned)[:k]
        return tuple(node_block(one.node, self._metadata_mode) for one in shown)
