"""From a search's result to the planned one: what the sync and the async wrapper share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ctxreuse import ContextRequest, ReusePlanner
from ctxreuse.adapters.prompt_planner import planner_or_new
from ctxreuse.context.blocks import distinct_texts
from ctxreuse.context.fail_open import FailOpen
from ctxreuse.context.scope import RequestScope, current_scope
from mem0_ctxreuse.memories import (
    found_memories,
    memory_block,
    placed_memories,
    result_in_order,
)
from mem0_ctxreuse.ownership import tenant_of_call
from mem0_ctxreuse.rendering import MemoryContext, plain_context, planned_context


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
        """Return what the method does; errors are the caller's."""
        return self.method(self.query, *self.args, **self.kwargs)


class MemoryPlanner:
    """Plans what searches find. A fault in here lets the memories through as they were found.

    Args:
        planner: Plans the contexts.
        tenant: Whose requests they are; None leaves it to what each search filters by.
        component: The wrapper's name, for the log.

    Raises:
        InvalidRequestError: If the planner is none, or the tenant is no string.
    """

    def __init__(self, planner: ReusePlanner, tenant: str | None, component: str) -> None:
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
            asked: The request but for its blocks and its tenant, as `asked` made it.
        """
        return self._fail_open.attempt(
            lambda: self._context(result, search, asked),
            lambda: plain_context(_texts_as_found(result), asked),
        )

    def _reordered(self, result: Any, search: MemorySearch) -> Any:
        scope = current_scope()
        memories = found_memories(result)
        blocks = [memory_block(memory) for memory in memories]
        request = ContextRequest(
            blocks,
            search.query,
            history=scope.history,
            conversation_id=scope.conversation_id,
            tenant=self._tenant_of(search),
        )
        plan = self.planner.plan(request, deduplicate=False)
        return result_in_order(result, placed_memories(memories, blocks, plan), plan)

    def _context(self, result: Any, search: MemorySearch, asked: ContextRequest) -> MemoryContext:
        blocks = [memory_block(memory) for memory in found_memories(result)]
        request = ContextRequest(
            # texts, not mem0's `hash`: one that a store did not keep up to date loses no memory
            distinct_texts(blocks),
            asked.query,
            system=asked.system,
            history=asked.history,
            conversation_id=asked.conversation_id,
            tenant=self._tenant_of(search),
        )
        return planned_context(self.planner.plan(request))

    def _tenant_of(self, search: MemorySearch) -> str:
        for tenant in (current_scope().tenant, self._tenant):
            if tenant is not None:
                return tenant
        return tenant_of_call(search.method, search.query, search.args, search.kwargs)


def asked(
    query: str,
    system: str | None,
    history: Any,
    conversation_id: str | int | None,
) -> ContextRequest:
    """Return a request without its memories, for they are yet to be searched.

    What is None comes from the surrounding `request_context`.

    Raises:
        InvalidRequestError: If an argument is of the wrong kind.
    """
    given = ContextRequest(
        (), query, system=system, history=history, conversation_id=conversation_id
    )
    scope: RequestScope = current_scope().inside(None, conversation_id, given.history)
    return ContextRequest(
        (),
        query,
        system=system,
        history=scope.history,
        conversation_id=scope.conversation_id,
    )


def _texts_as_found(result: Any) -> list[str]:
    """Return the texts that a result holds, whatever it is, without exact duplicates."""
    memories = result.get("results") if isinstance(result, Mapping) else result
    found = memories if isinstance(memories, (list, tuple)) else ()
    texts = (memory.get("memory") for memory in found if isinstance(memory, Mapping))
    return list(dict.fromkeys(text for text in texts if isinstance(text, str)))
