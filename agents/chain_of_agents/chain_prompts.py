"""The prompts of workers and manager: what repeats comes first, what changes comes last."""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import dataclass

from ctxreuse.errors import InvalidRequestError, describe

_LABEL = re.compile(r"\[\w+\]")
_COMPARED = 20_000
_GROUP = 3
_LEAST_REPEATED = 0.5
_DIGIT = re.compile(r"\d")
_SHORTEST_STEM = 4
_LONGEST_ENDING = 3
_FIRST_WITHOUT_SPACES = "\u0e00"
"""From Thai on, most scripts put no spaces between words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainPrompts:
    """The texts of a chain's prompts.

    Args:
        worker: A worker's system message.
        first: A worker's question, after its segment, where no note came before; `{question}`.
        next: A worker's question after a note; `{note}` then `{question}`.
        manager: The manager's system message.
        note: How the manager is shown a note; `{worker}`, counted from 1, then `{note}`.
        final: The manager's question; `{notes}` then `{question}`.
        no_notes: Replaces the notes where the readers have found nothing.
        nothing: What a worker writes that has found nothing: such a reply is no note.

    Raises:
        InvalidRequestError: A text lacks its field or has another one.
    """

    worker: str = (
        "Note briefly what helps to answer the question, with labels if there are any. If nothing "
        "helps and there is no note yet, write: Nothing relevant."
    )
    first: str = "Question: {question}\n\nWrite your note."
    next: str = (
        "Note of the readers before you:\n{note}\n\nQuestion: {question}\n\n"
        "Write the note again, with what your part adds."
    )
    manager: str = (
        "Several readers have each read a part of a long text. Answer briefly from their notes. If "
        "these do not tell, say so."
    )
    note: str = "Reader {worker}: {note}"
    final: str = "Notes:\n{notes}\n\nQuestion: {question}\n\nAnswer:"
    no_notes: str = "(The readers found nothing.)"
    nothing: str = "Nothing relevant."

    def __post_init__(self) -> None:
        for name, fields in (
            ("first", ["{question}"]),
            ("next", ["{note}", "{question}"]),
            ("note", ["{worker}", "{note}"]),
            ("final", ["{notes}", "{question}"]),
        ):
            template = getattr(self, name)
            if not isinstance(template, str) or re.findall(r"\{[^{}]*\}?|\}", template) != fields:
                raise InvalidRequestError(
                    f"the chain's prompt {name} is {describe(template)}; it must hold "
                    f"{' then '.join(fields)}, each once, and no other braces"
                )
        for name in ("worker", "manager", "no_notes", "nothing"):
            if not isinstance(getattr(self, name), str):
                raise InvalidRequestError(
                    f"the chain's prompt {name} is {describe(getattr(self, name))}; it must be text"
                )


def note_after(prompts: ChainPrompts, note: str, reply: str, question: str) -> str | None:
    """Return the note behind a worker; None where the reply adds nothing to the note before.

    A reply takes the place of those lines of the note that it repeats. A line is repeated by half
    of what it says beyond the question, in groups of letters, if none of its numbers, names and
    longer words is missing.
    """
    said, nothing = _words(reply), _words(prompts.nothing)
    if (said and said == nothing[: len(said)]) or (note and reply in note and reply != note):
        return None
    if not note:
        return reply
    again = _Repetition(reply, question)
    lines = [line for line in note.splitlines() if line.strip() and not again.holds(line)]
    return "\n".join([*lines, reply])


def _words(text: str) -> list[str]:
    return [word.casefold() for word in _all_words(text)]


class _Repetition:
    """What a reply says, to look whether it repeats a line of a note."""

    def __init__(self, reply: str, question: str) -> None:
        self._reply = reply
        self._said, self._asked = _letter_groups(reply), _letter_groups(question)
        self._words = set(_words(reply))
        self._sorted = sorted(self._words)
        self._asked_words = set(_words(question))

    def holds(self, line: str) -> bool:
        """Return whether the reply says what a line does beyond the question."""
        distinctive = _letter_groups(line) - self._asked
        if not distinctive:
            return line.strip() in self._reply
        if len(distinctive & self._said) < _LEAST_REPEATED * len(distinctive):
            return False
        telling = {
            word.casefold()
            for at, word in enumerate(_all_words(line))
            # short words tell nothing, unless numbers, abbreviations, or written without spaces
            if len(word) >= _SHORTEST_STEM
            or _DIGIT.search(word)
            or (at and word.isupper())
            or word >= _FIRST_WITHOUT_SPACES
        }
        return all(map(self._says, telling - self._asked_words))

    def _says(self, word: str) -> bool:
        """Return whether a word is among those of the reply, maybe with another ending."""
        if word in self._words or _DIGIT.search(word) or len(word) < _SHORTEST_STEM:
            return word in self._words
        stem = word[: max(_SHORTEST_STEM, len(word) - _LONGEST_ENDING)]
        at = bisect_left(self._sorted, stem)  # the first word that may begin with it
        return at < len(self._sorted) and self._sorted[at].startswith(stem)


def _all_words(text: str) -> list[str]:
    """Return the words of a text without labels; of scripts without spaces, the letters."""
    words = re.findall(r"\w+", _LABEL.sub("", text[:_COMPARED]))
    return [one for word in words for one in (word if word[0] >= _FIRST_WITHOUT_SPACES else [word])]


def _letter_groups(text: str) -> set[str]:
    """Return the groups of letters and digits that stand side by side in a text."""
    letters = "".join(re.findall(r"\w", _LABEL.sub("", text[:_COMPARED]).casefold()))
    return {letters[start : start + _GROUP] for start in range(len(letters) - _GROUP + 1)}


DEFAULT_PROMPTS = ChainPrompts()
