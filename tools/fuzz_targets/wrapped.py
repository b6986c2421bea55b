"""What a wrapper's calls are held to: nothing is lost, doubled or altered but what is documented.

The same call is made on the object inside and on the wrapper around it. What is fine there is fine
here; what the inner object gets and what comes back are compared, field by field.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from functools import cache
from inspect import isawaitable
from random import Random
from reprlib import repr as short
from typing import Any

from pydantic import BaseModel

from ctxreuse import ContextBlock
from ctxreuse.context.rendering import DEFAULT_TEMPLATES
from fuzz_targets.mutation import hostile, json_value, junk, text

LABEL = r"\[[A-Z]{4}\]"
ORDER = rf"Read documents {LABEL}(?:, {LABEL}){{0,2}} first\."
PLACE = rf"See also {LABEL}(?:, {LABEL})* above\."
DOCUMENTS = "abcdef"
METADATA_KEY = "ctxreuse"  # in what a message carries beside its content


@cache
def document(name: str) -> str:
    """Return a hostile text that is long enough to be worth moving, another one for each name."""
    source = Random(name)
    return f"<{name}>{text(source)}{name * 400}{text(source)}</{name}>"


def blocks(names: Iterable[str]) -> list[ContextBlock]:
    """Return the documents of these names."""
    return [ContextBlock(id=name, text=document(name)) for name in names]


@cache
def label(name: str) -> str:
    """Return the label of a document."""
    return DEFAULT_TEMPLATES.label_of(*blocks(name))


def labelled(names: Iterable[str]) -> str:
    """Return documents as a prompt shows them."""
    return "\n\n".join(f"{label(name)} {document(name)}" for name in names)


def names(source: Random) -> list[str]:
    """Return some names of documents, mostly at least two, in any order."""
    return source.sample(DOCUMENTS, source.choice((1, 2, 3, 3, 4, 6)))


def odd(source: Random) -> Any:
    """Return a value of any kind that two calls can be given: no iterator, which is read once."""
    value = source.choice((hostile, junk, json_value))(source)
    return None if isinstance(value, Iterator) else value


ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "tools": ([{"type": "function", "function": {"name": "f"}}],),
    "extra_body": ({"cache_salt": "mine"}, {"a": {"b": 1}}, None),
    "extra_headers": ({"X-Session-ID": "mine"}, {"a": "b"}),
    "temperature": (0.5,),
}
"""Keyword arguments of a model's calls, and what they may be."""


