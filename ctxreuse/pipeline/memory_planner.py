"""Plans the results of memory searches, and puts them into prompts, for wrappers of any store."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias
from uuid import UUID

from ctxreuse.context.blocks import (
    ContextBlock,
    ContextRequest,
    Message,
    OpenAIMessage,
    texts_to_show,
)
from ctxreuse.context.checks import checked_id, checked_kind, checked_list
from ctxreuse.context.content_parts import ContentPart
from ctxreuse.context.fail_open import FailOpen
from ctxreuse.context.rendering import DEFAULT_TEMPLATES, message_texts, render_messages
from ctxreuse.context.scope import RequestScope, current_scope
from ctxreuse.errors import InvalidRequestError
from ctxreuse.pipeline.document_turn import DocumentPlanner, ItemKind, RetrievedItems
from ctxreuse.pipeline.engine_options import planner_for, planning_time
from ctxreuse.pipeline.memories import (
    ENTITIES,
    Placement,
    ShownMemories,
    checked_growth_limit,
    checked_placement,
    is_too_long,
    note_memories,
    standing_memories,
    store_name,
    tenant_of,
    without_memories,
)
from ctxreuse.pipeline.prompt_turn import note_planned
from ctxreuse.planner import ReusePlanner
from ctxreuse.planning.plan import Plan
from ctxreuse.rules.cache_rules import DEFAULT_CACHE
from ctxreuse.rules.prompt_forms import PromptForm, prompt_body

MemoryRecord: TypeAlias = Mapping[str, Any]
"""One memory: `id`, `memory` (its text), and other fields of mem0."""

_RESULTS = "results"
_ESTIMATED = 1.05
"""Estimates of memories, full of names and dates, are too low by some percent of a prompt."""


@dataclass(frozen=True, slots=True)
class MemoryContext:
    """The memories found for a question, as text; `str()` of it is text, then annotation.

    Attributes:
        text: The memories in planned order; of what the conversation shows already, its place
            there.
        annotation: The order in which mem0 ranked them, in words; None if the text has that order.
        request: System text, history, question, and the planned memories, exact duplicates once.
        plan: The plan, with `labels`; None where planning failed and the text is as mem0 ranked it.
        placement: Where `messages` puts this turn's memories; "system" in no later turn.
        opens: Whether they stand where a first turn has them, and the conversation behind.
    """

    text: str
    annotation: str | None
    request: ContextRequest
    plan: Plan | None = None
    placement: Placement = "before_question"
    opens: bool = False

    def __str__(self) -> str:
        return self.text if self.plan is None else self.plan.rendered()

    def messages(self) -> list[OpenAIMessage]:
        """Return OpenAI chat messages: system text, history, question, and memories."""
        shown, system, separator = str(self), self.request.system, DEFAULT_TEMPLATES.separator
        turn = separator.join(filter(None, (self.text, self.request.query)))
        if self.plan is not None:
            turn, separator = self.plan.content, self.plan.templates.separator
        if shown and self.placement == "system":
            system = separator.join(filter(None, (system, shown)))
        return self._laid_out(shown, turn, system)

    def _laid_out(self, shown: Any, turn: Any, system: Any) -> list[dict[str, Any]]:
        """Return the messages with contents that show memories, and these and the question."""
        *before, asking = render_messages(None, self.request.history, self.request.query)
        behind: list[dict[str, Any]] = []
        if self.opens:
            asking, *behind = *before, asking
            before = []
        if shown and self.placement == "before_question":
            asking["content"] = turn
        elif shown and self.placement == "after_history":
            before.append({"role": "user", "content": shown})
        if system is not None:
            before.insert(0, {"role": "system", "content": system})
        return [*before, asking, *behind]

    def body(
        self, form: PromptForm = "openai", *, citations: bool = False, tools: Sequence[Any] = ()
    ) -> dict[str, Any]:
        """Return the fields of a request that carry the prompt, with content parts and marks.

        They say what `messages` says; see `Plan.body`. Without a plan nothing is cut.
        """
        plan = self.plan
        if plan is None:
            return prompt_body(self.messages(), DEFAULT_CACHE, form, tools, citations=citations)
        if not self.opens and (self.placement == "before_question" or not str(self)):
            return plan.body(form, citations=citations, tools=tools)
        system, shown = self.request.system, plan.content_parts("")
        opening = [ContentPart(system, is_marked=0 in plan.marks)] if system else []
        if shown and self.placement == "system":
            between = plan.templates.separator if opening else ""
            opening += [shown[0]._replace(text=between + shown[0].text), *shown[1:]]
        messages = self._laid_out(shown, plan.content_parts(), opening or None)
        if self.opens and plan.cache.marks:  # the next turn begins with this one
            messages[-1]["content"] = [ContentPart(self.request.query, is_marked=True)]
        key = plan.prompt_cache_key
        return prompt_body(messages, plan.cache, form, tools, citations=citations, key=key)


@dataclass(frozen=True, slots=True)
class MemorySearch:
    """A call of a memory's `search`."""

    method: Callable[..., Any]
    query: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

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
    """Plans the results of searches; an internal error lets the memories through as found."""

    def __init__(
        self,
        planner: ReusePlanner | None,
        tenant: str | None,
        component: str,
        labels: bool,
        annotate: bool,
        growth_limit: float | None,
        placement: Placement,
        store: object,
        kind: ItemKind[Any] | None = None,  # of what a search finds; None: mem0's memories
    ) -> None:
        self.planner = planner_for(planner)
        self._labels = checked_kind("labels", labels, bool, "True or False")
        self._annotates = checked_kind("annotate", annotate, bool, "True or False")
        limit = checked_growth_limit(growth_limit)
        self._growth_limit = None if self.planner.mode == "shadow" else limit
        self._placement = checked_placement(placement)
        self._tenant = None if tenant is None else ContextRequest((), tenant=tenant).tenant
        self.fail_open = FailOpen(
            component, "memories go through as retrieved", tell=self.planner.note_failure
        )
        self._store = store_name(store)
        self._searches = DocumentPlanner(
            self.planner, kind or _MEMORIES, component, fail_open=self.fail_open
        )

    def reordered(self, result: Any, search: MemorySearch) -> Any:
        """Return a search's result with its memories in planned order, none left out."""
        try:
            found = found_memories(result)
            scope = RequestScope(self.tenant_of(search))
            shown_to = current_scope().tenant or ""
            retrieved = RetrievedItems(found, search.query, scope, shown_to=shown_to)
            [memories] = self._searches.plan_batch([retrieved])
            if list(map(id, memories)) == list(map(id, found)):
                return result
            return {**result, _RESULTS: memories} if isinstance(result, Mapping) else memories
        except Exception as error:
            self.fail_open.note(error)
            return result

    def context(
        self, found: Any, search: MemorySearch, asked: ContextRequest, get: Any
    ) -> MemoryContext:
        """Return what a search found as text; `get` finds what earlier messages show by its id."""
        shown = self._shown(found, search, asked)
        for memory_id in shown.to_look_up if callable(get) else ():
            try:
                shown.note(memory_id, get(memory_id))
            except Exception as error:
                shown.note_error(memory_id, error, self.fail_open)
        return self._as_text(found, search, asked, shown)

    async def acontext(
        self, found: Any, search: MemorySearch, asked: ContextRequest, get: Any
    ) -> MemoryContext:
        """Do what `context` does, with a `get` that may be awaited, all at once."""
        shown = self._shown(found, search, asked)

        async def look_up(memory_id: Any) -> None:
            try:
                stored = get(memory_id)
                shown.note(memory_id, await stored if inspect.isawaitable(stored) else stored)
            except Exception as error:
                shown.note_error(memory_id, error, self.fail_open)

        if callable(get):
            await asyncio.gather(*map(look_up, shown.to_look_up))
        return self._as_text(found, search, asked, shown)

    def _as_text(
        self, found: Any, search: MemorySearch, asked: ContextRequest, shown: ShownMemories
    ) -> MemoryContext:
        opened = self._opened(asked)
        return self.fail_open.attempt(
            lambda: self._context(found, search, opened, shown),
            # without labels, because earlier turns may use these
            lambda: MemoryContext(
                DEFAULT_TEMPLATES.separator.join(filter(None, texts_as_found(found))),
                None,
                opened,
                placement=self._placement_in(opened),
            ),
        )

    def _shown(self, result: Any, search: MemorySearch, asked: ContextRequest) -> ShownMemories:
        if not asked.history:
            return ShownMemories()
        return self.fail_open.attempt(
            lambda: ShownMemories.of(
                self._store,
                self.planner,
                replace(asked, tenant=self.tenant_of(search)),
                map(memory_block, found_memories(result)),
            ),
            ShownMemories,
        )

    def _opened(self, asked: ContextRequest) -> ContextRequest:
        """Return a request whose system text stands once: as `system`, or in the history."""
        history = asked.history or ()
        opening = _system_text(history)
        if self._placement != "system" or opening is None:
            return asked
        if len(history) == 1 and asked.system is None:
            return replace(asked, system=opening, history=())
        said = f"{asked.system}{self.planner.templates.separator}"
        is_said = asked.system is not None and opening.startswith(said)
        return replace(asked, system=None) if is_said else asked

    def _placement_in(self, request: ContextRequest, *, anew: bool = False) -> Placement:
        """Return where this turn's memories stand; what was sent already keeps its place."""
        if self._placement == "system" and request.history and not anew:
            return "before_question"
        return self._placement

    def without(
        self, ids: Iterable[str | int], history: Iterable[Message], scope: RequestScope
    ) -> list[dict[str, Any]]:
        """Return messages of a conversation without the texts of memories, as copies."""
        gone = [checked_id("a memory's id", one) for one in checked_list("memory_ids", ids, "ids")]
        request = ContextRequest((), history=history, tenant=scope.tenant or "")
        messages: list[Any] = list(request.history or ())
        if (conversation := scope.conversation_id) is not None:
            messages = self.planner.without_blocks(messages, gone, conversation, request.tenant)
        named = {(type(one), one) for one in gone}
        standing = standing_memories(self._store, request.tenant, messages)
        texts = [block.text for block in standing if (type(block.id), block.id) in named]
        return without_memories(messages, texts, self.planner.templates, are_marked=True)

    def _context(
        self, result: Any, search: MemorySearch, asked: ContextRequest, shown: ShownMemories
    ) -> MemoryContext:
        memories = list(map(memory_block, found_memories(result)))
        # texts, not mem0's `hash`: a hash that a store did not update would lose a memory
        unique = tuple(texts_to_show(memories))
        gone, tenant = shown.outdated(memories), self.tenant_of(search)
        request = replace(asked, blocks=unique, tenant=tenant, outdated=gone, labels=self._labels)
        may_be_anew = shown.blocks and self._growth_limit is not None
        anew = self._laid_out_anew(request, shown) if may_be_anew else request
        is_anew = self._is_too_long(request, anew, shown)
        request = anew if is_anew else request
        placement = self._placement_in(request, anew=is_anew)
        planned = request
        if placement == "system" and request.blocks:  # other bytes than before a user's message
            opening = f"{request.system or ''}{self.planner.templates.separator}"
            planned = replace(request, system=opening)
        first = self._first_turn(planned, placement) if is_anew else None
        planned = first or planned
        plan = self.planner.plan(planned, **planning_time(self.planner))
        if not self._annotates:
            plan = plan.with_order_annotation(None)
        note_memories(self._store, request.tenant, memories, self.planner.templates)
        text = plan.rendered(with_order=False)
        context = MemoryContext(
            text, plan.order_annotation, request, plan, placement, first is not None
        )
        self._note_planned(context, plan)
        return context

    @staticmethod
    def _note_planned(shown: MemoryContext, plan: Plan) -> None:
        """Have the message that shows memories sent as it is, by whatever wraps the model."""
        memories = str(shown)
        for message in shown.messages() if memories else ():
            for text in message_texts(message):
                if memories in text:
                    for tenant in {plan.request.tenant, current_scope().tenant or ""}:
                        note_planned(tenant, message["role"], text, plan)

    def _laid_out_anew(self, request: ContextRequest, shown: ShownMemories) -> ContextRequest:
        """Return a turn whose history shows no memories, so that it shows all that it has found."""
        texts = [block.text for block in shown.blocks]
        before = request.history or ()
        history = without_memories(before, texts, self.planner.templates)
        if self._placement == "after_history":  # nothing is left of messages of memories alone
            history = [
                one
                for one, was in zip(history, before, strict=True)
                if one == was or one["content"]
            ]
        system, opening = request.system, _system_text(history)
        if system is None and opening is not None:
            system, history = opening or None, history[1:]
        return replace(request, system=system, history=tuple(history), outdated=())

    def _first_turn(self, request: ContextRequest, placement: Placement) -> ContextRequest | None:
        """Return the first turn of a conversation whose memories are laid out anew in it."""
        said = request.history
        if not said or not request.blocks:
            return None
        if placement == "system":
            return replace(request, history=None)
        opening = said[0].get("content")
        if said[0].get("role") != "user" or not isinstance(opening, str):
            return None
        first = replace(request, query=opening, history=None)
        texts = [text for message in said for text in message_texts(message)]
        found = self.planner.cached_tokens(first)
        # what is found in front has to outweigh what was said since, which is computed anew
        return first if found > sum(map(self.planner.count_tokens, texts)) else None

    def _is_too_long(
        self, request: ContextRequest, anew: ContextRequest, shown: ShownMemories
    ) -> bool:
        if anew is request:
            return False
        standing = {block.text for block in shown.blocks}
        found = {block.text for block in request.blocks}
        alone = self._tokens(anew, found)
        tokens = self._tokens(request, found - standing)
        if self._labels:  # of new memories, and in the line that names the others
            tokens += len(found) * self.planner.templates.label_tokens
        return is_too_long(tokens * _ESTIMATED, alone, self._growth_limit)

    def _tokens(self, request: ContextRequest, memories: Collection[str]) -> int:
        """Return about how many tokens a prompt has that shows some memories in this turn."""
        said = (text for message in request.history or () for text in message_texts(message))
        texts = [request.system or "", request.query, *said, *memories]
        return sum(map(self.planner.count_tokens, texts)) + len(memories)  # and what is between

    def tenant_of(self, search: MemorySearch) -> str:
        """Return the tenant of a search: the surrounding one, the wrapper's, or the filters'."""
        for tenant in (current_scope().tenant, self._tenant):
            if tenant is not None:
                return tenant
        return search.tenant


