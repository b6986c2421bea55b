"""Plans the results of searches, for the sync and the async wrapper.

Memories, as mem0 returns them, become context blocks; they go back in planned order, or as text for
a prompt.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from ctxreuse import ContextBlock, ContextRequest, Plan, ReusePlanner
from ctxreuse.adapters.memories import (
    ENTITIES,
    KnownMemories,
    ShownMemories,
    tenant_of,
    without_memories,
)
from ctxreuse.adapters.plan_metadata import METADATA_KEY, memories_metadata
from ctxreuse.adapters.prompt_planner import planner_or_new
from ctxreuse.adapters.rendered_contexts import ContextRegistry, context_registry
from ctxreuse.context.blocks import BlockKey, Message, texts_to_show
from ctxreuse.context.checks import checked_id, checked_kind, checked_list, checked_number
from ctxreuse.context.fail_open import FailOpen
from ctxreuse.context.rendering import (
    DEFAULT_TEMPLATES,
    SentBlock,
    message_texts,
    render_messages,
)
from ctxreuse.context.scope import RequestScope, current_scope
from ctxreuse.errors import InvalidRequestError

MemoryRecord: TypeAlias = Mapping[str, Any]
"""One memory: `id`, `memory` (its text), and other fields of mem0."""

_RESULTS = "results"


@dataclass(frozen=True, slots=True)
class MemoryContext:
    """The memories found for a question, as text.

    `str()` of it is the whole context: text, then annotation.

    Attributes:
        text: The memories under their labels, in planned order; instead of a memory that the
            conversation shows already, its place there. "" if none was found.
        annotation: The order in which mem0 ranked them, in words; None if the text has that order.
        request: The request: system text, history, question, and the planned memories, exact
            duplicates once.
        plan: The plan, with `labels` for citations; None where planning failed and the text is the
            memories as mem0 ranked them, without labels.
    """

    text: str
    annotation: str | None
    request: ContextRequest
    plan: Plan | None = None

    def __str__(self) -> str:
        """Return text and annotation."""
        if self.plan is None:
            return self.text
        return self.plan.rendered()

    def messages(self) -> list[dict[str, Any]]:
        """Return OpenAI chat messages: system text, history, then memories and question as one."""
        if self.plan is not None:
            return self.plan.messages()
        content = _joined((self.text, self.request.query))
        return render_messages(self.request.system, self.request.history, content)


@dataclass(frozen=True, slots=True)
class MemorySearch:
    """A call of a memory's `search`.

    Attributes:
        method: The method.
        query: Its first argument.
        args: Its other positional arguments.
        kwargs: Its keyword arguments.
    """

    method: Callable[..., Any]
    query: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    def run(self) -> Any:
        """Return what the method does; its errors are raised."""
        return self.method(self.query, *self.args, **self.kwargs)

    @property
    def tenant(self) -> str:
        """The tenant whose memories the search reads, however the arguments are given."""
        arguments = dict(self.kwargs)
        if self.args:
            signature = inspect.signature(self.method)
            arguments = dict(signature.bind(self.query, *self.args, **self.kwargs).arguments)
            for parameter in signature.parameters.values():
                if parameter.kind is parameter.VAR_KEYWORD:
                    arguments.update(arguments.pop(parameter.name, {}))
        options = arguments.get("options")
        if options is not None and "filters" not in arguments:
            given = options if isinstance(options, Mapping) else vars(options)
            arguments["filters"] = given.get("filters")
        ids = {name: arguments[name] for name in ENTITIES if name in arguments}
        return tenant_of(arguments.get("filters"), **ids)


class MemoryPlanner:
    """Plans the results of searches; an internal error lets the memories through as found.

    Args:
        planner: Plans the contexts; None makes a new one.
        tenant: The tenant of the requests; None takes that of each search's filters.
        component: The wrapper's name, for the log.
        registry: Where contexts are remembered; None takes the one of this process.
        labels: Whether memories stand under labels.
        annotate: Whether a changed order is told to the model.
        growth_limit: How long a conversation's prompt may get by the memories of earlier turns, as
            a multiple of what it has with this turn's alone; then they are laid out anew. None has
            no limit.

    Raises:
        InvalidRequestError: wrong type.
    """

    def __init__(
        self,
        planner: ReusePlanner | None,
        tenant: str | None,
        component: str,
        registry: ContextRegistry | None = None,
        *,
        labels: bool = False,
        annotate: bool = False,
        growth_limit: float | None = 2.0,
    ) -> None:
        self.planner = planner_or_new(planner)
        self._labels = checked_kind("labels", labels, bool, "True or False")
        self._annotates = checked_kind("annotate", annotate, bool, "True or False")
        if growth_limit is not None:
            checked_number("growth_limit", growth_limit, 1)
        self._growth_limit = growth_limit
        self.known = KnownMemories()
        self._registry = context_registry(registry)
        self._tenant = None if tenant is None else ContextRequest((), tenant=tenant).tenant
        self._fail_open = FailOpen(
            component, "memories go through as retrieved", tell=self.planner.note_failure
        )

    @property
    def faults(self) -> int:
        """How often planning, or looking up what is shown, has failed."""
        return self._fail_open.faults

    def note(self, error: Exception) -> None:
        """Count that a memory could not be looked up; it counts as it stands."""
        self._fail_open.note(error)

    def reordered(self, result: Any, search: MemorySearch) -> Any:
        """Return a search's result in planned order, its memories copied and none left out."""
        return self._fail_open.attempt(lambda: self._reordered(result, search), lambda: result)

    def shown_memories(
        self, result: Any, search: MemorySearch, asked: ContextRequest
    ) -> ShownMemories:
        """Return the memories that earlier messages show and that have not been found now."""
        return self._fail_open.attempt(
            lambda: self._shown_memories(result, search, asked), ShownMemories
        )

    def context(
        self,
        result: Any,
        search: MemorySearch,
        asked: ContextRequest,
        shown: ShownMemories,
    ) -> MemoryContext:
        """Return a search's memories as text.

        Args:
            result: What the search returned.
            search: The search.
            asked: The request without its blocks and its tenant, as `asked` made it.
            shown: What earlier messages show, looked up in the store.
        """
        return self._fail_open.attempt(
            lambda: self._context(result, search, asked, shown),
            # without labels, because earlier turns may use these
            lambda: MemoryContext(_joined(texts_as_found(result)), None, asked),
        )

    def _reordered(self, result: Any, search: MemorySearch) -> Any:
        scope = current_scope()
        blocks = [memory_block(memory) for memory in found_memories(result)]
        request = ContextRequest(
            blocks,
            search.query,
            history=scope.history,
            conversation_id=scope.conversation_id,
            tenant=self.tenant_of(search),
        )
        plan = self.planner.plan(request, deduplicate=False)
        return result_in_order(result, blocks, plan)

    def without(
        self,
        ids: Iterable[str | int],
        history: Iterable[Message],
        scope: RequestScope,
    ) -> list[dict[str, Any]]:
        """Return messages of a conversation without the texts of memories, as copies.

        Raises:
            InvalidRequestError: wrong type.
        """
        gone = [checked_id("a memory's id", one) for one in checked_list("memory_ids", ids, "ids")]
        request = ContextRequest((), history=history, tenant=scope.tenant or "")
        messages, templates = request.history or (), self.planner.templates
        if scope.conversation_id is not None:
            messages = tuple(
                self.planner.without_blocks(messages, gone, scope.conversation_id, request.tenant)
            )
        named = {(type(one), one) for one in gone}
        texts = [
            block.text
            for block in self.known.standing_in(request.tenant, messages, templates)
            if (type(block.id), block.id) in named
        ]
        return without_memories(messages, texts, templates, are_marked=True)

    def _shown_memories(
        self, result: Any, search: MemorySearch, asked: ContextRequest
    ) -> ShownMemories:
        if not asked.history:
            return ShownMemories()
        request = replace(asked, tenant=self.tenant_of(search))
        found = map(memory_block, found_memories(result))
        return ShownMemories.of(self.planner, self.known, request, found)

    def _context(
        self, result: Any, search: MemorySearch, asked: ContextRequest, shown: ShownMemories
    ) -> MemoryContext:
        memories = list(map(memory_block, found_memories(result)))
        blocks = [*memories, *relation_blocks(result)]
        # texts, not mem0's `hash`: a hash that a store did not update would lose a memory
        unique = tuple(texts_to_show(blocks))
        outdated = shown.outdated(memories)
        request = replace(
            asked,
            blocks=unique,
            tenant=self.tenant_of(search),
            outdated=outdated,
            labels=self._labels,
        )
        if shown.blocks and self._grows_too_long(request, shown):
            texts = [block.text for block in shown.blocks]
            history = without_memories(request.history or (), texts, self.planner.templates)
            request = replace(request, history=tuple(history), outdated=())
        plan = self.planner.plan(request)
        if not self._annotates:
            plan = replace(plan, order_annotation=None)
        self.known.add(request.tenant, memories)
        text = plan.rendered(with_order=False)
        # a prompt may show other contexts, too, whose labels have to be others
        for tenant in {plan.request.tenant, current_scope().tenant or ""}:
            self._registry.remember_planned(text, tenant)
        return MemoryContext(text, plan.order_annotation, plan.request, plan)

    def _grows_too_long(self, request: ContextRequest, shown: ShownMemories) -> bool:
        """Return whether a prompt with all memories shown so far would be too long.

        It is compared with what it would be with this turn's memories alone.
        """
        if self._growth_limit is None:
            return False
        count = self.planner.count_tokens
        standing = {block.text for block in shown.blocks}
        found = {block.text for block in request.blocks}
        texts = [text for message in request.history or () for text in message_texts(message)]
        all_shown = sum(map(count, standing))
        said = sum(map(count, [request.system or "", request.query, *texts])) - all_shown
        with_all = said + all_shown + sum(map(count, found - standing))
        return with_all > self._growth_limit * (said + sum(map(count, found)))

    def tenant_of(self, search: MemorySearch) -> str:
        """Return the tenant of a search: the surrounding one, the wrapper's, or the filters'."""
        for tenant in (current_scope().tenant, self._tenant):
            if tenant is not None:
                return tenant
        return search.tenant


