"""What `invoke` and its relatives know of a call, kept for `_generate`, which is not told."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

from ctxreuse.request_scope import RequestScope
from langchain_ctxreuse.turns import Turn

_Step = TypeVar("_Step")


@dataclass(frozen=True, slots=True)
class Held:
    """Whose call it is, and its turn in a batch.

    Attributes:
        scope: What config and context say of the request.
        turn: The turn that a batch has handed over.
    """

    scope: RequestScope
    turn: Turn | None = None


_held: ContextVar[Held | None] = ContextVar("langchain_ctxreuse_held", default=None)


def held() -> Held | None:
    """Return what the call around this code knows."""
    return _held.get()


@contextmanager
def holding(known: Held) -> Iterator[None]:
    """Keep what is known for the code inside."""
    token = _held.set(known)
    try:
        yield
    finally:
        _held.reset(token)


def held_in_steps(known: Held, steps: Iterator[_Step]) -> Iterator[_Step]:
    """Yield what a generator yields; the caller's context never shows what is held inside."""
    try:
        while True:
            with holding(known):
                try:
                    step = next(steps)
                except StopIteration:
                    return
            yield step
    finally:
        if isinstance(steps, Generator):
            with holding(known):
                steps.close()


async def aheld_in_steps(known: Held, steps: AsyncIterator[_Step]) -> AsyncIterator[_Step]:
    """Yield what an async generator yields, as `held_in_steps` does."""
    try:
        while True:
            with holding(known):
                try:
                    step = await anext(steps)
                except StopAsyncIteration:
                    return
            yield step
    finally:
        if isinstance(steps, AsyncGenerator):
            with holding(known):
                await steps.aclose()
