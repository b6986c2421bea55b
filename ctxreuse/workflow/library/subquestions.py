"""Whether a model has another sub-question to ask: small models say "none" in many ways."""

from __future__ import annotations

import re

_LABEL = re.compile(r"\W*(?:(?:next|new|final)\s+)?sub[\s-]?question\s*\d*\s*[:.\-]\W*", re.I)
_FINISHED = re.compile(
    r"\W*(?:"
    r"(?:none|no|nothing|n/?a|done|finished)\W*"
    r"|(?:none|done|finished)\s*[.,;:!(-].*"
    r"|(?:no|none|nothing)\s+(?:are\s+|is\s+)?"
    r"(?:more|further|other|additional|else|needed|required|necessary|left|remaining)\b.*"
    r")",
    re.I,
)


def asks_nothing(text: str) -> bool:
    """Return whether what should be a sub-question says that none is needed.

    Args:
        text: What the model wrote. Only its first line counts, behind a label such as
            "Sub-question:" if there is one.

    Returns:
        True where nothing is written, or "none", "done", "no further questions" and the like; never
        where the line holds a question mark.

    Example:
        >>> [asks_nothing(text) for text in ("None.", "", "Who wrote it?", "None of them won?")]
        [True, True, False, False]
    """
    unlabelled = _LABEL.sub("", text, count=1) if _LABEL.match(text) else text
    line = unlabelled.strip().partition("\n")[0]
    if not any(letter.isalnum() for letter in line):
        return True
    return "?" not in line and _FINISHED.fullmatch(line) is not None