def asked(
    query: str, system: str | None, history: Any, conversation_id: str | int | None
) -> ContextRequest:
    """Return a request without its memories, which are searched for later.

    The surrounding `request_context` replaces None.

    Raises:
        InvalidRequestError: wrong type.
    """
    given = ContextRequest(
        (), query, system=system, history=history, conversation_id=conversation_id
    )
    scope = current_scope().inside(None, conversation_id, given.history)
    return replace(given, history=scope.history, conversation_id=scope.conversation_id)


def found_memories(result: Any) -> Sequence[MemoryRecord]:
    """Return the memories of a search, best first.

    Args:
        result: `{"results": [...]}`, or the list itself, as older hosted clients return it.

    Raises:
        InvalidRequestError: neither of these.
    """
    memories = result.get(_RESULTS) if isinstance(result, Mapping) else result
    if not isinstance(memories, list):
        raise InvalidRequestError(
            f"a search must return a dict with a list under 'results', or a list, not a "
            f"{type(result).__name__} with a {type(memories).__name__}"
        )
    return memories


def texts_as_found(result: Any) -> list[str]:
    """Return the texts in a result of any kind, without exact duplicates."""
    memories = result.get(_RESULTS) if isinstance(result, Mapping) else result
    found = memories if isinstance(memories, (list, tuple)) else ()
    texts = (memory.get("memory") for memory in found if isinstance(memory, Mapping))
    return list(dict.fromkeys(text for text in texts if isinstance(text, str)))


