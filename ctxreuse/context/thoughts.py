"""What reasoning models think in front of their answers is no part of these."""

from __future__ import annotations

import re

_OPENING = re.compile(r"(?i)\s{0,64}<think(?:ing)?>")
_CLOSING = re.compile(r"(?i)</think(?:ing)?>\s*")
_LONGEST_OPENING, _LONGEST_CLOSING = "<thinking>", "</thinking>"


def without_thoughts(text: str) -> str:
    """Return what a model answered; empty where a thought has no end."""
    closed, at = _CLOSING.search(text), 0
    if closed and not _OPENING.search(text, 0, closed.start()):  # the chat template has opened it
        at = closed.end()
    while opened := _OPENING.match(text, at):
        closed = _CLOSING.search(text, opened.end())
        at = closed.end() if closed else len(text)
    return text[at:]


class ThoughtFilter:
    """Lets the pieces of an answer pass without the thoughts in front of it.

    Where nothing has passed at its end, `without_thoughts` tells what there is.
    """

    def __init__(self) -> None:
        self._held = ""
        self._thinks = self._has_thought = False
        self.has_begun = False  # something has passed

    def take(self, piece: str) -> str:
        """Return what of the answer can be told with a piece more."""
        if self.has_begun:
            return piece
        self._held += piece
        at = 0
        while found := (_CLOSING.search if self._thinks else _OPENING.match)(self._held, at):
            self._thinks, self._has_thought, at = not self._thinks, True, found.end()
        self._held = self._held[at:]
        if self._thinks:
            self._held = self._held[-len(_LONGEST_CLOSING) :]
            return ""
        if self._has_thought:
            self._held = self._held.lstrip()
        may_open = _LONGEST_OPENING.startswith(self._held.lstrip().lower())
        self.has_begun = not may_open or len(self._held) > 64 + len(_LONGEST_OPENING)
        return self._held if self.has_begun else ""
