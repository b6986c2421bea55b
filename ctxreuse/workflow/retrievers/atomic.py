"""Atomic retrieval stages: the blocks of a query, found in one call."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

from ctxreuse.context.blocks import ContextBlock
from ctxreuse.errors import InvalidRequestError, describe

Found: TypeAlias = Sequence[ContextBlock | str]
"""The result of a user's search, best first."""


@runtime_checkable
class Retriever(Protocol):
    """A search that is one stage, without partial results."""

    async def retrieve(self, query: str, k: int) -> Sequence[ContextBlock]:
        """Return the k blocks that fit a query best, best first; fewer where there are no more."""


class CallableRetriever:
    """A retriever made of a function.

    Args:
        search: From a query and k to blocks or texts, best first. An async function runs in the
            event loop, any other one in threads, several calls at a time; a thread cannot be
            stopped, so the search of a cancelled stage runs to its end.

    Raises:
        InvalidRequestError: wrong type.

    Example:
        >>> retriever = CallableRetriever(lambda query, k: ["one text", "another"][:k])
        >>> [block.text for block in asyncio.run(retriever.retrieve("Which?", 1))]
        ['one text']
    """

    def __init__(self, search: Callable[[str, int], Found | Awaitable[Found]]) -> None:
        if not callable(search):
            raise InvalidRequestError(
                f"search must be a function of a query and k, not {describe(search)}"
            )
        self._search: Callable[[str, int], Any] = search
        self._is_async = _is_async(search)

    async def retrieve(self, query: str, k: int) -> tuple[ContextBlock, ...]:
        """Return the first k blocks that the function finds.

        Raises:
            InvalidRequestError: The function does not return blocks or texts.
        """
        if self._is_async:
            found = await self._search(query, k)
        else:
            found = await asyncio.to_thread(self._search, query, k)
            if inspect.isawaitable(found):  # a lambda around an async function
                found = await found
        return found_blocks(found, k, "search")


def checked_retriever(retriever: object, name: str = "retriever") -> Retriever:
    """Return the argument if it is a retriever.

    Args:
        retriever: The argument.
        name: Its name, for the error.

    Raises:
        InvalidRequestError: wrong type.
    """
    if isinstance(retriever, type) or not isinstance(retriever, Retriever):
        raise InvalidRequestError(
            f"{name} must have retrieve(query, k), not be {describe(retriever)}; wrap a function "
            "in CallableRetriever, a LangChain or LlamaIndex retriever in its RetrieverStage"
        )
    if not _is_async(retriever.retrieve):
        raise InvalidRequestError(
            f"retrieve of {name} ({type(retriever).__name__}) must be an async function; wrap it: "
            "CallableRetriever(it.retrieve)"
        )
    return retriever


def found_blocks(found: object, k: int, finder: str) -> tuple[ContextBlock, ...]:
    """Return the first k findings, as blocks.

    Args:
        found: Blocks or texts.
        k: How many are wanted.
        finder: The name of the search, for the error.

    Raises:
        InvalidRequestError: neither blocks nor texts; the message holds no text of the findings.
    """
    if isinstance(found, (str, bytes)) or not isinstance(found, Sequence):
        raise InvalidRequestError(
            f"{finder} must return a list of ContextBlock or str, not {type(found).__name__}"
        )
    for one in found:
        if not isinstance(one, (ContextBlock, str)):
            raise InvalidRequestError(
                f"{finder} must return a list of ContextBlock or str, not one with "
                f"{type(one).__name__} in it"
            )
    return tuple(
        one if isinstance(one, ContextBlock) else ContextBlock(text=one) for one in found[:k]
    )


def _is_async(function: object) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  # an object's method, not a question
    )
