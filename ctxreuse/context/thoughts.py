"""What reasoning models think in front of their answers is no part of these."""

from __future__ import annotations

import re

_OPENING = re.compile(r"\A\s*<think(?:ing)?>", re.IGNORECASE)
_OPENED = re.compile(r"<think(?:ing)?>", re.IGNORECASE)
_CLOSING = re.compile(r"</think(?:ing)?>", re.IGNORECASE)
_LONGEST_OPENING, _LONGEST_CLOSING = "<thinking>", "</thinking>"


def without_thoughts(text: str) -> str:
    """Return what a model answered; empty where a thought has no end."""
    closed = _CLOSING.search(text)
    if closed and not _OPENED.search(text, 0, closed.start()):  # the chat template has opened it
        text = text[closed.end() :].lstrip()
    answer = ThoughtFilter()
    return answer.take(text) + answer.end()


class ThoughtFilter:
    """Lets the pieces of an answer pass without the thoughts in front of it."""

    def __init__(self) -> None:
        self._held = ""
        self._has_begun = self._has_thought = self._thinks = False

    def take(self, piece: str) -> str:
        """Return what of the answer can be told with a piece more."""
        if self._has_begun:
            return piece
        self._held += piece
        while found := (_CLOSING if self._thinks else _OPENING).search(self._held):
            self._held = self._held[found.end() :]
            self._thinks, self._has_thought = not self._thinks, True
        if self._thinks:
            self._held = self._held[-len(_LONGEST_CLOSING) :]
        self._has_begun = not (
            self._thinks or _LONGEST_OPENING.startswith(self._held.lstrip().lower())
        )
        return self.end() if self._has_begun else ""

    def end(self) -> str:
        """Return the rest, behind which nothing comes."""
        held, self._held = self._held, ""
        if self._thinks:
            return ""
        return held.lstrip() if self._has_thought else held
