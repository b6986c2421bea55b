"""A memory block that plans the memories it returns, from Mem0, a vector store or a retriever."""

from __future__ import annotations

import asyncio
import inspect
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, Self

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.bridge.pydantic import ConfigDict, Field, PrivateAttr, field_validator
from llama_index.core.indices import VectorStoreIndex
from llama_index.core.indices.base import BaseIndex
from llama_index.core.memory.memory import BaseMemoryBlock
from llama_index.core.schema import MetadataMode, TextNode
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    MetadataFilter,
    MetadataFilters,
)
from pydantic import InstanceOf

from ctxreuse.context.copies import made_with
from ctxreuse.context.fail_open import FailOpen
from ctxreuse.context.fork_safety import ForkSafeLock
from ctxreuse.context.lru_map import PartSize, TenantLRUMap
from ctxreuse.context.rendering import message_texts
from ctxreuse.context.scope import current_scope
from ctxreuse.context.thoughts import without_thoughts
from ctxreuse.context.tokens import estimate_tokens
from ctxreuse.errors import InvalidBlockError, InvalidRequestError
from ctxreuse.pipeline.document_turn import best_first
from ctxreuse.pipeline.engine_options import planning_time
from ctxreuse.pipeline.memories import ENTITIES, Placement, checked_placement, tenant_of
from ctxreuse.pipeline.memory_planner import (
    MemoryPlanner,
    MemoryRecord,
    MemorySearch,
    asked,
    found_memories,
)
from ctxreuse.pipeline.prompt_turn import note_planned
from ctxreuse.planning.plan import Plan
from ctxreuse.serving.planning_fields import PlanningFields
from llamaindex_ctxreuse.llm.planned_prompts import openai_role
from llamaindex_ctxreuse.nodes.node_plans import checked_metadata_mode, node_block
from llamaindex_ctxreuse.nodes.run_nodes import as_retrieved, root_of_call

_REMEMBERED_CONTENTS = 256
_REMEMBERED_CHARACTERS = 16_000_000


def _characters(plan: Plan) -> int:
    """Return how many characters a plan holds, with the content that was made of it."""
    said = (part for message in plan.request.history or () for part in message_texts(message))
    return sum(map(len, (plan.rendered(), *(block.text for block in plan.request.blocks), *said)))


