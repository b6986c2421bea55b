"""What a call to a vLLM server carries besides the prompt: the tenant's salt, the session."""

from __future__ import annotations

from typing import Any

from llama_index.core.llms.llm import LLM

from ctxreuse.adapters.engine_options import conversation_session, tenant_salt
from ctxreuse.context.scope import current_scope

_OPENAI_EXTRAS = ("extra_body", "extra_headers")


class EngineExtras:
    """Adds `cache_salt` and `X-Session-ID` to the arguments of an OpenAI-like model's calls.

    What the user sets of the same name stays.

    Args:
        model: The model that is called.
        sends_salt: Whether the tenant is sent.
        sends_session: Whether the conversation is sent.
        salt_key: The secret with which both are hashed.
    """

    def __init__(self, model: LLM, *, sends_salt: bool, sends_session: bool, salt_key: str) -> None:
        self._sends_salt = sends_salt
        self._sends_session = sends_session
        self._salt_key = salt_key
        self._own: dict[str, Any] = {}
        self.model = model
        """The model to call."""
        always: Any = getattr(model, "additional_kwargs", None)
        if (sends_salt or sends_session) and isinstance(always, dict):
            self._own = {name: always[name] for name in _OPENAI_EXTRAS if always.get(name)}
        if self._own:
            # these would replace a call's own ones as a whole; so they are put into each call
            rest = {name: one for name, one in always.items() if name not in self._own}
            self.model = model.model_copy(update={"additional_kwargs": rest})

    def options(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return a call's keyword arguments with what it carries for the current scope."""
        scope = current_scope()
        tenant = scope.tenant or ""
        options = dict(given)
        salt = tenant_salt(tenant, self._salt_key) if self._sends_salt else None
        session = None
        if self._sends_session and scope.conversation_id is not None:
            session = conversation_session(tenant, scope.conversation_id, self._salt_key)
        for name, key, value in (
            ("extra_body", "cache_salt", salt),
            ("extra_headers", "X-Session-ID", session),
        ):
            said = self._own.get(name) or given.get(name) or {}
            if value is not None:
                said = {key: value, **said}
            if said:
                options[name] = said
        return options

    def without_ours(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return a call's keyword arguments with only what the user sends."""
        return {**given, **self._own}
