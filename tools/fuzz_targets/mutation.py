"""Hostile values, texts and bytes from a seeded source; genuine ones with something changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from random import Random
from typing import Any

PIECES = (
    "",
    " ",
    "\n",
    "\n\n",
    "a",
    "The Tagus flows through Lisbon. ",
    "[ZTSN] ",
    "[ZTSN] a",
    "See also [KWBC] above.",
    "Read documents [ZTSN], [KWBC] first.",
    "{input}",
    "{docs}{{}",
    "<script>alert(1)</script>",
    "</message>",
    "\x00",
    "\ud800",
    "\u202e",
    "\u0130\u00df",
    "\U0001f600",
    "\u2028",
    "0",
    "-1",
    "NaN",
    "null",
    "None",
    "Sub-question: ",
    "../../etc/passwd",
    "=1+1",
    '"',
    "'",
    "\\",
    "%s",
    "a" * 300,
    "ab " * 200,
    "\u00e9" * 70,
)
NUMBERS = (
    0,
    1,
    -1,
    2,
    7,
    255,
    2**31,
    2**63 - 1,
    2**63,
    2**64,
    -(2**63) - 1,
    10**400,
    True,
    False,
    0.5,
    -0.0,
    1e308,
    1e-320,
    float("inf"),
    float("-inf"),
    float("nan"),
)


@dataclass(frozen=True, slots=True)
class Target:
    """Something that takes inputs of others."""

    make: Callable[[Random], Any]  # makes an input; the same for the same source
    # Takes it; raises a `CtxreuseError` to refuse it. Anything else that it raises, and an
    # assertion that fails, is a fault.
    run: Callable[[Any], object]
    # processor time that it may take; the generators make less than 100 KB
    most_seconds: float = 2.0
    weight: int = 1  # how much of the time of all targets it gets, compared with others


def text(source: Random, most: int = 6) -> str:
    """Return a text of some hostile pieces."""
    return "".join(source.choice(PIECES) for _ in range(source.randrange(most)))


def scalar(source: Random) -> Any:
    """Return a value that holds no others, a JSON one."""
    return source.choice((None, text(source), source.choice(NUMBERS), source.choice(NUMBERS)))


def json_value(source: Random, depth: int = 3) -> Any:
    """Return a JSON value, NaN and infinities included."""
    kind = source.random() if depth else 0.0
    if kind < 0.5:
        return scalar(source)
    size = source.randrange(4)
    if kind < 0.75:
        return [json_value(source, depth - 1) for _ in range(size)]
    return {text(source, 3): json_value(source, depth - 1) for _ in range(size)}


def nested(source: Random) -> Any:
    """Return lists or dicts in one another."""
    return _in_one_another(source, source.choice((2, 5, 60)))


def _in_one_another(source: Random, times: int) -> Any:
    value: Any = scalar(source)
    wrap: Callable[[Any], Any] = source.choice((lambda one: [one], lambda one: {"content": one}))
    for _ in range(times):
        value = wrap(value)
    return value


class Odd:
    """An object that no one expects."""

    def __repr__(self) -> str:
        return "Odd()"


class UsersError(Exception):
    """What a user's own object raises; it may come out of every call that uses the object."""


class Refusing:
    """A function of a user's, and a class, that refuse whatever they are given."""

    def __init__(self, *args: Any) -> None:
        if args:
            raise UsersError("made")

    def __call__(self, *args: Any, **options: Any) -> None:
        """Refuse."""
        raise UsersError("called")


