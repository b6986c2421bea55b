"""One agent's call: what it read and noted, at what cost, and whether it was answered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ctxreuse.context.blocks import BlockId
from ctxreuse.errors import CtxreuseError

Role: TypeAlias = Literal["worker", "manager"]

Outcome: TypeAlias = Literal["answered", "empty", "garbage", "failed", "timed out"]
"""How an agent's call ended; only an answered one hands on a note."""

_REPEATED_WORDS = 24
_REPEATED_SHARE = 0.8
_UNREADABLE_SHARE = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One agent's call.

    Attributes:
        role: Whether it is a worker or the manager.
        agent: The worker's number, from 0; -1 for the manager.
        position: Its segment's place among the segments, from 0; -1 for the manager.
        documents: Ids of the documents, or parts of them, that it had to read in this call.
        shown_before: Ids of those that the prompt only points to, because the agent has read them
            earlier in the conversation.
        labels: What each label in its prompt stands for.
        note: What it wrote, as it came.
        outcome: How the call ended.
        error: Why it was not answered, without any text of documents; empty if it was.
        remark: A remark, such as that a history was left out to fit the model.
        replica: The engine that answered; empty where there is only one model.
        prompt_tokens: Tokens of its prompt; None where the model does not report them.
        cached_tokens: Those served from the prefix cache; None is unknown, not 0.
        completion_tokens: Tokens of its answer; None where the model does not report them.
        began_s: When the call began, in seconds from the chain's beginning.
        ended_s: When it ended.
    """

    role: Role
    agent: int
    position: int
    documents: tuple[BlockId, ...] = ()
    shown_before: tuple[BlockId, ...] = ()
    labels: Mapping[str, BlockId] = field(default_factory=dict)
    note: str = ""
    outcome: Outcome = "answered"
    error: str = ""
    remark: str = ""
    replica: str = ""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    began_s: float = 0.0
    ended_s: float = 0.0

    @property
    def name(self) -> str:
        """The agent's name: "worker 3" or "manager"."""
        return "manager" if self.role == "manager" else f"worker {self.agent}"


def outcome_of(text: str | None) -> Outcome:
    """Return whether a model's text is a note, empty, or garbage.

    Garbage is unreadable: no text at all, no letter or digit in it, many characters that cannot be
    printed, or one word over and over.
    """
    if text is None:
        return "garbage"
    if not text.strip():
        return "empty"
    if not any(character.isalnum() for character in text):
        return "garbage"
    unreadable = sum(not character.isprintable() and not character.isspace() for character in text)
    if text.count("\ufffd") + unreadable > _UNREADABLE_SHARE * len(text):
        return "garbage"
    words = text.split()
    [(_, most)] = Counter(words).most_common(1)
    if len(words) >= _REPEATED_WORDS and most > _REPEATED_SHARE * len(words):
        return "garbage"
    return "answered"


def failure_of(error: BaseException) -> tuple[Outcome, str]:
    """Return whether an error is a timeout, and its description.

    The description leaves out the messages of client libraries, which may quote documents.
    """
    description = str(error) if isinstance(error, CtxreuseError) else type(error).__name__
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, TimeoutError) or "Timeout" in type(cause).__name__:
            return "timed out", description
        cause = cause.__cause__
    return "failed", description
