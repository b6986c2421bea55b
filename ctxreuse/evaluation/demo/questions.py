"""Questions that many users ask of the Python language reference, in arrival order.

The questions and their order are written for the demo; they are not a log of real traffic.
Several users ask about each theme in their own words, and follow-up questions of a
conversation arrive between the questions of other users.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True, slots=True)
class DemoQuestion:
    """One question as it reaches the server.

    Attributes:
        text: The question in the user's words.
        conversation: Name of the conversation it belongs to, or None for a single question.
        turn: Position in its conversation, from 0.
    """

    text: str
    conversation: str | None
    turn: int


Question = DemoQuestion
"""The former name of `DemoQuestion`."""


def _parse(log: str) -> Iterator[DemoQuestion]:
    """Yield the questions of a log whose entries are a label and a text.

    The label is ``-`` for a single question and ``conversation/turn`` otherwise. Indented
    lines continue the entry above them.
    """
    for entry in re.split(r"\n(?=\S)", log.strip()):
        label, text = entry.split(maxsplit=1)
        conversation, _, turn = label.partition("/")
        words = " ".join(text.split())
        if turn:
            yield DemoQuestion(words, conversation, int(turn))
        else:
            yield DemoQuestion(words, None, 0)


_LOG = resources.files("ctxreuse.evaluation.demo").joinpath("questions.txt")

QUESTIONS: tuple[DemoQuestion, ...] = tuple(_parse(_LOG.read_text(encoding="utf-8")))
"""Every question in arrival order."""
