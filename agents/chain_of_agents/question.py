"""What a chain is asked, and its settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from langchain_core.runnables import RunnableConfig

from chain_of_agents.agent_memory import ConversationKey
from chain_of_agents.chain_prompts import ChainPrompts
from chain_of_agents.segments import Packing, as_blocks, as_sent
from ctxreuse.context.blocks import ContextBlock
from ctxreuse.context.checks import (
    checked_choice,
    checked_integer,
    checked_kind,
    checked_optional_integer,
    checked_positive,
    checked_share,
)
from ctxreuse.context.scope import current_scope
from ctxreuse.errors import InvalidRequestError

Mode: TypeAlias = Literal["sequential", "parallel"]
"""Whether each worker reads the note of the one before, or all work independently."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a chain; see `ChainOfAgents`."""

    workers: int
    mode: Mode
    packing: Packing
    prompts: ChainPrompts
    note_tokens: int
    answer_tokens: int
    segment_tokens: int | None
    context_window: int | None
    timeout_s: float | None
    min_read: float

    def __post_init__(self) -> None:
        checked_kind("prompts", self.prompts, ChainPrompts, "ChainPrompts")
        checked_choice("mode", self.mode, get_args(Mode))
        checked_choice("packing", self.packing, get_args(Packing))
        for name in ("workers", "note_tokens", "answer_tokens"):
            checked_integer(name, getattr(self, name), 1)
        for name in ("segment_tokens", "context_window"):
            checked_optional_integer(name, getattr(self, name), 1)
        if self.timeout_s is not None:
            checked_positive("timeout_s", self.timeout_s)
        checked_share("min_read", self.min_read)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainQuestion:
    """What a chain is asked."""

    text: str
    documents: Sequence[ContextBlock]
    tenant: str = ""
    conversation: ConversationKey | None = None


def conversation_name(given: object) -> str | int:
    """Return a conversation's id as it is kept: UUIDs and the like become strings."""
    return given if isinstance(given, int) else str(given)


def question_of(given: object, config: RunnableConfig | None = None) -> ChainQuestion:
    """Return a chain's input as a question."""
    words = "a dict with 'question' and 'documents'"
    given = checked_kind("the chain's input", given, Mapping, words)
    for name in ("question", "documents"):
        if name not in given:
            raise InvalidRequestError(
                f"the chain's input has no {name!r}; it has {', '.join(map(repr, given)) or 'none'}"
            )
    text = as_sent(checked_kind("the question", given["question"], str, "a string"))
    configurable: Mapping[str, Any] = (config or {}).get("configurable") or {}
    tenant = given.get("tenant", configurable.get("tenant"))
    conversation = given.get("conversation_id", configurable.get("thread_id"))
    scope = current_scope().inside(
        None if tenant is None else str(tenant),
        None if conversation is None else conversation_name(conversation),
    )
    owner, key = scope.tenant or "", scope.conversation_id
    return ChainQuestion(
        text=text,
        documents=as_blocks(given["documents"]),
        tenant=owner,
        conversation=None if key is None else ConversationKey(owner, key),
    )