class _Rude(str):
    """A text that cannot be compared and has no hash."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        raise UsersError("compared")

    def __hash__(self) -> int:
        raise UsersError("hashed")


class _Failing(list[Any]):
    """A list that fails while it is read."""

    def __iter__(self) -> Iterator[Any]:
        yield "one"
        raise UsersError("read")

    def __repr__(self) -> str:
        return "_Failing()"


def hostile(source: Random) -> Any:
    """Return an object that looks right and is not: most of them fail only when they are used."""
    cycle: list[Any] = ["a"]
    cycle.append(cycle)
    return source.choice(
        (
            lambda: _Rude(text(source)),
            _Failing,
            lambda: cycle,
            lambda: (one for one in ("one", _Rude("two"))),
            lambda: iter(_Failing()),
            lambda: {"role": "user", "content": cycle},
            lambda: [text(source).encode("utf-8", "surrogatepass")],
            lambda: bytearray(b"one"),
            lambda: range(3),
            lambda: SubText(text(source)),
            lambda: SubNumber(source.randrange(5)),
            lambda: [[float("nan")]],
        )
    )()


class SubText(str):
    """A text of a class of its own."""

    __slots__ = ()


class SubNumber(int):
    """A number of a class of its own."""


def junk(source: Random) -> Any:
    """Return a value of any kind, also one that is not JSON."""
    kind = source.randrange(12)
    if kind == 0:
        return Odd()
    if kind == 1:
        return text(source).encode("utf-8", "surrogatepass")
    if kind == 2:
        return {scalar(source), "a"}
    if kind == 3:
        return tuple(scalar(source) for _ in range(source.randrange(3)))
    if kind == 4:
        return source.choice((Refusing, Refusing()))
    if kind == 5:
        return nested(source)
    return json_value(source)


def mutated(value: Any, source: Random, changes: int = 3) -> Any:
    """Return a copy of a JSON value with up to so many places changed, often none.

    Values change their type, keys go or come, entries repeat, are dropped, or change places.
    """
    changed = deepcopy(value)
    for _ in range(source.randrange(changes + 1)):
        changed = _changed_once(changed, source)
    holders = _holders(changed)
    if holders and source.random() < 0.02:  # at last, because nothing could copy it any more
        holder = source.choice(holders)
        key = source.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        holder[key] = _in_one_another(source, 2000)
    return changed


def _changed_once(value: Any, source: Random) -> Any:
    holders = list(_holders(value))
    if not holders or source.random() < 0.05:
        return nested(source) if source.random() < 0.3 else json_value(source)
    holder = source.choice(holders)
    key = source.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    action = source.randrange(6)
    if action == 0:
        del holder[key]
    elif action == 1 and isinstance(holder, list):
        holder.insert(key, deepcopy(source.choice(holder)))
    elif action == 1:
        holder[text(source, 3)] = holder[key]
    elif action == 2:
        other = source.choice(holders)
        if not _holds(other, holder):
            holder[key] = deepcopy(other)
    elif action == 3:
        holder[key] = nested(source)
    elif action == 4 and isinstance(holder[key], str):
        cut = source.randrange(len(holder[key]) + 1)
        holder[key] = holder[key][:cut] + text(source) + holder[key][cut:]
    else:
        holder[key] = json_value(source)
    return value


def _holders(value: Any) -> list[Any]:
    """Return all lists and dicts in a value that hold something."""
    found, waiting = [], [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, (list, dict)) and one:
            found.append(one)
            waiting += one.values() if isinstance(one, dict) else one
    return found[:2000]


def _holds(value: Any, part: Any) -> bool:
    return any(one is part for one in _holders(value))


def as_json(value: Any, source: Random) -> bytes:
    """Return a value as JSON bytes, sometimes with broken ones, repeated keys or huge numbers."""
    return mutated_bytes(_written(value, source), source)


def as_json_lines(values: Any, source: Random) -> bytes:
    """Return the values of a list as JSON, one a line or an array, sometimes with broken bytes."""
    lines = [_written(one, source) for one in (values if isinstance(values, list) else [values])]
    form, gap = source.choice([(b"%b\n", b"\n")] * 9 + [(b"[%b]", b",\n")])
    return mutated_bytes(form % gap.join(lines), source)


def _written(value: Any, source: Random) -> bytes:
    try:
        written = json.dumps(value, ensure_ascii=source.random() < 0.5)
    except (TypeError, ValueError, RecursionError):
        written = "null"
    if source.random() < 0.03:
        written = written.replace("{", '{"id": 1, "id": 2, ', 1)
    return written.encode("utf-8", "surrogatepass")


def mutated_bytes(data: bytes, source: Random) -> bytes:
    """Return bytes, one time in four with something cut, repeated or put in."""
    if source.random() < 0.75 or not data:
        return data
    at, end = sorted((source.randrange(len(data) + 1), source.randrange(len(data) + 1)))
    put = source.choice((b"", b"\xff", b"\x00", b"\xef\xbb\xbf", b"9" * 5000, b"[" * 3000, b"\r\n"))
    return source.choice(
        (
            data[:at],
            data[:at] + put + data[at:],
            data[:at] + data[end:],
            data[:end] + data[at:],
            data[at:end],
        )
    )
