"""Request options that a wrapper adds on request: vLLM's `cache_salt`, a session's name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from langchain_core.language_models import BaseChatModel

from ctxreuse.adapters.engine_options import added_salt, added_session
from ctxreuse.context.scope import RequestScope


def with_cache_salt(
    arguments: Mapping[str, Any], inner: BaseChatModel, scope: RequestScope, key: str
) -> dict[str, Any]:
    """Return a call's arguments with the tenant's salt in `extra_body`.

    A salt that the user has set stays, and so does everything else in `extra_body`. Without a
    tenant nothing is added.

    Args:
        arguments: The arguments of the call.
        inner: The model; the call's `extra_body` replaces the model's, so both are merged.
        scope: Whose request it is.
        key: A secret for the hash.
    """
    body = _given("extra_body", arguments, inner)
    added = added_salt(body, scope, key)
    return {**arguments, "extra_body": {**body, **added}} if added else dict(arguments)


def with_session_id(
    arguments: Mapping[str, Any], inner: BaseChatModel, scope: RequestScope, key: str
) -> dict[str, Any]:
    """Return a call's arguments with the conversation's name as header `X-Session-ID`.

    As in `with_cache_salt`; without a conversation nothing is added.
    """
    headers = _given("extra_headers", arguments, inner)
    added = added_session(headers, scope, key)
    return {**arguments, "extra_headers": {**headers, **added}} if added else dict(arguments)


def _given(name: str, arguments: Mapping[str, Any], inner: BaseChatModel) -> Mapping[str, Any]:
    """Return what the user has set under a name, at the call or at the model."""
    at_model = getattr(inner, name, None) or (getattr(inner, "model_kwargs", None) or {}).get(name)
    given = arguments.get(name, at_model)
    return given or {}