class ReuseMemoryBlock(PlanningFields, BaseMemoryBlock[str]):
    """Long-term memory whose memories hit the engine's prefix cache.

    Put it into a memory that replays what it sent, `reuse_memory(ReuseMemoryBlock(...))`: there,
    memories that the conversation shows already are only pointed to. In LlamaIndex's own `Memory`,
    which ignores `placement`, it changes earlier messages every turn. What Mem0 has changed or
    deleted since is said to be replaced, or to hold no longer. A planning fault lets memories
    through as found, a memory out of reach leaves the conversation without; `faults` counts both.

    Args:
        memory: Mem0 (`Memory`, `AsyncMemory`, a hosted client, or anything with their `search`), a
            vector store that stores texts, a `VectorStoreIndex`, or any retriever.
        planner: Plans the contexts; None takes the one of this process.
        top_k: How many memories to ask for; a retriever asks for its own number.
        filters: Mem0's filters. Their user is the tenant unless `ctxreuse.request_context` has one.
        embed_model: For a vector store; None takes that of LlamaIndex's Settings.
        metadata_mode: Which metadata is part of a node's text.
        searched_messages: How many of the user's last messages are the question.
        labels: Whether the prompt shows memories under labels, for answers that cite them.
        annotate: Whether it says how the search ranked memories that were moved.
        placement: Where the memories stand: "before_question", in its message or one before it;
            "after_history", in a message of their own, which some chat templates refuse; "system",
            behind the system text, for first turns and those that lay all out anew.
        name: The block's name in the prompt.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    name: str = Field(default="Memories", description="The name of the memory block.")
    memory: Any = Field(exclude=True, repr=False, frozen=True)
    top_k: int = Field(default=10, ge=1, frozen=True)
    filters: Mapping[str, Any] | None = Field(default=None, frozen=True)
    embed_model: InstanceOf[BaseEmbedding] | None = Field(
        default=None, exclude=True, repr=False, frozen=True
    )
    metadata_mode: MetadataMode = Field(default=MetadataMode.NONE, frozen=True)
    searched_messages: int = Field(default=1, ge=1)
    labels: bool = Field(default=False, frozen=True)
    annotate: bool = Field(default=False, frozen=True)
    placement: Placement = Field(default="before_question", frozen=True)
    _source: _Mem0Source | _RetrieverSource = PrivateAttr()
    _planning: FailOpen = PrivateAttr()
    _reading: FailOpen = PrivateAttr()
    _searching: FailOpen = PrivateAttr()
    _storing: FailOpen = PrivateAttr()
    _contents: TenantLRUMap[tuple[str | int | None, str], Plan] = PrivateAttr()
    _lock: ForkSafeLock = PrivateAttr(default_factory=ForkSafeLock)
    _memories: MemoryPlanner = PrivateAttr()

    _check_placement = field_validator("placement", mode="before")(checked_placement)
    _check_metadata_mode = field_validator("metadata_mode", mode="before")(checked_metadata_mode)

    def _build(self) -> None:
        self._contents = TenantLRUMap(
            _REMEMBERED_CONTENTS, max_weight=_REMEMBERED_CHARACTERS, weight_of=_characters
        )
        name = type(self).__name__
        self._planning = FailOpen(name, "memories are left out", tell=self.planner.note_failure)
        self._reading = FailOpen(name, "those without a text are left out", "reading memories")
        self._searching = FailOpen(name, "the conversation goes on without memories", "searching")
        self._storing = FailOpen(name, "the messages are not remembered", "adding")
        self._source = _memory_source(self, self._reading)
        # the memory around it looks after growth and placement
        tenant, told = self._source.tenant, (self.labels, self.annotate)
        self._memories = MemoryPlanner(
            self.planner, tenant, name, *told, None, "before_question", self.memory
        )

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a new block with the same settings, but for those that change."""
        settings = self._settings() | dict(update or {})
        return type(self)(**deepcopy(settings) if deep else settings)

    def __reduce__(self) -> tuple[Any, ...]:
        return made_with(type(self), **self._settings())

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        return type(self)(**deepcopy(self._settings(), memo))

    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in type(self).model_fields}

    @property
    def faults(self) -> int:
        """How often planning, searching or storing has failed, or a memory had no text."""
        own = self._planning, self._reading, self._searching, self._storing
        return self._memories.fail_open.faults + sum(step.faults for step in own)

    @property
    def parts(self) -> dict[str, PartSize]:
        """How much is remembered of contents and memories, and how much may be; of all tenants."""
        with self._lock:
            return {
                "contents": self._contents.size,
                "content_characters": self._contents.weight_size,
            }

    async def _aget(self, messages: list[ChatMessage] | None = None, **block_kwargs: Any) -> str:
        said = [one for one in messages or () if one.role == MessageRole.USER]
        query = " ".join(one.content for one in said[-self.searched_messages :] if one.content)
        if not query:
            return ""
        session_id = block_kwargs.get("session_id")
        search = MemorySearch(self._source.search, query, (session_id,), {})
        try:
            found = await self._source.search(query, session_id)
        except Exception as error:
            self._searching.note(error)
            return ""
        memories, get = self._memories, self._source.get
        known = found, search, asked("", None, None, None), get
        if get is None or inspect.iscoroutinefunction(get):
            context = await memories.acontext(*known)
        else:
            context = await asyncio.to_thread(memories.context, *known)
        request = context.request
        if context.plan is None or not (request.blocks or request.outdated):
            return str(context)
        content = self._kept(context.plan)
        is_asked = messages is None or messages[-1].role == MessageRole.USER
        if not is_asked and current_scope().history is None:  # an agent reads its memory at the end
            self.take_back(content)
        return content

    def take_back(self, content: str) -> None:
        """Take back the plan of a `content` that no prompt shows."""
        made = self._made(content)
        if made is not None:
            self._planning.attempt(lambda: self.planner.forget(made), bool)

    def shown_anew(self, content: str) -> str:
        """Return about what a `content` of this block would be if it were the first."""
        made = self._made(content)
        texts = [content] if made is None else [block.text for block in made.request.blocks]
        return "\n\n".join(texts)

    def found_in_front(self, content: str) -> int:
        """Return how many tokens of a `content` a conversation finds that begins with it."""
        made = self._made(content)
        if made is None:
            return 0
        first = replace(made.request, history=None)
        return self._planning.attempt(lambda: self.planner.cached_tokens(first), int)

    def _made(self, content: str) -> Plan | None:
        """Return what a content of the surrounding tenant and conversation was made of."""
        scope = current_scope()
        tenant = self._source.tenant if scope.tenant is None else scope.tenant
        with self._lock:
            return self._contents.get(tenant, (scope.conversation_id, content))

    async def _aput(self, messages: list[ChatMessage]) -> None:
        """Remember messages that the short-term memory lets go."""
        options = (message.additional_kwargs for message in messages)
        sessions = [given["session_id"] for given in options if "session_id" in given]
        said: list[tuple[MessageRole, str]] = []
        for one in messages:
            text = one.content or ""
            if one.role == MessageRole.ASSISTANT:  # what a model thought is nothing to remember
                text = without_thoughts(text)
            said += [(one.role, text)] if text else []
        try:
            if said:
                await self._source.add(said, sessions[0] if sessions else None)
        except Exception as error:
            self._storing.note(error)

    async def atruncate(self, content: str, tokens_to_truncate: int) -> str | None:
        """Return a content without its lowest memories, planned anew; None if nothing is left."""
        made = self._made(content)
        if made is None:
            return None
        return self._planning.attempt(lambda: self._truncated(made, content, tokens_to_truncate))

    def note_shown(self, content: str, role: str, texts: Iterable[str]) -> None:
        """Have the texts among these that show a `content` sent as they are."""
        made = self._made(content)
        for text in texts:
            if made is not None and content in text:
                note_planned(current_scope().tenant or "", role, text, made)

    def _kept(self, plan: Plan) -> str:
        """Return a plan's memories as text, which can be truncated from now on."""
        request, content = plan.request, plan.rendered()
        with self._lock:
            # two tenants, or two conversations, may have got the same text
            self._contents.put(request.tenant, (request.conversation_id, content), plan)
        return content

    def _truncated(self, made: Plan, content: str, tokens: int) -> str | None:
        """Return a content without its last blocks, planned in place of the longer one."""
        request = made.request
        self.planner.forget(made)
        target = estimate_tokens(content) - tokens

        # previews tell how many blocks fit, so that only one plan is made
        def is_too_long(kept: int) -> bool:
            shorter = replace(request, blocks=request.blocks[:kept])
            preview = self._annotated(self.planner.preview(shorter))
            return estimate_tokens(preview.rendered()) > target

        kept = bisect_left(range(1, len(request.blocks)), True, key=is_too_long)
        if not kept:
            return None
        shorter = replace(request, blocks=request.blocks[:kept])
        planner = self.planner
        return self._kept(self._annotated(planner.plan(shorter, **planning_time(planner))))

    def _annotated(self, plan: Plan) -> Plan:
        return plan if self.annotate else plan.with_order_annotation(None)


