"""Calls everything that is public with anything, and with good arguments between the bad ones."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from functools import cache
from itertools import islice
from random import Random
from typing import Any

import openai
import pydantic
from langgraph.store.base import InvalidNamespaceError

from ctxreuse.errors import CtxreuseError, InvalidRequestError
from fuzz_targets.genuine import OBJECTS, VALID, key_of
from fuzz_targets.mutation import Target, UsersError, hostile, junk, scalar
from fuzz_targets.public_names import calls, reason

_FRAMEWORKS = (pydantic.ValidationError, openai.OpenAIError, InvalidNamespaceError)
_CLOSES_AFTER_S = 20.0
_LEFT_OUT = {
    "stemmer": "a function that is called at once, and whose errors are the user's",
    "config": "LangChain's own; any runnable raises the same",
}
_NEEDED = ("input", "llm")  # without one, a framework looks for a default
_TAKES_MORE = ("ctxreuse.serving", "mem0_ctxreuse")  # others hand what is left to a framework
_VARIES = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_WRITTEN = ("folder", "path", "output")


@cache
def called() -> dict[str, tuple[type | None, Callable[..., Any]]]:
    """Return what is called, by name: the class of the object that it needs, and the function."""
    return {name: (owner, call) for name, owner, call in calls() if reason(name) is None}


def _input(source: Random) -> tuple[str, dict[str, Any]]:
    name = source.choice(list(called()))
    owner, function = called()[name]
    arguments: dict[str, Any] = {}
    good = source.choice((0.0, 0.5, 0.8, 1.0))
    for parameter in list(inspect.signature(function).parameters.values())[owner is not None :]:
        if parameter.kind is parameter.VAR_POSITIONAL or parameter.name in _LEFT_OUT:
            continue
        if parameter.kind is parameter.VAR_KEYWORD:
            if name.startswith(_TAKES_MORE) and source.random() < 0.2:
                arguments[source.choice(("max_tokens", "stop", "extra_body", "user_id"))] = _value(
                    source
                )
        elif (
            parameter.name in _NEEDED
            or parameter.default is parameter.empty
            or source.random() < 0.5
        ):
            arguments[parameter.name] = _argument(name, parameter.name, source, good)
    return name, arguments


def genuine_arguments(
    name: str, owner: type | None, function: Callable[..., Any]
) -> dict[str, Any] | None:
    """Return good arguments for all that a call needs; None where there is none for one of them."""
    parameters = list(inspect.signature(function).parameters.values())[owner is not None :]
    needed = [one.name for one in parameters if one.kind not in _VARIES and _is_needed(one)]
    if any(key_of(name, one) is None for one in needed):
        return None
    return {one: _Good(name, one) for one in needed}


def _is_needed(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty or parameter.name in _NEEDED


def _argument(call: str, name: str, source: Random, good: float) -> Any:
    value = _value(source)
    is_default = value is None and name in _NEEDED
    if key_of(call, name) is not None and (is_default or source.random() < good):
        return _Good(call, name)
    if name in _WRITTEN and isinstance(value, str):
        return value.replace("/", "_").replace("..", "_")  # what is written stays where it may be
    return value


class _Good:
    """A good argument, by its name, so that an input can be shown and made again."""

    def __init__(self, call: str, name: str) -> None:
        self._key = str(key_of(call, name))

    def made(self) -> Any:
        return VALID[self._key]()

    def __repr__(self) -> str:
        return f"<a good {self._key}>"


def _value(source: Random) -> Any:
    kind = source.random()
    return junk(source) if kind < 0.4 else scalar(source) if kind < 0.8 else hostile(source)


def call(given: tuple[str, dict[str, Any]]) -> None:
    """Call it in a folder of its own, and take all of what it gives."""
    name, arguments = given
    owner, function = called()[name]
    with tempfile.TemporaryDirectory(prefix="ctxreuse-fuzz-") as folder:
        deep = os.path.join(folder, *"abcdefgh")  # names that lead upwards stay inside
        os.makedirs(deep)
        with contextlib.chdir(deep):
            try:
                objects, made = _made(owner, arguments)
                _taken(function(*objects, **made))
            except (*_FRAMEWORKS, UsersError) as error:  # they say so; so did a user's own object
                raise InvalidRequestError("refused") from error


def _made(owner: type | None, arguments: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return what a function is called with: its object, if it needs one, and its arguments."""
    try:
        objects = [] if owner is None else [OBJECTS[owner]()]
        return objects, {
            key: one.made() if isinstance(one, _Good) else one for key, one in arguments.items()
        }
    except CtxreuseError as error:
        raise AssertionError("what should be a good argument is refused") from error


def _taken(result: Any) -> None:
    if inspect.isawaitable(result) or isinstance(result, AsyncIterator):
        asyncio.run(_awaited(result))
    elif isinstance(result, contextlib.AbstractContextManager) and inspect.isgenerator(
        getattr(result, "gen", None)
    ):
        with result:
            pass
    elif isinstance(result, Iterator):
        list(islice(result, 20))


async def _awaited(result: Any) -> None:
    async with asyncio.timeout(_CLOSES_AFTER_S):
        if inspect.isawaitable(result):
            result = await result
        if isinstance(result, AsyncIterator):
            count = 0
            async for _ in result:
                count += 1
                if count == 20:
                    break


# what some of them need is imported when they are called first
TARGETS = {"public calls": Target(_input, call, most_seconds=10.0, weight=6)}
