"""Settings of planners that an application makes, as the environment says when they are made."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache
from typing import Any, TypeVar, get_args

from ctxreuse.context.checks import checked_choice, suggestion
from ctxreuse.errors import CtxreuseError, InvalidRequestError, describe, shown_url
from ctxreuse.planning.savings import Mode

MODE = "CTXREUSE_MODE"
CAPACITY_TOKENS = "CTXREUSE_CAPACITY_TOKENS"
SHARED_LOG = "CTXREUSE_SHARED_LOG"
SHARED_LOG_SECRET = "CTXREUSE_SHARED_LOG_SECRET"
_OF_SERVERS = ("ENGINE_KEY", "KEYS_SECRET", "SERVE")
_KNOWN = ("MODE", "CAPACITY_TOKENS", "SHARED_LOG", "SHARED_LOG_SECRET", *_OF_SERVERS)

_log = logging.getLogger("ctxreuse")
_Value = TypeVar("_Value")
_is_unread: ContextVar[bool] = ContextVar("ctxreuse_environment_is_unread", default=False)


def as_given(make: Callable[..., _Value], **settings: Any) -> _Value:
    """Return a planner as its maker says: copies, and those of commands."""
    token = _is_unread.set(True)
    try:
        return make(**settings)
    finally:
        _is_unread.reset(token)


def settled(
    mode: Mode | None, capacity_tokens: int | None, shared_log: Any
) -> tuple[Mode, int | None, Any, bool]:
    """Return settings, None as `CTXREUSE_*` say, and whether these name a log or set a mode."""
    if _is_unread.get():
        return mode or "active", capacity_tokens, shared_log, False
    _say_misspelt()
    given = {MODE: mode, CAPACITY_TOKENS: capacity_tokens, SHARED_LOG: shared_log}
    for name, value in given.items():
        if value is not None and _text(name).lower() != str(value):
            _say_unused(name, "the program sets it in code")
    # a wrong mode: all is sent as given
    held: Any = mode or _read(MODE, _mode, "active", "shadow")
    if capacity_tokens is None:
        capacity_tokens = _read(CAPACITY_TOKENS, _tokens, None, None)
    if held == "shadow":
        _say_unused(SHARED_LOG, "in shadow mode nothing is shared")
        return held, capacity_tokens, shared_log if mode else None, mode is None
    told = _read(SHARED_LOG, shared_log_at, None, False) if shared_log is None else None
    return held, capacity_tokens, told or shared_log, told is not None


def _text(name: str) -> str:
    return os.environ.get(name, "").strip()


def _read(name: str, read: Callable[[str], _Value], missing: _Value, wrong: _Value) -> _Value:
    if not (text := _text(name)):
        return missing
    try:
        return read(text)
    except CtxreuseError as error:
        problem = str(error)
    except Exception as error:  # a log's file or server may fail in any way
        problem = f"failed with {type(error).__name__}"
    instead = "nothing is changed" if wrong == "shadow" else "ctxreuse does as if it were not set"
    _say(logging.ERROR, "wrong: %s. Until it is mended, %s.", name, problem, instead)
    return wrong


@cache  # once a process, however many planners it makes
def _say(level: int, words: str, *about: str) -> None:
    _log.log(level, f"The environment variable %s is {words}", *about)


def _say_unused(name: str, reason: str) -> None:
    if _text(name):
        _say(logging.WARNING, "set and not used: %s.", name, reason)


def _say_misspelt() -> None:
    for name in os.environ:
        prefix, _, own = name.partition("_")
        if prefix == "CTXREUSE" and own not in _KNOWN and (near := suggestion(own, _KNOWN)):
            _say(logging.WARNING, "unknown and not used%s.", name, near)


def _mode(text: str) -> str:
    return checked_choice("mode", text.lower(), get_args(Mode))


def _tokens(text: str) -> int:
    digits = text.replace(",", "").replace("_", "")
    if digits.isascii() and digits.isdecimal() and len(digits) <= 18 and int(digits):
        return int(digits)
    raise InvalidRequestError(
        f"it is {describe(text)}; set it to the number of tokens that the engine's cache holds, "
        "such as 200000, or unset it"
    )


def shared_log_at(text: str) -> Any:
    """Return the log at a path, or a Redis server's; the stores are loaded when one is named."""
    from ctxreuse.sharing.redis_log import RedisLog, checked_url

    if "://" not in text:  # a path
        from ctxreuse.sharing.sqlite_log import SQLiteLog

        return SQLiteLog(text)
    secret = _text(SHARED_LOG_SECRET)
    checked_url(text)
    if not secret:
        raise InvalidRequestError(
            f"it names the server {shown_url(text)}, and {SHARED_LOG_SECRET} is not set; set that "
            "to the same secret in all processes"
        )
    return RedisLog(text, secret=secret)
