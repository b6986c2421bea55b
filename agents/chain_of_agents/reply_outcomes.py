"""What became of a call: a note that can go on, or why none does."""

from __future__ import annotations

from collections import Counter

from chain_of_agents.trace.steps import Outcome
from ctxreuse.errors import CtxreuseError

_REPEATED_WORDS = 24
_REPEATED_SHARE = 0.8
_UNREADABLE_SHARE = 0.2


def outcome_of(text: str | None) -> Outcome:
    """Return whether a model's text is a note, nothing, or garbage.

    Garbage is what cannot be read: no text at all, no letter or digit in it, much that is no
    character, or one word over and over.
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


def described(error: BaseException) -> str:
    """Return an error in words, without what a foreign message may hold of a document."""
    if isinstance(error, CtxreuseError):
        return str(error)
    return type(error).__name__


def is_timeout(error: BaseException) -> bool:
    """Return whether an error, or what caused it, is that time ran out."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, TimeoutError) or "Timeout" in type(cause).__name__:
            return True
        cause = cause.__cause__
    return False
