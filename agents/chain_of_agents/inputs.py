"""A chain's input, as users give it, as a question."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from langchain_core.runnables import RunnableConfig

from chain_of_agents.question import ChainQuestion
from chain_of_agents.segments import as_blocks
from ctxreuse.context.scope import current_scope
from ctxreuse.errors import InvalidRequestError, describe


def conversation_name(given: object) -> str | int:
    """Return a conversation's id as it is kept: UUIDs and the like as strings."""
    return given if isinstance(given, int) else str(given)


def question_of(given: object, config: RunnableConfig | None = None) -> ChainQuestion:
    """Return a chain's input as a question.

    Args:
        given: What the caller gave.
        config: LangChain's config, which may name tenant and conversation.

    Raises:
        InvalidRequestError: If it is no such input.
    """
    if not isinstance(given, Mapping):
        raise InvalidRequestError(
            "the chain's input must be a dict with 'question' and 'documents', not "
            f"{describe(given)}"
        )
    for name in ("question", "documents"):
        if name not in given:
            raise InvalidRequestError(
                f"the chain's input has no {name!r}; it has {', '.join(map(repr, given)) or 'none'}"
            )
    if not isinstance(given["question"], str):
        raise InvalidRequestError(
            f"the question must be a string, not {describe(given['question'])}"
        )
    said: Mapping[str, Any] = (config or {}).get("configurable") or {}
    tenant = given.get("tenant", said.get("tenant"))
    conversation = given.get("conversation_id", said.get("thread_id"))
    scope = current_scope().inside(
        None if tenant is None else str(tenant),
        None if conversation is None else conversation_name(conversation),
    )
    return ChainQuestion(
        text=given["question"],
        documents=as_blocks(given["documents"]),
        tenant=scope.tenant or "",
        conversation_id=scope.conversation_id,
    )
