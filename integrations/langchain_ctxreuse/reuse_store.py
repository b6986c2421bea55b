"""A LangGraph store that puts the memories it finds into a prompt, where the prefix cache hits."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import (
    BaseMessage,
    HumanMessage,
    MessageLikeRepresentation,
    SystemMessage,
    convert_to_messages,
)

from ctxreuse.context.blocks import ContextBlock, ContextRequest, text_digest
from ctxreuse.context.checks import checked_each, checked_kind, checked_list, refuse_wrapped
from ctxreuse.context.scope import serving
from ctxreuse.errors import InvalidRequestError, MissingExtraError, describe
from ctxreuse.pipeline.document_turn import ItemKind
from ctxreuse.pipeline.memories import Placement
from ctxreuse.pipeline.memory_planner import (
    MemoryContext,
    MemoryPlanner,
    MemorySearch,
    PlansMemories,
    asked,
)
from ctxreuse.pipeline.ordered_release import run_here
from ctxreuse.planner import ReusePlanner
from langchain_ctxreuse.messages import role_of, text_parts
from langchain_ctxreuse.scope import scope_from_config

try:
    from langgraph.store.base import BaseStore, Item, Op, Result, SearchItem
except ImportError as error:
    raise MissingExtraError("ReuseStore", "langchain") from error

_TEXT_FIELDS = ("text", "memory", "content", "data")
_POSITION = "ctxreuse_position"


@dataclass(frozen=True, slots=True)
class _StoreSearch(MemorySearch):
    """A search of a store; whose memories it reads is said by the namespace."""

    namespace: tuple[str, ...] = ()

    @property
    def tenant(self) -> str:
        """A digest of the namespace, in which user ids often stand."""
        return f"store-{text_digest(json.dumps(self.namespace)).hex()}"


class ReuseStore(PlansMemories, BaseStore):
    """A LangGraph store whose memories go into prompts so that the engine's prefix cache hits.

    It is the wrapped store for whatever reads and writes one: compile a graph with it. `messages`
    searches, and returns a prompt; `search` with a query returns the store's own items in planned
    order, and a `ReuseChatModel` finds their texts in its prompts. A conversation shows a memory
    once; of one that was changed or deleted since, it is said that it no longer holds. A planning
    fault lets memories through as found, and is counted in `faults`. Errors of the store are raised
    as they are. A memory's text is the first of the fields `text`, `memory`, `content` and `data`
    that is a string; of a value with none, the whole as JSON.

    Args:
        store: The store to wrap.
        planner: Plans the contexts; None takes the one of this process.
        tenant: The tenant of the requests, unless the config or `ctxreuse.request_context` says
            another. None takes the namespace that is searched.
        labels: As for `mem0_ctxreuse.ReuseMemory`.
        annotate: As for `mem0_ctxreuse.ReuseMemory`.
        growth_limit: As for `mem0_ctxreuse.ReuseMemory`.
        placement: As for `mem0_ctxreuse.ReuseMemory`.
    """

    _memory: BaseStore

    def __init__(
        self,
        store: BaseStore,
        *,
        planner: ReusePlanner | None = None,
        tenant: str | None = None,
        labels: bool = False,
        annotate: bool = False,
        growth_limit: float | None = 2.0,
        placement: Placement = "before_question",
    ) -> None:
        self._memory = checked_kind("store", store, BaseStore, "a LangGraph store")
        refuse_wrapped("store", store, ReuseStore)
        settings, name = (labels, annotate, growth_limit, placement), type(self).__name__
        kind = ItemKind(_block, _forms)
        self._memory_planner = MemoryPlanner(planner, tenant, name, *settings, store, kind)
        self.supports_ttl, self.ttl_config = store.supports_ttl, store.ttl_config

    @property
    def store(self) -> BaseStore:
        """The wrapped store."""
        return self._memory

    def batch(self, ops: Iterable[Op]) -> list[Result]:
        """Do what the wrapped store does."""
        return self._memory.batch(ops)

    async def abatch(self, ops: Iterable[Op]) -> list[Result]:
        """`batch`, awaited."""
        return await self._memory.abatch(ops)

    def search(self, namespace_prefix: tuple[str, ...], /, **options: Any) -> list[SearchItem]:
        """Search as the wrapped store does, and return what a query finds in planned order.

        Args:
            namespace_prefix: Where to search.
            **options: As the wrapped store takes them: `query`, `filter`, `limit`, ...
        """
        found = self._memory.search(namespace_prefix, **options)
        return self._in_order(found, namespace_prefix, options)

    async def asearch(
        self, namespace_prefix: tuple[str, ...], /, **options: Any
    ) -> list[SearchItem]:
        """`search`, awaited."""
        found = await self._memory.asearch(namespace_prefix, **options)
        return self._in_order(found, namespace_prefix, options)

    def _in_order(
        self, found: list[SearchItem], namespace: Sequence[str], options: Mapping[str, Any]
    ) -> list[SearchItem]:
        query = options.get("query")
        if not query:  # it is a list, not a ranking
            return found
        search = _StoreSearch(self.search, query, (), options, tuple(namespace))
        with serving(scope_from_config(None)):
            ordered: list[SearchItem] = self._memory_planner.reordered(found, search)
        return ordered

    def messages(
        self,
        namespace: tuple[str, ...],
        messages: Sequence[MessageLikeRepresentation],
        **options: Any,
    ) -> list[BaseMessage]:
        """Search for memories, and return a prompt that answers the last message with them.

        Args:
            namespace: Where to search, as in `search`.
            messages: The conversation as this method returned it, and what was said since.
            **options: As `search` takes them: `filter`, `limit`, ...

        Returns:
            The messages to send, ids kept. In a graph they have to replace those of the state:
                `{"messages": [RemoveMessage(REMOVE_ALL_MESSAGES), *prompt, answer]}`.

        Raises:
            InvalidRequestError: no question.
        """
        return run_here(self._messages(namespace, messages, options, awaits=False))

    async def amessages(
        self,
        namespace: tuple[str, ...],
        messages: Sequence[MessageLikeRepresentation],
        **options: Any,
    ) -> list[BaseMessage]:
        """`messages`, awaited."""
        return await self._messages(namespace, messages, options, awaits=True)

    async def _messages(
        self, namespace: Any, messages: Any, options: Mapping[str, Any], *, awaits: bool
    ) -> list[BaseMessage]:
        turn = _OpenTurn.of(messages)
        names = tuple(checked_each("namespace", namespace, str, "a string"))
        search = _StoreSearch(self.search, turn.question, (), options, names)
        store, planner = self._memory, self._memory_planner
        with serving(scope_from_config(None)):
            request = turn.request()
            if awaits:
                found = _found(await store.asearch(names, query=search.query, **options))
                return turn.prompt(await planner.acontext(found, search, request, self._aget))
            found = _found(store.search(names, query=search.query, **options))
            return turn.prompt(planner.context(found, search, request, self._get))

    def _get(self, memory_id: str) -> dict[str, Any] | None:
        *namespace, key = json.loads(memory_id)
        item = self._memory.get(tuple(namespace), key)
        return None if item is None else _found([item])[0]

    async def _aget(self, memory_id: str) -> dict[str, Any] | None:
        *namespace, key = json.loads(memory_id)
        item = await self._memory.aget(tuple(namespace), key)
        return None if item is None else _found([item])[0]


@dataclass(frozen=True, slots=True)
class _OpenTurn:
    """A conversation whose last message asks."""

    messages: Sequence[BaseMessage]
    system: str | None  # of one that has said nothing else yet

    @classmethod
    def of(cls, messages: Iterable[MessageLikeRepresentation]) -> _OpenTurn:
        listed = checked_list("messages", messages, "a list of messages")
        try:
            given = convert_to_messages(listed)
        except (ValueError, TypeError, KeyError, AttributeError, NotImplementedError) as error:
            raise InvalidRequestError(
                f"messages must be LangChain messages, or what it takes for them: "
                f"{describe(str(error))}"
            ) from error
        if not given or not isinstance(given[-1], HumanMessage):
            raise InvalidRequestError("messages must end with the question, a message of the user")
        opens = len(given) == 2 and _is_system(given[0])
        return cls(given, str(given[0].content) if opens else None)

    @property
    def question(self) -> str:
        return "\n".join(text for text, _ in text_parts(self.messages[-1]))

    def request(self) -> ContextRequest:
        """Return the request without its memories; messages are known by their positions."""
        earlier = [
            {"role": role_of(one), "content": one.content, _POSITION: position}
            for position, one in enumerate(self.messages[:-1])
        ]
        history = earlier if self.system is None else []
        return asked(self.question, self.system, history, None)

    def prompt(self, context: MemoryContext) -> list[BaseMessage]:
        """Return the messages to send, those of the conversation with their ids."""
        *before, last = context.messages()
        asking, content = self.messages[-1], last["content"]
        if content != self.question:
            if isinstance(asking.content, list):
                content = [{"type": "text", "text": str(context)}, *asking.content]
            asking = asking.model_copy(update={"content": content})
        return [*map(self._as_sent, before), asking]

    def _as_sent(self, message: Mapping[str, Any]) -> BaseMessage:
        content = message["content"]
        position = message.get(_POSITION)
        if position is None and message["role"] == "user":
            return HumanMessage(content)
        if position is None and not _is_system(self.messages[0]):
            return SystemMessage(content)
        known = self.messages[position or 0]
        return known if known.content == content else known.model_copy(update={"content": content})


def _found(items: Iterable[Item]) -> list[dict[str, Any]]:
    """Return what a search found as memories; their ids say the namespace, too."""
    return [
        {"id": json.dumps([*one.namespace, one.key]), "memory": _text_of(one.value)}
        for one in items
    ]


def _block(item: Item) -> ContextBlock:
    return ContextBlock(text=_text_of(item.value))


def _forms(items: Iterable[Item]) -> list[list[str]]:
    return [[_text_of(item.value) for item in items]]


def _is_system(message: BaseMessage) -> bool:
    return isinstance(message, SystemMessage) and isinstance(message.content, str)


def _text_of(value: Mapping[str, Any]) -> str:
    texts = (value.get(name) for name in _TEXT_FIELDS)
    known = next((text for text in texts if isinstance(text, str)), None)
    return json.dumps(value, sort_keys=True, default=str) if known is None else known