class PlansMemories:
    """A wrapper of a store of memories; what it does not define is the store's."""

    _memory: Any
    _memory_planner: MemoryPlanner

    def __getattr__(self, name: str) -> Any:
        # copying and unpickling ask for these before there is a store
        if name in ("_memory", "_memory_planner") or (name[:2] == name[-2:] == "__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._memory, name)

    @property
    def planner(self) -> ReusePlanner:
        """Plans the contexts; it has to learn what the engine evicts."""
        return self._memory_planner.planner

    @property
    def faults(self) -> int:
        """How often planning has failed and memories went through as they were found."""
        return self._memory_planner.fail_open.faults


def asked(
    query: str, system: str | None, history: Any, conversation_id: str | int | None
) -> ContextRequest:
    """Return a request without its memories, which are searched for later."""
    given = ContextRequest(
        (), query, system=system, history=history, conversation_id=conversation_id
    )
    scope = current_scope().inside(None, conversation_id, given.history)
    return replace(given, history=scope.history, conversation_id=scope.conversation_id)


def _system_text(history: Sequence[Message]) -> str | None:
    """Return the text of the system message that a history begins with; None if it has none."""
    if not history or history[0].get("role") != "system":
        return None
    content = history[0].get("content")
    return content if isinstance(content, str) else None


def found_memories(result: Any) -> Sequence[MemoryRecord]:
    """Return the memories of a search, best first."""
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
    """Return a memory as a block; an updated memory is another block."""
    memory_id = memory.get("id")
    if not isinstance(memory_id, (str, int)):  # without an id, the block's is of its text
        memory_id = str(memory_id) if isinstance(memory_id, UUID) else None
    return ContextBlock(id=memory_id, text=memory.get("memory"))  # type: ignore[arg-type]


# functions by name, for what has them is copied and pickled
def _found_block(memory: MemoryRecord) -> ContextBlock:
    return ContextBlock(text=memory["memory"])


def _found_forms(memories: Sequence[MemoryRecord]) -> list[list[str]]:
    return [texts_as_found(memories)]


_MEMORIES: ItemKind[Any] = ItemKind(_found_block, _found_forms)
