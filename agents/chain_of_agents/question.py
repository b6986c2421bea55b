"""What a chain is asked, and what it was made with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from chain_of_agents.histories import ConversationKey
from chain_of_agents.prompts import ChainPrompts
from chain_of_agents.segments import Packing
from ctxreuse.blocks import ContextBlock

Mode: TypeAlias = Literal["sequential", "parallel"]
"""Whether each worker reads the note of the one before, or all read on their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a chain was made with; see `ChainOfAgents`."""

    workers: int
    mode: Mode
    packing: Packing
    prompts: ChainPrompts
    note_tokens: int
    answer_tokens: int
    segment_tokens: int | None
    context_window: int | None
    is_counted: bool
    timeout_s: float | None
    clock: Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a chain is asked.

    Attributes:
        text: The question.
        documents: What there is to read, best first.
        tenant: Whose question it is.
        conversation_id: The conversation that it is a turn of.
    """

    text: str
    documents: Sequence[ContextBlock]
    tenant: str = ""
    conversation_id: str | int | None = None

    @property
    def conversation(self) -> ConversationKey | None:
        """What the agents' histories are kept by."""
        if self.conversation_id is None:
            return None
        return self.tenant, type(self.conversation_id), self.conversation_id
