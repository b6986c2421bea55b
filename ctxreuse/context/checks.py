"""Checks of arguments; each kind of mistake has one message with name, value and remedy."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from inspect import signature
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from ctxreuse.errors import CtxreuseError, InvalidRequestError, UnknownArgumentError, describe

_Kind = TypeVar("_Kind")
_MOST_REPORTED = 2**53
"""No model has so many tokens; up to here, every integer is exact as a float, too."""


def refuse_wrapped(name: str, value: object, wrappers: type | tuple[type, ...]) -> None:
    """Refuse what is wrapped already, since it would be planned, and counted, twice."""
    if isinstance(value, wrappers):
        kind = type(value).__name__
        raise InvalidRequestError(f"{name} is a {kind} already; pass what it wraps: once is enough")


def checked_integer(
    name: str, value: Any, at_least: int = 0, *, error: type[CtxreuseError] = InvalidRequestError
) -> int:
    """Return the value if it is an integer from `at_least`."""
    if not _is_integer(value, at_least):
        raise error(f"{name} must be an integer from {at_least}, not {describe(value)}")
    return value


def checked_optional_integer(name: str, value: Any, at_least: int = 0) -> int | None:
    """Return the value if it is None or an integer from `at_least`; see `checked_integer`."""
    if value is not None and not _is_integer(value, at_least):
        words = f"an integer from {at_least} or None"
        raise InvalidRequestError(_other_than(name, value, words))
    return value


def _is_integer(value: object, at_least: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least


def checked_number(name: str, value: Any, at_least: float = 0) -> float:
    """Return the value if it is a finite number from `at_least`."""
    # an integer that no float can hold would fail later, in the arithmetic
    if not isinstance(value, (int, float)) or not at_least <= value <= sys.float_info.max:
        raise InvalidRequestError(f"{name} must be a number from {at_least}, not {describe(value)}")
    return value


def checked_share(name: str, value: Any) -> float:
    """Return the value if it is a number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise InvalidRequestError(f"{name} must be a number from 0 to 1, not {describe(value)}")
    return value


def checked_positive(name: str, value: Any) -> float:
    """Return a finite number above 0."""
    number = checked_number(name, value)
    if not number:
        raise InvalidRequestError(f"{name} must be more than 0, not {describe(value)}")
    return number


def reported_count(value: object) -> int | None:
    """Return a number of tokens that a model or server reports; None for what cannot be one."""
    return value if _is_integer(value, 0) and value <= _MOST_REPORTED else None


def checked_kind(
    name: str, value: Any, kind: type[_Kind] | tuple[type[_Kind], ...], words: str
) -> _Kind:
    """Return the value if it is of a kind."""
    if not isinstance(value, kind):
        raise InvalidRequestError(_other_than(name, value, words))
    return value


def _other_than(name: str, value: Any, words: str) -> str:
    allowed, separator, remedy = words.partition("; ")
    return f"{name} must be {allowed}, not {describe(value)}{separator}{remedy}"


def check_function(name: str, value: Any, words: str = "a function or None") -> None:
    """Check an argument that is a function or, if the words say so, None."""
    if not callable(value) and not (value is None and words.partition("; ")[0].endswith("None")):
        raise InvalidRequestError(_other_than(name, value, words))


def check_keywords(
    owner: str, given: Iterable[str], *takers: Callable[..., Any], without: Collection[str] = ()
) -> None:
    """Check the names of arguments that are handed on to `takers`."""
    known = [name for taker in takers for name in signature(taker).parameters]
    for name in given:
        if name not in known or name in without:
            near = suggestion(name, [one for one in known if one not in without])
            words = f"{owner}() got an unexpected keyword argument {name!r:.60}{near}"
            raise UnknownArgumentError(words)


def suggestion(name: object, known: Iterable[str]) -> str:
    """Return what an error says of a name that is near to an unknown one; nothing for none."""
    from difflib import get_close_matches  # slow to import, and seldom needed

    near = get_close_matches(name, known, 1) if isinstance(name, str) else []
    return f" (did you mean {near[0]!r:.60}?)" if near else ""


def checked_list(
    name: str,
    value: Any,
    words: str,
    *,
    error: type[CtxreuseError] = InvalidRequestError,
    but: tuple[type, ...] = (str, bytes),
) -> list[Any]:
    """Return a list of anything; a text is no list."""
    if isinstance(value, but) or not isinstance(value, Iterable):
        raise error(_other_than(name, value, words))
    return list(value)


def checked_each(name: str, value: Any, kind: type[_Kind], words: str) -> list[_Kind]:
    """Return a list of objects of one kind."""
    listed = checked_list(name, value, f"a list, each {words.partition('; ')[0]}")
    return [checked_kind(f"each of {name}", one, kind, words) for one in listed]


def checked_texts(name: str, value: Any, words: str = "a list of str") -> list[str]:
    """Return a list of texts; a single text is none, and the message holds none of them."""
    is_list = isinstance(value, Iterable) and not isinstance(value, (str, bytes))
    texts: list[Any] = list(value) if is_list else [None]
    if not all(isinstance(text, str) for text in texts):
        raise InvalidRequestError(f"{name} must be {words}, not {type(value).__name__}")
    return texts


def checked_id(name: str, value: Any) -> str | int:
    """Return the value if it can name a request or a conversation."""
    if not isinstance(value, (str, int)):
        raise InvalidRequestError(f"{name} must be a string or an integer, not {describe(value)}")
    return value


def checked_path(name: str, value: Any) -> Path:
    """Return a path as one; nothing is looked up."""
    try:
        path = Path(value)
        if b"\0" not in os.fsencode(path):
            return path
    except (TypeError, UnicodeEncodeError):
        pass
    raise InvalidRequestError(
        f"{name} is {describe(value)}; give the path of a file, such as 'sent.sqlite'"
    )


def checked_header(name: str, value: Any) -> str:
    """Return the value if it can be sent as a header."""
    # HTTP libraries show what they refuse, and it may be a secret
    if not (isinstance(value, str) and value.isascii() and value.isprintable()):
        raise InvalidRequestError(
            f"{name} must be printable ASCII text, without a line break, to be sent as a header; "
            f"it is a {type(value).__name__} that is not shown here"
        )
    return value


def checked_choice(
    what: str,
    value: Any,
    choices: Sequence[str],
    *,
    error: type[CtxreuseError] = InvalidRequestError,
) -> str:
    """Return the value if it is one of the choices."""
    if isinstance(value, str) and value in choices:
        return choices[choices.index(value)]
    raise error(
        f"there is no {what} {describe(value)}; choose one of {', '.join(map(repr, choices))}"
    )
