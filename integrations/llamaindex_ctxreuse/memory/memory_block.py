"""A memory block that plans what it returns."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.bridge.pydantic import ConfigDict, Field, PrivateAttr, field_validator
from llama_index.core.memory.memory import BaseMemoryBlock
from llama_index.core.schema import MetadataMode

from ctxreuse.adapters.prompt_planner import planner_or_new
from ctxreuse.context.blocks import ContextRequest, distinct_texts
from ctxreuse.context.fail_open import FailOpen
from ctxreuse.context.rendering import render_turn
from ctxreuse.context.scope import RequestScope, current_scope, request_context
from ctxreuse.context.tokens import estimate_tokens
from ctxreuse.planner import ReusePlanner
from ctxreuse.planning.plan import Plan
from llamaindex_ctxreuse.llm.planned_prompts import message_text
from llamaindex_ctxreuse.memory.memory_sources import FoundMemories, MemorySource, memory_source
from llamaindex_ctxreuse.nodes.node_plans import checked_metadata_mode

_REMEMBERED_CONTENTS = 256


@dataclass(frozen=True, slots=True)
class _Content:
    """What this block returned, and what it was made from."""

    text: str
    plan: Plan
    scope: RequestScope
    left_out: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Key:
    """Which content it is: two tenants, or two conversations, may have got the same text."""

    tenant: str
    conversation_id: str | int | None
    text: str


class ReuseMemoryBlock(BaseMemoryBlock[str]):
    """Long-term memory whose memories hit the engine's prefix cache.

    Put it into a memory that replays what it sent, `reuse_memory(ReuseMemoryBlock(...))`: there,
    memories that the conversation shows already are only pointed to. LlamaIndex's own `Memory`
    takes it, too; but with `InsertMethod.SYSTEM`, its default, it changes the system message every
    turn and the engine caches nothing behind it, and with `InsertMethod.USER` it takes the memories
    out of a question again when the next one comes.

    A fault of ours lets memories through as found, and a memory that cannot be reached leaves the
    conversation without memories; both are logged once and counted in `faults`.

    Args:
        memory: Mem0 (`Memory`, `AsyncMemory`, a hosted client, or anything with their `search`), a
            vector store that stores texts, a `VectorStoreIndex`, or any retriever.
        planner: Plans the contexts; an own one if it is left out.
        top_k: How many memories to ask for; a retriever asks for its own number.
        filters: Mem0's filters. The user in them is the tenant, unless
            `ctxreuse.request_context` says another.
        embed_model: For a vector store; that of LlamaIndex's Settings if it is left out.
        metadata_mode: Which metadata is part of a node's text.
        searched_messages: The question is the text of this many last messages of the user.
        name: The block's name in the prompt.

    Raises:
        ValueError: If an argument is of the wrong kind.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    name: str = Field(default="Memories", description="The name of the memory block.")
    memory: Any = Field(exclude=True, repr=False)
    planner: ReusePlanner = Field(default_factory=ReusePlanner, exclude=True, repr=False)
    top_k: int = Field(default=10, ge=1)
    filters: Mapping[str, Any] | None = None
    embed_model: BaseEmbedding | None = Field(default=None, exclude=True, repr=False)
    metadata_mode: MetadataMode = MetadataMode.NONE
    searched_messages: int = Field(default=1, ge=1)
    _source: MemorySource = PrivateAttr()
    _planning: FailOpen = PrivateAttr()
    _searching: FailOpen = PrivateAttr()
    _storing: FailOpen = PrivateAttr()
    _contents: OrderedDict[_Key, _Content] = PrivateAttr(default_factory=OrderedDict)
    _lock: Lock = PrivateAttr(default_factory=Lock)

    _check_planner = field_validator("planner", mode="before")(planner_or_new)
    _check_metadata_mode = field_validator("metadata_mode", mode="before")(checked_metadata_mode)

    def model_post_init(self, context: Any, /) -> None:
        """Build what holds the state of a run."""
        super().model_post_init(context)
        self._source = memory_source(
            self.memory,
            top_k=self.top_k,
            filters=self.filters,
            embed_model=self.embed_model,
            metadata_mode=self.metadata_mode,
        )
        name = type(self).__name__
        self._planning = FailOpen(name, "memories go through as found")
        self._searching = FailOpen(name, "the conversation goes on without memories", "searching")
        self._storing = FailOpen(name, "the messages are not remembered", "adding")

    @property
    def faults(self) -> int:
        """How often planning, searching or storing has failed."""
        return self._planning.faults + self._searching.faults + self._storing.faults

    async def _aget(self, messages: list[ChatMessage] | None = None, **block_kwargs: Any) -> str:
        asked = [one for one in messages or () if one.role == MessageRole.USER]
        query = " ".join(filter(None, map(message_text, asked[-self.searched_messages :])))
        if not query:
            return ""
        try:
            with request_context(history=()):  # one of ours in there must leave nothing out
                found = await self._source.search(query, block_kwargs.get("session_id"))
        except Exception as error:
            self._searching.note(error)
            return ""
        found = FoundMemories(tuple(distinct_texts(found.blocks)), found.left_out)
        if not found.blocks:
            return "\n\n".join(found.left_out)
        scope = current_scope()
        return self._planning.attempt(
            lambda: self._remembered(self._planned(found, scope)),
            lambda: "\n\n".join([*(block.text for block in found.blocks), *found.left_out]),
        )

    async def _aput(self, messages: list[ChatMessage]) -> None:
        """Remember messages that the short-term memory lets go."""
        session_id = next(
            (
                message.additional_kwargs["session_id"]
                for message in messages
                if "session_id" in message.additional_kwargs
            ),
            None,
        )
        try:
            await self._source.add(messages, session_id)
        except Exception as error:
            self._storing.note(error)

    async def atruncate(self, content: str, tokens_to_truncate: int) -> str | None:
        """Return a content of this block without its lowest-ranked memories.

        Args:
            content: What the block returned in the surrounding tenant and conversation.
            tokens_to_truncate: How much shorter it has to become.

        Returns:
            The rest, planned anew; None if nothing is left.
        """
        with self._lock:
            made = self._contents.get(self._key(content, current_scope()))
        if made is None:
            return None
        return self._planning.attempt(
            lambda: self._truncated(made, tokens_to_truncate), lambda: None
        )

    def _planned(self, found: FoundMemories, scope: RequestScope) -> _Content:
        plan = self.planner.plan(
            ContextRequest(
                found.blocks,
                history=scope.history,
                conversation_id=scope.conversation_id,
                tenant=self._tenant(scope),
            )
        )
        further = "\n\n".join(found.left_out)
        text = render_turn(plan.parts, plan.order_annotation, further, plan.templates)
        return _Content(text, plan, scope, found.left_out)

    def _remembered(self, content: _Content) -> str:
        """Return a content's text, which can be truncated from now on."""
        key = self._key(content.text, content.scope)
        with self._lock:
            self._contents[key] = content
            self._contents.move_to_end(key)
            if len(self._contents) > _REMEMBERED_CONTENTS:
                self._contents.popitem(last=False)
        return content.text

    def _truncated(self, content: _Content, tokens: int) -> str | None:
        """Return a context without its last blocks, which is then the one that was planned."""
        kept = tuple(content.plan.request.unique_blocks.values())
        self.planner.evict([content.plan.request_id])
        target = estimate_tokens(content.text) - tokens
        while kept := kept[:-1]:
            shorter = self._planned(FoundMemories(kept, content.left_out), content.scope)
            if estimate_tokens(shorter.text) <= target:
                return self._remembered(shorter)
            self.planner.evict([shorter.plan.request_id])
        return None

    def _key(self, text: str, scope: RequestScope) -> _Key:
        return _Key(self._tenant(scope), scope.conversation_id, text)

    def _tenant(self, scope: RequestScope) -> str:
        return scope.tenant or self._source.tenant
