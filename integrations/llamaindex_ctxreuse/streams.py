"""Streams that say when they were dropped before anybody asked for a piece.

A generator whose first piece nobody asks for runs none of its code, not even when it is closed.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from typing import Any, TypeVar
from weakref import finalize

_Piece = TypeVar("_Piece")


class _Beginning:
    """Knows whether a stream has begun.

    Args:
        stream: The stream.
        dropped: Called when it is collected as garbage before it began; that can happen in any
            thread and in the middle of anything, so this may take no lock. It must not refer to the
            stream.
    """

    def __init__(self, stream: object, dropped: Callable[[], None]) -> None:
        self._finalizer = finalize(stream, dropped)
        self._finalizer.atexit = False

    def is_now(self) -> bool:
        """Return whether this is the first thing that happens to the stream."""
        return self._finalizer.detach() is not None


class Stream(Generator[_Piece, None, None]):
    """The pieces of an answer, as they come.

    Args:
        pieces: The pieces.
        closed: Called when the stream is closed before it began.
        dropped: Called, without any lock, when it is dropped before it began.
    """

    def __init__(
        self,
        pieces: Generator[_Piece, None, None],
        closed: Callable[[], None],
        dropped: Callable[[], None],
    ) -> None:
        self._pieces = pieces
        self._closed = closed
        self._beginning = _Beginning(self, dropped)

    def send(self, value: None) -> _Piece:
        """Return the next piece."""
        self._beginning.is_now()
        return self._pieces.send(value)

    def throw(self, *raised: Any) -> _Piece:
        """Raise an error where the stream stands."""
        if self._beginning.is_now():
            self._closed()
        return self._pieces.throw(*raised)

    def close(self) -> None:
        """End the stream."""
        if self._beginning.is_now():
            self._closed()
        self._pieces.close()


class AsyncStream(AsyncGenerator[_Piece, None]):
    """The pieces of an answer, as they come.

    Args:
        pieces: The pieces.
        closed: Awaited when the stream is closed before it began.
        dropped: Called, without any lock, when it is dropped before it began.
    """

    def __init__(
        self,
        pieces: AsyncGenerator[_Piece, None],
        closed: Callable[[], Awaitable[None]],
        dropped: Callable[[], None],
    ) -> None:
        self._pieces = pieces
        self._closed = closed
        self._beginning = _Beginning(self, dropped)

    async def asend(self, value: None) -> _Piece:
        """Return the next piece."""
        self._beginning.is_now()
        return await self._pieces.asend(value)

    async def athrow(self, *raised: Any) -> _Piece:
        """Raise an error where the stream stands."""
        if self._beginning.is_now():
            await self._closed()
        return await self._pieces.athrow(*raised)

    async def aclose(self) -> None:
        """End the stream."""
        if self._beginning.is_now():
            await self._closed()
        await self._pieces.aclose()
