"""Prompts as a planner records them, for tests of explanations."""

from typing import Any

from ctxreuse.memory.sent_log import SentEntry


def prompt(request_id: Any, letters: str, tokens: Any = 100, **fields: Any) -> SentEntry:
    """Return a prompt whose blocks are letters; a capital is another text under the same id."""
    counts = [tokens] * len(letters) if isinstance(tokens, int) else tokens
    known: dict[str, Any] = {"tenant": "", "system": None, "is_later_turn": False, "after": None}
    return SentEntry(
        request_id=request_id,
        keys=tuple(letter.encode() for letter in letters),
        ids=tuple(letters.lower()),
        tokens=tuple(counts),
        **{**known, **fields},
    )
