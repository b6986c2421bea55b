"""One agent's call: what it read and noted, at what cost, and whether it was answered."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from ctxreuse.context.blocks import BlockId
from ctxreuse.errors import CtxreuseError
from ctxreuse.serving.client.reply import field_of

Role: TypeAlias = Literal["worker", "manager"]

Outcome: TypeAlias = Literal["answered", "empty", "garbage", "failed", "timed out"]
"""How an agent's call ended; only an answered one hands on a note."""

_REPEATED_WORDS = 24
_REPEATED_SHARE = 0.8
_UNREADABLE_SHARE = 0.2
_LONG_WORDS = 2_000
_LONGEST_WORDS = 200
_QUOTED = 16
_MOST_CAUSES = 10
_TOO_LONG_STATUS = (400, 422)
_TOO_LARGE_STATUS = 413
_TOO_LONG = re.compile(
    r"context.{0,20}(length|window|size)|maximum (context|model length)"
    r"|(prompt|input|request)s? ((is|are) )?too long|too many (input )?tokens"
    r"|exceeds? .{0,40}(tokens|context|session_len)|`inputs` (tokens|must have less)",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One agent's call.

    Attributes:
        role: Whether it is a worker or the manager.
        agent: The worker's number, from 0; -1 for the manager.
        position: Its segment's place among the segments, from 0; -1 for the manager.
        documents: Ids of the documents, or parts of them, that it had to read in this call.
        document_tokens: How long these are together, as the planner counts; at least 1 each.
        shown_before: Ids of those that the prompt only points to, read earlier in the conversation.
        labels: What each label in its prompt stands for.
        note: What it wrote, as it came, without a reasoning model's thoughts.
        outcome: How the call ended.
        error: Why it was not answered, without any text of documents; empty if it was.
        remark: What else happened, such as that a history was left out to fit the model.
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
    document_tokens: int = 0
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


def remarked(step: Step, remark: str) -> Step:
    """Return a step with a further remark."""
    return replace(step, remark="; ".join(filter(None, (step.remark, remark))))


def outcome_of(text: str | None) -> Outcome:
    """Return whether a model's text is a note, empty, or unreadable: garbage."""
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


def failure_of(error: BaseException, prompt: str = "") -> tuple[Outcome, str]:
    """Return whether an error is a timeout, and its description."""
    # messages of client libraries may quote documents
    description = str(error) if isinstance(error, CtxreuseError) else type(error).__name__
    words = server_words(error)[:_LONGEST_WORDS]
    pieces = (words[at : at + _QUOTED] for at in range(max(1, len(words) - _QUOTED + 1)))
    if words and not any(piece in prompt for piece in pieces):  # one word alone quotes nothing
        description += f"; the server says {words!r}"
    if any(
        isinstance(one, TimeoutError) or "Timeout" in type(one).__name__ for one in _causes(error)
    ):
        return "timed out", description
    return "failed", description


def is_too_long(error: BaseException) -> bool:
    """Return whether a model has refused a prompt because its context has no room for it."""
    named = any("ContextOverflow" in type(one).__name__ for one in _causes(error))
    refused = {getattr(one, "status_code", None) for one in _causes(error)}
    if named or _TOO_LARGE_STATUS in refused:
        return True
    in_words = _TOO_LONG.search(server_words(error)) is not None
    return in_words and not refused.isdisjoint(_TOO_LONG_STATUS)


def server_words(error: BaseException) -> str:
    """Return what the server has said with an error status, in one line; empty if nothing."""
    for one in _causes(error):
        body = getattr(one, "body", None)
        if getattr(one, "status_code", None) is not None and body is not None:
            words = field_of(body, "message") or field_of(body, "error", "message") or body
            if isinstance(words, str):
                shown = "".join(sign if sign.isprintable() else " " for sign in words[:_LONG_WORDS])
                return " ".join(shown.split())
    return ""


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    for _ in range(_MOST_CAUSES):
        if cause is None:
            return
        yield cause
        cause = cause.__cause__
