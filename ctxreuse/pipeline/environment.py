"""The planner of adapters that were given none, as the environment says when they are made."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Hashable, Mapping
from functools import cache
from typing import Any, TypeVar, get_args

from ctxreuse.context.checks import checked_kind
from ctxreuse.context.fork_safety import ForkSafeLock
from ctxreuse.context.lru_map import LRUMap
from ctxreuse.errors import CtxreuseError, InvalidRequestError, describe, shown_url
from ctxreuse.planner import ReusePlanner
from ctxreuse.planning.savings import Mode

MODE = "CTXREUSE_MODE"
CAPACITY_TOKENS = "CTXREUSE_CAPACITY_TOKENS"
SHARED_LOG = "CTXREUSE_SHARED_LOG"
SHARED_LOG_SECRET = "CTXREUSE_SHARED_LOG_SECRET"

_log = logging.getLogger("ctxreuse")
_Value = TypeVar("_Value")


def default_planner(environment: Mapping[str, str] | None = None, **settings: Any) -> ReusePlanner:
    """Return a planner with the settings of `CTXREUSE_*`; a wrong variable is logged once."""
    told = os.environ if environment is None else environment
    settings["mode"] = _read(told, MODE, _mode, "active", "shadow")  # a wrong one: as given
    settings["capacity_tokens"] = _read(told, CAPACITY_TOKENS, _tokens, None, None)
    if settings["mode"] == "active":
        secret = told.get(SHARED_LOG_SECRET, "")
        settings["shared_log"] = _read(
            told, SHARED_LOG, lambda text: _shared_log(text, secret), None, None
        )
    return ReusePlanner(**settings)


_MOST_ENGINES = 64
_ADDRESSES = (
    *("base_url", "openai_api_base", "anthropic_api_url"),
    *("azure_endpoint", "endpoint_url", "api_base"),
)
_planners: LRUMap[Hashable, ReusePlanner] = LRUMap(_MOST_ENGINES)
_sharing = ForkSafeLock()


def planner_for(planner: object, *, model: object = None) -> ReusePlanner:
    """Return the planner given, or for None the one that this process has for an engine."""
    if planner is None:
        with _sharing:
            return _planners.get_or_make(_engine_of(model), default_planner)
    wanted = "a ctxreuse.ReusePlanner; pass planner=ReusePlanner(), or leave it out"
    return checked_kind("planner", planner, ReusePlanner, wanted)


def _engine_of(model: object) -> Hashable:
    """Return what tells the engine behind a model from others."""
    name = getattr(model, "model_name", None) or getattr(model, "model", None)
    found = (getattr(model, one, None) for one in _ADDRESSES)
    addresses = tuple(str(one).rstrip("/") for one in found if one)
    return str(name), addresses or f"{type(model).__module__}.{type(model).__qualname__}"


def engine_address(model: object) -> tuple[str, str]:
    """Return the address and key of the engine behind a framework's model; "" is unknown."""
    client = getattr(model, "root_client", None)  # what a model of LangChain's has made of both
    found = (getattr(one, name, None) for one in (client, model) for name in _ADDRESSES)
    keys = (getattr(client or model, name, None) for name in ("api_key", "openai_api_key"))
    address = next((str(one) for one in found if one), "")
    return address, next((one for one in keys if isinstance(one, str) and one), "EMPTY")


def _read(
    environment: Mapping[str, str],
    name: str,
    read: Callable[[str], _Value],
    missing: _Value,
    wrong: _Value,
) -> _Value:
    """Return a variable's value."""
    text = environment.get(name, "").strip()
    if not text:
        return missing
    try:
        return read(text)
    except CtxreuseError as error:
        _complain(name, str(error), "nothing is changed" if wrong == "shadow" else "")
    except Exception as error:  # a log's file or server may fail in any way
        _complain(name, f"failed with {type(error).__name__}", "")
    return wrong


@cache  # once a process, however many adapters it makes
def _complain(name: str, problem: str, instead: str) -> None:
    _log.error(
        "The environment variable %s is wrong: %s. Until it is mended, %s.",
        name,
        problem,
        instead or "ctxreuse does as if it were not set",
    )


def _mode(text: str) -> Mode:
    known = text.lower()
    for mode in get_args(Mode):
        if mode == known:
            found: Mode = mode
            return found
    raise InvalidRequestError(
        f"it is {describe(text)}; set it to {' or '.join(get_args(Mode))}, or unset it"
    )


def _tokens(text: str) -> int:
    digits = text.replace(",", "").replace("_", "")
    if digits.isascii() and digits.isdecimal() and len(digits) <= 18:
        return int(digits)
    raise InvalidRequestError(
        f"it is {describe(text)}; set it to the number of tokens that the engine's cache holds, "
        "such as 200000, or unset it"
    )


def _shared_log(text: str, secret: str) -> Any:
    # stores are loaded when one is named
    from ctxreuse.sharing.redis_log import RedisLog, is_redis_url

    if not is_redis_url(text):
        from ctxreuse.sharing.sqlite_log import SQLiteLog

        return SQLiteLog(text)
    if not secret:
        raise InvalidRequestError(
            f"it names the server {shown_url(text)}, and {SHARED_LOG_SECRET} is not set; set that "
            "to the same secret in all processes"
        )
    return RedisLog(text, secret=secret)
