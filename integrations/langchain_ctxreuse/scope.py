"""Whose request it is, as LangChain users say it: `config={"configurable": {...}}`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from langchain_core.messages import (
    MessageLikeRepresentation,
    convert_to_messages,
    convert_to_openai_messages,
)
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ensure_config

from ctxreuse.context.blocks import Message
from ctxreuse.context.fail_open import FailOpen
from ctxreuse.context.scope import RequestScope, current_scope
from langchain_ctxreuse.messages import text_parts

_fail_open = FailOpen(
    "langchain_ctxreuse",
    "nothing is left out for what it shows",
    'reading config["configurable"]["history"]',
)


def scope_from_config(config: RunnableConfig | None) -> RequestScope:
    """Return tenant, conversation and history of a call.

    What `ctxreuse.request_context` says is refined by `config["configurable"]`: `thread_id` names
    the conversation, `tenant` whose it is, `history` (LangChain messages or dicts) what will be
    sent before this turn. Other tenants and threads than texts count as their text; a history that
    is none is not used.

    Args:
        config: The call's config; inside chains and graphs the one around it counts, too.
    """
    said: Mapping[str, Any] = ensure_config(config).get("configurable", {})
    tenant, thread, history = (said.get(name) for name in ("tenant", "thread_id", "history"))
    return current_scope().inside(
        tenant=None if tenant is None else str(tenant),
        conversation_id=thread if isinstance(thread, int) or thread is None else str(thread),
        history=None if history is None else _history(history),
    )


def messages_as_openai(messages: Iterable[MessageLikeRepresentation]) -> list[Message]:
    """Return LangChain messages as OpenAI chat messages.

    Args:
        messages: Messages, dicts or whatever LangChain takes for a message. Of one with content
            that OpenAI does not know, the texts are kept.
    """
    return [_as_openai(message) for message in messages]


def history_as_openai(messages: Iterable[MessageLikeRepresentation]) -> list[Message]:
    """Return LangChain messages as a history: OpenAI chat messages, without system messages."""
    return [
        message
        for message in messages_as_openai(messages)
        if message["role"] not in ("system", "developer")
    ]


def _history(given: Any) -> list[Message] | None:
    return _fail_open.attempt(lambda: history_as_openai(given), lambda: None)


def _as_openai(message: MessageLikeRepresentation) -> Message:
    try:
        converted = convert_to_openai_messages(message)
    except (KeyError, TypeError, ValueError):
        # it has a part that OpenAI does not know, or that lacks something
        [plain] = convert_to_messages([message])
        text = "\n".join(text for text, _ in text_parts(plain))
        converted = convert_to_openai_messages(plain.model_copy(update={"content": text}))
    if not isinstance(converted, dict):
        raise TypeError(f"one message became {type(converted).__name__}")
    return converted
