"""What a process has once for its adapters: a planner for each engine, and the time."""

from __future__ import annotations

import time
from collections.abc import Hashable
from typing import Any

from ctxreuse.context.checks import checked_kind
from ctxreuse.context.fork_safety import ForkSafeLock
from ctxreuse.context.lru_map import LRUMap
from ctxreuse.planner import ReusePlanner

_MOST_ENGINES = 64
_ADDRESSES = (
    *("base_url", "openai_api_base", "anthropic_api_url"),
    *("azure_endpoint", "endpoint_url", "api_base"),
)
_planners: LRUMap[Hashable, ReusePlanner] = LRUMap(_MOST_ENGINES)
_sharing = ForkSafeLock()
_BEGAN = time.time() - time.monotonic()


def planner_for(planner: object, *, model: object = None) -> ReusePlanner:
    """Return the planner given, or for None the one that this process has for an engine."""
    if planner is not None:
        wanted = "a ctxreuse.ReusePlanner; pass planner=ReusePlanner(), or leave it out"
        return checked_kind("planner", planner, ReusePlanner, wanted)
    name = getattr(model, "model_name", None) or getattr(model, "model", None)
    found = (getattr(model, one, None) for one in _ADDRESSES)
    addresses = tuple(str(one).rstrip("/") for one in found if one)
    engine = str(name), addresses or f"{type(model).__module__}.{type(model).__qualname__}"
    with _sharing:
        return _planners.get_or_make(engine, ReusePlanner)


def now() -> float:
    """Return seconds since 1970 that only run forward; planning itself reads no clock."""
    return _BEGAN + time.monotonic()


def planning_time(planner: ReusePlanner) -> dict[str, Any]:
    """Return the time as `plan` and `plan_batch` take it: where cache entries expire."""
    return {} if planner.cache.lifetime is None else {"now": now()}


def engine_address(model: object) -> tuple[str, str]:
    """Return the address and key of the engine behind a framework's model; "" is unknown."""
    client = getattr(model, "root_client", None)  # what a model of LangChain's has made of both
    found = (getattr(one, name, None) for one in (client, model) for name in _ADDRESSES)
    keys = (getattr(client or model, name, None) for name in ("api_key", "openai_api_key"))
    address = next((str(one) for one in found if one), "")
    return address, next((one for one in keys if isinstance(one, str) and one), "EMPTY")
