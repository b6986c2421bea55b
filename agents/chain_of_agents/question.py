"""What a chain is asked, and what it was made with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from chain_of_agents.agent_memory import ConversationKey
from chain_of_agents.prompts import ChainPrompts
from chain_of_agents.segments import Packing
from ctxreuse.context.blocks import ContextBlock
from ctxreuse.errors import InvalidRequestError, describe

Mode: TypeAlias = Literal["sequential", "parallel"]
"""Whether each worker reads the note of the one before, or all read on their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a chain was made with; see `ChainOfAgents`.

    Raises:
        InvalidRequestError: If something is of the wrong kind.
    """

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

    def __post_init__(self) -> None:
        if not isinstance(self.prompts, ChainPrompts):
            raise InvalidRequestError(f"prompts must be ChainPrompts, not {describe(self.prompts)}")
        for name, choice, known in (
            ("mode", self.mode, get_args(Mode)),
            ("packing", self.packing, get_args(Packing)),
        ):
            if choice not in known:
                raise InvalidRequestError(
                    f"{name} must be {' or '.join(map(repr, known))}, not {describe(choice)}"
                )
        for name, number, may_be_none in (
            ("workers", self.workers, False),
            ("note_tokens", self.note_tokens, False),
            ("answer_tokens", self.answer_tokens, False),
            ("segment_tokens", self.segment_tokens, True),
            ("context_window", self.context_window, True),
        ):
            is_number = isinstance(number, int) and not isinstance(number, bool) and number >= 1
            if not is_number and not (may_be_none and number is None):
                raise InvalidRequestError(
                    f"{name} must be an integer from 1, not {describe(number)}"
                )
        limit_s = self.timeout_s
        is_number = isinstance(limit_s, (int, float)) and not isinstance(limit_s, bool)
        if limit_s is not None and not (is_number and limit_s > 0):
            raise InvalidRequestError(
                f"timeout_s must be a number above 0 or None, not {describe(limit_s)}"
            )
        if not callable(self.clock):
            raise InvalidRequestError(f"clock must be a function, not {describe(self.clock)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainQuestion:
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