def some_arguments(source: Random, known: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Return some keyword arguments of a call."""
    return {
        name: source.choice((*values, odd(source)))
        for name, values in known.items()
        if source.random() < 0.15
    }


def some_settings(source: Random) -> dict[str, Any]:
    """Return settings of a wrapped model."""
    return {
        "window_s": source.choice((0, 0, 0, 0.001)),
        "send_cache_salt": source.random() < 0.3,
        "send_session_id": source.random() < 0.3,
    }


class Comparison:
    """Compares what an object gets or returns inside of a wrapper with what it does without.

    The contexts are those in the prompts as they were rendered; each shows `DOCUMENTS`.
    """

    def __init__(self, contexts: Iterable[str] = ()) -> None:
        self._contexts = sorted({one for one in contexts if one}, key=len, reverse=True)
        pattern = "|".join(map(re.escape, self._contexts))
        self._pattern = re.compile(f"({pattern})") if pattern else None

    def check(self, given: Any, got: Any, *, where: str = "") -> None:
        """Check that a value is the same as another one, but for what is documented."""
        waiting = [(given, got, where)]

        compared: set[tuple[int, int]] = set()  # a value may hold itself
        while waiting:
            one, other, where = waiting.pop()
            if one is other or (id(one), id(other)) in compared:
                continue
            if isinstance(one, str) and isinstance(other, str):
                assert self._is_same_text(one, other), _said(where, one, other)
                continue
            parts, others = _parts(one), _parts(other)
            if parts is None or others is None:
                assert _is_same(one, other), _said(where, one, other)
                continue
            compared.add((id(one), id(other)))
            assert type(one) is type(other), _said(where, type(one), type(other))
            assert len(parts) == len(others), _said(where, list(parts), list(others))
            for (key, held), (new_key, now) in zip(parts.items(), others.items(), strict=True):
                waiting += [(key, new_key, f"{where}: key"), (held, now, f"{where}.{key}")]

    def _is_same_text(self, given: str, got: str) -> bool:
        if str.__eq__(given, got):
            return True
        pieces = [given] if self._pattern is None else self._pattern.split(given)
        expected = [
            self._context_pattern(piece) if number % 2 else re.escape(piece)
            for number, piece in enumerate(pieces)
        ]
        return (
            re.fullmatch("".join(expected), got, re.DOTALL) is not None
            and all(got.count(one) <= given.count(one) for one in map(labelled, DOCUMENTS))
            and all(_shows_the_same(piece, got) for piece in pieces[1::2])
        )

    def _context_pattern(self, context: str) -> str:
        shown = _shown(context)
        items = [re.escape(labelled(name)) for name in shown]
        # words stand behind the texts that were planned: an end that may go on stays where it is
        one = f"(?:{'|'.join([*items, PLACE, ORDER])})"
        return rf"{one}(?:\n\n{one}){{0,{len(shown) + 1}}}"


def _said(where: str, given: Any, got: Any) -> str:
    return f"{where}: {short(given)} -> {short(got)}"


def _shown(context: str) -> list[str]:
    return [name for name in DOCUMENTS if document(name) in context]


def _shows_the_same(context: str, got: str) -> bool:
    """Return whether a text shows each document of a context, or refers to it."""
    said = "".join(re.findall(PLACE, got))
    return all(document(name) in got or label(name) in said for name in _shown(context))


def _parts(value: Any) -> dict[Any, Any] | None:
    """Return what a value holds, by key, without what a plan adds; None if it holds nothing."""
    if isinstance(value, BaseModel):
        held = {**value.__dict__, **(value.__pydantic_extra__ or {})}
        return {name: one for name, one in held.items() if name not in ("id", "id_")}
    if type(value) is dict:
        return {key: one for key, one in value.items() if key != METADATA_KEY}
    if type(value) in (list, tuple):
        return dict(enumerate(value))
    return None


def _is_same(one: Any, other: Any) -> bool:
    try:
        return bool(one == other) or repr(one) == repr(other)
    except Exception:  # of an object that cannot be compared; then it has to be itself
        return False


def fresh(value: Any) -> Any:
    """Return a copy that shares no list or dict with a value; other objects are the same."""
    copies: dict[int, Any] = {}
    waiting = [value] if type(value) in (list, dict) else []
    while waiting:
        one = waiting.pop()
        if id(one) not in copies:
            copies[id(one)] = one.copy()
            held = one.values() if isinstance(one, dict) else one
            waiting += [part for part in held if type(part) in (list, dict)]
    for copy in copies.values():
        for key, part in copy.items() if isinstance(copy, dict) else enumerate(copy):
            copy[key] = copies.get(id(part), part)
    return copies.get(id(value), value)


async def _whole(value: Any) -> Any:
    value = await value if isawaitable(value) else value
    return [one async for one in value] if isinstance(value, AsyncIterator) else value


class Outcome:
    """What a call returned or raised; the error is None if it returned."""

    def __init__(self, value: Any = None, error: Exception | None = None) -> None:
        self.value = value
        self.error = error

    @classmethod
    def of(cls, call: Callable[[], Any], read: Callable[[Any], Any] | None = None) -> Outcome:
        """Return what became of a call: awaited, a stream's pieces as a list, and read so."""
        try:
            value = call()
            if isawaitable(value) or isinstance(value, AsyncIterator):
                value = asyncio.run(_whole(value))
            elif isinstance(value, Iterator):
                value = list(value)
            return cls(value if read is None else read(value))
        except Exception as error:
            return cls(error=error)

    @classmethod
    async def awaited(cls, call: Callable[[], Awaitable[Any]]) -> Outcome:
        """Return what became of a call that is awaited."""
        try:
            return cls(await call())
        except Exception as error:
            return cls(error=error)

    def check_as_fine_as(self, plain: Outcome, *, same_error: bool = True) -> bool:
        """Return whether both returned; raise if only this call failed, or with another error."""
        if plain.error is None:
            if self.error is not None:
                raise self.error
            return True
        assert self.error is not None, f"the inner object's {type(plain.error)} is hidden"
        kinds = type(self.error), type(plain.error)
        assert not same_error or kinds[0] is kinds[1], f"{kinds[1]} became {kinds[0]}: {self.error}"
        return False


def check_each(
    given: list[Any], got: list[Any], check: Callable[[Any, Any], None], *, is_whole: bool
) -> None:
    """Check that two models got the same calls, in any order, and forget these.

    It is not whole where a call has failed, after which others may be left out.
    """
    assert not is_whole or len(given) == len(got), f"{len(given)} calls became {len(got)}"
    left = list(got)
    for call in given if is_whole else ():
        wrong: AssertionError | None = None
        for number, other in enumerate(left):
            try:
                check(call, other)
            except AssertionError as error:
                wrong = wrong or error
            else:
                del left[number]
                break
        else:
            raise wrong or AssertionError("a call is missing")
    given.clear()
    got.clear()


def check_call(comparison: Comparison, given: Any, got: Any) -> None:
    """Check the prompt, a text or messages, and the arguments of a call against another one's."""
    (prompt, arguments), (sent, sent_with) = given, got
    if isinstance(prompt, str):
        comparison.check(prompt, sent, where="prompt")
    else:
        assert len(prompt) == len(sent), "another number of messages"
        for number, (one, other) in enumerate(zip(prompt, sent, strict=True)):
            comparison.check(one, other, where=f"message {number}")
    _check_arguments(arguments, sent_with)


def _check_arguments(given: Mapping[str, Any], got: Mapping[str, Any]) -> None:
    """Check the keyword arguments of a call, but for salt and session that a wrapper may add."""
    sent = dict(got)
    for name, added in (("extra_body", "cache_salt"), ("extra_headers", "X-Session-ID")):
        value, before = got.get(name), given.get(name)
        if type(value) is dict and (type(before) is dict or not before):
            rest = {key: one for key, one in value.items() if key != added or key in (before or ())}
            sent[name] = rest or before
            if name not in given and not rest:
                del sent[name]
    Comparison().check(dict(given), {name: sent.get(name) for name in given})
    assert sent.keys() == given.keys(), f"added: {sent.keys() - given.keys()}"


def all_of(values: Sequence[Any] | Mapping[Any, Any]) -> Any:
    """Return a list of values, exceptions among them as their types."""
    return [type(one) if isinstance(one, Exception) else one for one in values]
