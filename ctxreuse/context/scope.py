"""Whose request is being served: set once by the application, read by every adapter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace

from ctxreuse.context.blocks import ContextRequest, Message


@dataclass(frozen=True, slots=True)
class RequestScope:
    """Tenant, conversation and history of the request at hand."""

    tenant: str | None = None
    conversation_id: str | int | None = None
    history: tuple[Message, ...] | None = None

    def inside(
        self,
        tenant: str | None = None,
        conversation_id: str | int | None = None,
        history: Iterable[Message] | None = None,
    ) -> RequestScope:
        """Return the scope with what is given replaced."""
        scope = self
        # another tenant's conversation is another one, and another one's history is not this one's
        if tenant is not None and tenant != scope.tenant:
            scope = replace(self, tenant=tenant) if self.tenant is None else RequestScope(tenant)
        if conversation_id is not None and conversation_id != scope.conversation_id:
            kept = scope.history if scope.conversation_id is None else None
            scope = replace(scope, conversation_id=conversation_id, history=kept)
        if history is not None:
            scope = replace(scope, history=tuple(history))
        return scope


NO_SCOPE = RequestScope()
"""The scope outside of every `request_context`."""
_current: ContextVar[RequestScope] = ContextVar("ctxreuse_request_scope", default=NO_SCOPE)


def current_scope() -> RequestScope:
    """Return the scope that the caller set."""
    return _current.get()


@contextmanager
def request_context(
    tenant: str | None = None,
    conversation_id: str | int | None = None,
    history: Iterable[Message] | None = None,
) -> Iterator[RequestScope]:
    """Say whose request the code inside serves; adapters read it, a ContextRequest does not.

    Works across `await`, and in threads that copy the context (`asyncio.to_thread`, LangChain's and
    LlamaIndex's executors). An inner one inherits what it does not set, but nothing from another
    tenant or conversation.

    Args:
        tenant: Requests of different tenants never influence each other's order.
        conversation_id: Names the conversation within the tenant.
        history: The chat messages that will be sent before this turn, without the system message.
            With it, blocks that the conversation shows already can be left out.

    Raises:
        InvalidRequestError: wrong type.

    Example:
        >>> with request_context(tenant="acme", conversation_id="c1") as scope:
        ...     scope.tenant
        'acme'
    """
    checked = ContextRequest(
        (),
        tenant="" if tenant is None else tenant,
        conversation_id=conversation_id,
        history=history,
    )
    with serving(RequestScope(tenant, conversation_id, checked.history)) as scope:
        yield scope


@contextmanager
def serving(scope: RequestScope) -> Iterator[RequestScope]:
    """Do what `request_context` does with a scope that is checked already."""
    inside = _current.get().inside(scope.tenant, scope.conversation_id, scope.history)
    token = _current.set(inside)
    try:
        yield inside
    finally:
        with suppress(ValueError):  # a generator closed from a context where nothing was set
            _current.reset(token)
