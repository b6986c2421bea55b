"""Whose request a call is: `invoke` and its relatives know it, `_generate` is not told."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TypeVar

from ctxreuse.context.scope import RequestScope

_Step = TypeVar("_Step")

_held: ContextVar[RequestScope | None] = ContextVar("langchain_ctxreuse_scope", default=None)


def held_scope() -> RequestScope | None:
    """Return whose request the call around this code is; None outside of a call."""
    return _held.get()


@contextmanager
def holding(scope: RequestScope) -> Iterator[None]:
    """Hold a scope for the code inside."""
    token = _held.set(scope)
    try:
        yield
    finally:
        with suppress(ValueError):  # closed from another context, which never held it
            _held.reset(token)


def held_in_steps(scope: RequestScope, steps: Iterator[_Step]) -> Iterator[_Step]:
    """Yield what a generator yields; the listener's context never shows the scope held inside."""
    try:
        while True:
            with holding(scope):
                try:
                    step = next(steps)
                except StopIteration:
                    return
            yield step
    finally:
        if isinstance(steps, Generator):
            with holding(scope):
                steps.close()


async def aheld_in_steps(scope: RequestScope, steps: AsyncIterator[_Step]) -> AsyncIterator[_Step]:
    """Yield what an async generator yields, as `held_in_steps` does."""
    try:
        while True:
            with holding(scope):
                try:
                    step = await anext(steps)
                except StopAsyncIteration:
                    return
            yield step
    finally:
        if isinstance(steps, AsyncGenerator):
            with holding(scope):
                await steps.aclose()
