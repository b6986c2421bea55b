"""An engine's planner, and what its requests say besides their prompts: salt and session id."""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeGuard

from ctxreuse.context.checks import checked_kind
from ctxreuse.context.fork_safety import ForkSafeLock
from ctxreuse.context.lru_map import LRUMap
from ctxreuse.context.scope import RequestScope
from ctxreuse.errors import InvalidRequestError
from ctxreuse.planner import ReusePlanner
from ctxreuse.planning.plan import affinity_id, keyed_digest
from ctxreuse.rules.cache_marks import cache_fields, mark_field
from ctxreuse.rules.cache_rules import CacheRules

SESSION_HEADER = "X-Session-ID"
"""By this header, routers keep a conversation on one engine."""

REQUEST_HEADER = "X-Request-Id"
"""By this header, vLLM's log and events name a request."""

_LONGEST = 128
_LONGEST_NUMBER = 2**64
_FORBIDDEN = frozenset("@/\\\0")
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
    return {"now": now()} if planner.entries_expire else {}


def engine_address(model: object) -> tuple[str, str]:
    """Return the address and key of the engine behind a framework's model; "" is unknown."""
    client = getattr(model, "root_client", None)  # what a model of LangChain's has made of both
    found = (getattr(one, name, None) for one in (client, model) for name in _ADDRESSES)
    keys = (getattr(client or model, name, None) for name in ("api_key", "openai_api_key"))
    address = next((str(one) for one in found if one), "")
    return address, next((one for one in keys if isinstance(one, str) and one), "EMPTY")


def is_cache_salt(value: object) -> TypeGuard[str]:
    """Return whether vLLM takes a value as `cache_salt`."""
    return isinstance(value, str) and 0 < len(value) <= _LONGEST and _FORBIDDEN.isdisjoint(value)


def checked_cache_salt(value: object) -> str | None:
    """Return a salt as it is; None is no salt."""
    if value is None or is_cache_salt(value):
        return value
    raise InvalidRequestError(
        f"cache_salt must be a string of 1 to {_LONGEST} characters without '@', '/', '\\' and NUL,"
        " or None"
    )


def tenant_salt(tenant: str, key: str = "") -> str | None:
    """Return a tenant's salt, which does not tell the tenant; the default tenant has none."""
    return keyed_digest(key, "tenant", tenant) if tenant else None


def conversation_session(tenant: str, conversation_id: str | int, key: str = "") -> str:
    """Return the session id of a conversation, for routers."""
    # hexadecimal: decimal conversion of integers stops at 4,300 digits
    name = conversation_id if isinstance(conversation_id, str) else format(conversation_id, "x")
    return keyed_digest(key, "conversation", type(conversation_id).__name__, name, tenant)


def request_header(request_id: str | int) -> dict[str, str]:
    """Return the header that tells an engine a request's id, unless it fits no header."""
    if isinstance(request_id, int):
        request_id = str(request_id) if abs(request_id) < _LONGEST_NUMBER else ""
    fits = 0 < len(request_id) <= _LONGEST and request_id.isascii() and request_id.isprintable()
    return {REQUEST_HEADER: request_id} if fits else {}


class EngineOptions(NamedTuple):
    """What the calls of a wrapped model tell engines and routers besides their prompts."""

    cache: CacheRules
    salts: bool
    sessions: bool | Literal["conversation", "group"] | None
    header: str
    key: str

    @classmethod
    def of(cls, model: Any) -> EngineOptions:
        """Return what the fields of a wrapper say."""
        salts, sessions = model.send_cache_salt, model.send_session_id
        return cls(model.planner.wire_cache, salts, sessions, model.session_header, model.salt_key)

    def added(
        self,
        groups: Sequence[tuple[str, ...]],
        scope: RequestScope,
        known: Mapping[str, Any],
        body: Mapping[str, Any],
        headers: Mapping[str, Any],
    ) -> dict[str, dict[str, Any]]:
        """Return what to add to `extra_body` and `extra_headers`: salt, cache key, session id.

        What the user has set stays: in the body, beside it (`known`), and in headers.
        """
        salt = tenant_salt(scope.tenant or "", self.key) if self.salts else None
        more: dict[str, Any] = {}
        if salt is not None and "cache_salt" not in body:
            more["cache_salt"] = salt
        if self.cache.is_routed:
            more |= added_cache_fields({**known, **body}, groups, self.cache, self.key)
        session = None  # by which routers keep a call in one place
        if self.sessions == "group":
            session = affinity_id(groups[0], self.key) if groups else None
        elif self.sessions and scope.conversation_id is not None:
            session = conversation_session(scope.tenant or "", scope.conversation_id, self.key)
        options = {"extra_body": more} if more else {}
        if session is not None and self.header.lower() not in map(str.lower, headers):
            options["extra_headers"] = {self.header: session}
        return options


def added_cache_fields(
    body: Mapping[str, Any], groups: Sequence[tuple[str, ...]], profile: CacheRules, key: str
) -> dict[str, Any]:
    """Return what to add to the body of a call to OpenAI: `prompt_cache_key` and `..._options`."""
    if not groups:
        return {}
    fields = cache_fields(profile, mark_field(profile), affinity_id(groups[0], key))
    return {name: value for name, value in fields.items() if body.get(name) is None}


def marks_the_end(body: Mapping[str, Any]) -> bool:
    """Return whether a provider marks the end of a prompt because the user's call says so."""
    options = body.get("prompt_cache_options")
    if isinstance(options, Mapping) and options.get("mode", "implicit") == "implicit":
        return True
    return isinstance(body.get("cache_control"), Mapping)