class _Mem0Source:
    """Mem0's memories: `Memory`, `AsyncMemory`, hosted clients, or anything with their methods."""

    def __init__(self, block: ReuseMemoryBlock, reading: FailOpen) -> None:
        self._memory, self._planner, self._top_k = block.memory, block.planner, block.top_k
        self._reading = reading
        self._filters = dict(block.filters or {})
        self.tenant = tenant_of(self._filters)
        self.get: Any = getattr(block.memory, "get", None)

    async def search(self, query: str, session_id: str | None) -> list[MemoryRecord]:
        asking = {"filters": {**self._filters}, "top_k": self._top_k}
        memories = found_memories(await _called(self._memory.search, query, **asking))
        read = [
            one
            for one in memories
            if isinstance(one, Mapping) and isinstance(one.get("memory"), str)
        ]
        if unread := len(memories) - len(read):
            self._reading.note(InvalidBlockError(f"{unread} memories have no text"))
        texts, tenant = [one["memory"] for one in read], current_scope().tenant or self.tenant
        # another part of ours may search
        return best_first(read, texts, tenant, self._planner, root_of_call())

    async def add(self, said: Sequence[tuple[MessageRole, str]], session_id: str | None) -> None:
        """Let Mem0 remember what it finds worth remembering in the messages."""
        entities = {name: self._filters[name] for name in ENTITIES if name in self._filters}
        messages = [{"role": openai_role(role), "content": text} for role, text in said]
        await _called(self._memory.add, messages, **entities)


