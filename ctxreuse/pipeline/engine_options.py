"""What a request tells vLLM and routers besides its prompt: cache salt and session id."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeGuard

from ctxreuse.context.scope import RequestScope
from ctxreuse.errors import InvalidRequestError
from ctxreuse.planning.affinity import affinity_id, keyed_digest
from ctxreuse.rules.cache_marks import cache_fields, mark_field
from ctxreuse.rules.cache_rules import CacheRules

SESSION_HEADER = "X-Session-ID"
"""By this header, routers keep a conversation on one engine."""

REQUEST_HEADER = "X-Request-Id"
"""By this header, vLLM's log and events name a request."""

_LONGEST = 128
_LONGEST_NUMBER = 2**64
_FORBIDDEN = frozenset("@/\\\0")


def is_cache_salt(value: object) -> TypeGuard[str]:
    """Return whether vLLM takes a value as `cache_salt`."""
    return (
        isinstance(value, str) and 0 < len(value) <= _LONGEST and not _FORBIDDEN.intersection(value)
    )


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
