"""Plans the results of searches, for the sync and the async wrapper."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ctxreuse import ContextRequest, ReusePlanner
from ctxreuse.adapters.memory_owners import ENTITIES, tenant_of
from ctxreuse.adapters.prompt_planner import planner_or_new
from ctxreuse.context.blocks import distinct_texts
from ctxreuse.context.fail_open import FailOpen
from ctxreuse.context.scope import current_scope
from mem0_ctxreuse.memory_results import (
    MemoryContext,
    found_memories,
    memory_block,
    plain_context,
    planned_context,
    result_in_order,
    texts_as_found,
)


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
        arguments = self._named_arguments()
        options = arguments.get("options")
        if options is not None and "filters" not in arguments:
            given = options if isinstance(options, Mapping) else vars(options)
            arguments["filters"] = given.get("filters")
        ids = {name: arguments[name] for name in ENTITIES if name in arguments}
        return tenant_of(arguments.get("filters"), **ids)

    def _named_arguments(self) -> dict[str, Any]:
        if not self.args:
            return dict(self.kwargs)
        signature = inspect.signature(self.method)
        bound = signature.bind(self.query, *self.args, **self.kwargs).arguments
        for parameter in signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                bound.update(bound.pop(parameter.name, {}))
        return dict(bound)


class MemoryPlanner:
    """Plans the results of searches; an internal error lets the memories through as found.

    Args:
        planner: Plans the contexts; None makes a new one.
        tenant: The tenant of the requests; None takes that of each search's filters.
        component: The wrapper's name, for the log.

    Raises:
        InvalidRequestError: wrong type.
    """

    def __init__(self, planner: ReusePlanner | None, tenant: str | None, component: str) -> None:
        self.planner = planner_or_new(planner)
        self._tenant = None if tenant is None else ContextRequest((), tenant=tenant).tenant
        self._fail_open = FailOpen(component, "memories go through as retrieved")

    @property
    def faults(self) -> int:
        """How often planning has failed."""
        return self._fail_open.faults

    def reordered(self, result: Any, search: MemorySearch) -> Any:
        """Return a search's result in planned order, its memories copied and none left out."""
        return self._fail_open.attempt(lambda: self._reordered(result, search), lambda: result)

    def context(self, result: Any, search: MemorySearch, asked: ContextRequest) -> MemoryContext:
        """Return a search's memories as text.

        Args:
            result: What the search returned.
            search: The search.
            asked: The request without its blocks and its tenant, as `asked` made it.
        """
        return self._fail_open.attempt(
            lambda: self._context(result, search, asked),
            lambda: plain_context(texts_as_found(result), asked),
        )

    def _reordered(self, result: Any, search: MemorySearch) -> Any:
        scope = current_scope()
        blocks = [memory_block(memory) for memory in found_memories(result)]
        request = ContextRequest(
            blocks,
            search.query,
            history=scope.history,
            conversation_id=scope.conversation_id,
            tenant=self._tenant_of(search),
        )
        plan = self.planner.plan(request, deduplicate=False)
        return result_in_order(result, blocks, plan)

    def _context(self, result: Any, search: MemorySearch, asked: ContextRequest) -> MemoryContext:
        blocks = [memory_block(memory) for memory in found_memories(result)]
        # texts, not mem0's `hash`: a hash that a store did not update would lose a memory
        unique = tuple(distinct_texts(blocks))
        request = replace(asked, blocks=unique, tenant=self._tenant_of(search))
        return planned_context(self.planner.plan(request))

    def _tenant_of(self, search: MemorySearch) -> str:
        for tenant in (current_scope().tenant, self._tenant):
            if tenant is not None:
                return tenant
        return search.tenant


def asked(
    query: str,
    system: str | None,
    history: Any,
    conversation_id: str | int | None,
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
