"""A memory block that plans the memories it returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.bridge.pydantic import ConfigDict, Field, PrivateAttr, field_validator
from llama_index.core.memory.memory import BaseMemoryBlock
from llama_index.core.schema import MetadataMode

from ctxreuse.adapters.prompt_planner import planner_or_new
from ctxreuse.context.blocks import ContextBlock, ContextRequest, distinct_texts
from ctxreuse.context.fail_open import FailOpen
from ctxreuse.context.lru_map import LRUMap
from ctxreuse.context.rendering import render_turn
from ctxreuse.context.scope import RequestScope, current_scope, request_context
from ctxreuse.context.tokens import estimate_tokens
from ctxreuse.planner import ReusePlanner
from ctxreuse.planning.plan import Plan
from llamaindex_ctxreuse.llm.planned_prompts import message_text
from llamaindex_ctxreuse.memory.memory_sources import MemorySource, memory_source
from llamaindex_ctxreuse.nodes.node_plans import checked_metadata_mode

_REMEMBERED_CONTENTS = 256


@dataclass(frozen=True, slots=True)
class _Content:
    """A text that the block returned; `left_out` says where memories stand that it lacks."""

    text: str
    plan: Plan
    left_out: tuple[str, ...]

    @property
    def key(self) -> tuple[str, str | int | None, str]:
        """Tenant, conversation and text, because two of them may have got the same text."""
        return self.plan.request.tenant, self.plan.request.conversation_id, self.text


class ReuseMemoryBlock(BaseMemoryBlock[str]):
    """Long-term memory whose memories hit the engine's prefix cache.

    Put it into a memory that replays what it sent, `reuse_memory(ReuseMemoryBlock(...))`: there,
    memories that the conversation shows already are only pointed to. LlamaIndex's own `Memory`
    takes it, too; but with `InsertMethod.SYSTEM`, its default, it changes the system message every
    turn and the engine caches nothing behind it, and with `InsertMethod.USER` it removes the
    memories from a question when the next one comes.

    A planning fault lets memories through as found, and a memory that cannot be reached leaves the
    conversation without memories; both are logged once and counted in `faults`.

    Args:
        memory: Mem0 (`Memory`, `AsyncMemory`, a hosted client, or anything with their `search`), a
            vector store that stores texts, a `VectorStoreIndex`, or any retriever.
        planner: Plans the contexts; None makes a new one.
        top_k: How many memories to ask for; a retriever asks for its own number.
        filters: Mem0's filters. The user in them is the tenant, unless
            `ctxreuse.request_context` says another.
        embed_model: For a vector store; None takes that of LlamaIndex's Settings.
        metadata_mode: Which metadata is part of a node's text.
        searched_messages: How many of the user's last messages are the question.
        name: The block's name in the prompt.

    Raises:
        ValueError: wrong type or out of range.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    name: str = Field(default="Memories", description="The name of the memory block.")
    memory: Any = Field(exclude=True, repr=False)
    planner: ReusePlanner | None = Field(
        default=None, validate_default=True, exclude=True, repr=False
    )
    top_k: int = Field(default=10, ge=1)
    filters: Mapping[str, Any] | None = None
    embed_model: BaseEmbedding | None = Field(default=None, exclude=True, repr=False)
    metadata_mode: MetadataMode = MetadataMode.NONE
    searched_messages: int = Field(default=1, ge=1)
    _source: MemorySource = PrivateAttr()
    _planning: FailOpen = PrivateAttr()
    _searching: FailOpen = PrivateAttr()
    _storing: FailOpen = PrivateAttr()
    _planner: ReusePlanner = PrivateAttr()
    _contents: LRUMap[tuple[str, str | int | None, str], _Content] = PrivateAttr()
    _lock: Lock = PrivateAttr(default_factory=Lock)

    _check_planner = field_validator("planner", mode="before")(planner_or_new)
    _check_metadata_mode = field_validator("metadata_mode", mode="before")(checked_metadata_mode)

    def model_post_init(self, context: Any, /) -> None:
        """Build what holds the state of a run."""
        super().model_post_init(context)
        self._planner = planner_or_new(self.planner)
        self._contents = LRUMap(_REMEMBERED_CONTENTS)
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
            with request_context(history=()):  # a planner of ours in there must leave nothing out
                found = await self._source.search(query, block_kwargs.get("session_id"))
        except Exception as error:
            self._searching.note(error)
            return ""
        blocks = tuple(distinct_texts(found.blocks))
        if not blocks:
            return "\n\n".join(found.left_out)
        scope = current_scope()
        return self._planning.attempt(
            lambda: self._planned(self._request(blocks, scope), found.left_out),
            lambda: "\n\n".join([*(block.text for block in blocks), *found.left_out]),
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
            content: A text that the block returned in the surrounding tenant and conversation.
            tokens_to_truncate: How much shorter it has to become.

        Returns:
            The rest, planned anew; None if nothing is left.
        """
        scope = current_scope()
        with self._lock:
            made = self._contents.get((self._tenant(scope), scope.conversation_id, content))
        if made is None:
            return None
        return self._planning.attempt(
            lambda: self._truncated(made, tokens_to_truncate), lambda: None
        )

    def _request(self, blocks: tuple[ContextBlock, ...], scope: RequestScope) -> ContextRequest:
        return ContextRequest(
            blocks,
            history=scope.history,
            conversation_id=scope.conversation_id,
            tenant=self._tenant(scope),
        )

    def _planned(self, request: ContextRequest, left_out: tuple[str, ...]) -> str:
        """Return a request's memories as text, which can be truncated from now on."""
        plan = self._planner.plan(request)
        content = _Content(_rendered(plan, left_out), plan, left_out)
        with self._lock:
            self._contents.put(content.key, content)
        return content.text

    def _truncated(self, content: _Content, tokens: int) -> str | None:
        """Return a content without its last blocks, planned in place of the longer one.

        Previews tell how many blocks fit, so that only one plan is made.
        """
        request = content.plan.request
        self._planner.evict([content.plan.request_id])
        target = estimate_tokens(content.text) - tokens
        kept = request.blocks
        while kept := kept[:-1]:
            shorter = replace(request, blocks=kept)
            preview = _rendered(self._planner.preview(shorter), content.left_out)
            if estimate_tokens(preview) <= target:
                return self._planned(shorter, content.left_out)
        return None

    def _tenant(self, scope: RequestScope) -> str:
        return scope.tenant or self._source.tenant


def _rendered(plan: Plan, left_out: tuple[str, ...]) -> str:
    further = "\n\n".join(left_out)
    return render_turn(plan.parts, plan.order_annotation, further, plan.templates)