class _RetrieverSource:
    """The nodes of a retriever, or of an index, where messages are stored, too."""

    tenant: str = ""
    get = None

    def __init__(
        self, block: ReuseMemoryBlock, memory: BaseRetriever | BaseIndex[Any], is_by_session: bool
    ) -> None:
        self._planner, self._metadata_mode = block.planner, block.metadata_mode
        self._memory, self._is_by_session, self._top_k = memory, is_by_session, block.top_k

    async def search(self, query: str, session_id: str | None) -> list[MemoryRecord]:
        retriever = self._memory
        if isinstance(retriever, BaseIndex):
            # a new one for each search, because a retriever knows only the nodes of its creation
            options: dict[str, Any] = {"similarity_top_k": self._top_k}
            if self._is_by_session and session_id is not None:
                session = MetadataFilter(key="session_id", value=session_id)
                options["filters"] = MetadataFilters(filters=[session])
            retriever = retriever.as_retriever(**options)
        nodes = as_retrieved(await retriever.aretrieve(query), self._planner)
        blocks = [node_block(one.node, self._metadata_mode) for one in nodes]
        return [{"id": one.id, "memory": one.text} for one in blocks]

    async def add(self, said: Sequence[tuple[MessageRole, str]], session_id: str | None) -> None:
        if not isinstance(self._memory, BaseIndex):
            return
        # written as LlamaIndex's VectorMemoryBlock writes them
        text = "\n".join(f"<message role='{role.value}'>{text}</message>" for role, text in said)
        about = {"session_id": session_id}
        node = TextNode(text=text, metadata=about, excluded_embed_metadata_keys=list(about))
        await self._memory.ainsert_nodes([node])


def _memory_source(block: ReuseMemoryBlock, reading: FailOpen) -> _Mem0Source | _RetrieverSource:
    memory = block.memory
    is_of_llamaindex = isinstance(memory, (BasePydanticVectorStore, BaseIndex, BaseRetriever))
    if block.filters is not None and is_of_llamaindex:
        raise InvalidRequestError(
            "filters are Mem0's; for an index pass a retriever that has them: "
            "index.as_retriever(filters=...)"
        )
    is_by_session = isinstance(memory, BasePydanticVectorStore)  # as VectorMemoryBlock has it
    if is_by_session:
        if not memory.stores_text:
            raise InvalidRequestError(
                f"{type(memory).__name__} does not store the texts of its nodes; "
                "pass the VectorStoreIndex that is built on it"
            )
        memory = VectorStoreIndex.from_vector_store(memory, block.embed_model)
    if is_of_llamaindex:
        return _RetrieverSource(block, memory, is_by_session)
    if callable(getattr(memory, "search", None)):
        return _Mem0Source(block, reading)
    raise InvalidRequestError(
        f"memory must be a Mem0 memory, a vector store, an index or a retriever, not "
        f"{type(memory).__name__}"
    )


async def _called(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the result of a method, asynchronous or not; the latter runs in a thread."""
    if inspect.iscoroutinefunction(method):
        return await method(*args, **kwargs)
    result = await asyncio.to_thread(method, *args, **kwargs)
    return await result if inspect.isawaitable(result) else result