def memory_block(memory: MemoryRecord) -> ContextBlock:
    """Return a memory as a block: id and text together, so that an updated memory is another one.

    Raises:
        InvalidBlockError: no text, as when only some fields were asked for.
    """
    memory_id = memory.get("id")
    if memory_id is not None and not isinstance(memory_id, (str, int)):
        memory_id = str(memory_id)  # a UUID
    return ContextBlock(id=memory_id, text=memory.get("memory"))  # type: ignore[arg-type]


def relation_blocks(result: Any) -> list[ContextBlock]:
    """Return a graph memory's relations as one block, none if there are none.

    They are sorted, because their order means nothing, and the same ones are the same block then.
    """
    relations = result.get("relations") if isinstance(result, Mapping) else None
    lines: set[str] = set()
    for one in relations if isinstance(relations, (list, tuple)) else ():
        if isinstance(one, Mapping):
            end = one.get("destination", one.get("target"))
            words = [one.get("source"), one.get("relationship"), end]
            if all(isinstance(word, str) and word for word in words):
                lines.add(" -- ".join(map(str, words)))
    return [ContextBlock(text="\n".join(sorted(lines)))] if lines else []


def result_in_order(result: Any, blocks: Sequence[ContextBlock], plan: Plan) -> Any:
    """Return a search's result with its memories in the order of a plan, as copies.

    Args:
        result: What the search returned.
        blocks: A block for each of its memories.
        plan: Their plan, made with `deduplicate=False`.

    Returns:
        A dict has the plan, and each memory's rank and label, under one more key, "ctxreuse"; a
        list has no place for it.
    """
    found = found_memories(result)
    ranks: dict[BlockKey, list[int]] = {}
    for rank, block in enumerate(blocks):
        ranks.setdefault(block.key, []).append(rank)
    places: list[dict[str, Any]] = [
        {"id": part.block.id, "rank": rank, "label": part.label}
        for part in plan.parts
        if isinstance(part, SentBlock)
        for rank in ranks[part.block.key]
    ]
    assert len(places) == len(found)
    memories = [deepcopy(found[place["rank"]]) for place in places]
    if not isinstance(result, Mapping):
        return memories
    others = {name: deepcopy(value) for name, value in result.items() if name != _RESULTS}
    return {
        _RESULTS: memories,
        **others,
        METADATA_KEY: memories_metadata(plan, places),
    }


def _joined(texts: Iterable[str]) -> str:
    return DEFAULT_TEMPLATES.separator.join(text for text in texts if text)
