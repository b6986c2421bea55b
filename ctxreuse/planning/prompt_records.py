"""How prompts were sent, and what became of them: no text."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

from ctxreuse.context.fork_safety import ForkSafeLock
from ctxreuse.context.rendering import Templates

_LEAST_WORK = 1 << 22
_WORK_A_CHARACTER = 256


class Slice(NamedTuple):
    """Characters of what was given."""

    start: int
    end: int


class ShownTexts:
    """The texts that stand before a message; looks in them with bounded work."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._length, self._work = 0, _LEAST_WORK

    def add(self, text: str) -> None:
        """Add a text that is shown behind all others."""
        self._texts.append(text)
        self._length += len(text)
        self._work += _WORK_A_CHARACTER * len(text)

    def show(self, text: str) -> bool:
        """Return whether a text stands in one of them; what takes too much work does not."""
        self._work -= self._length
        return self._work >= 0 and any(text in one for one in self._texts)


class LeftText(NamedTuple):
    """A text that was left out, as it would be shown, and the label that it has there."""

    pieces: tuple[Slice | str, ...]
    label: str


class Left(NamedTuple):
    """Texts that were left out, with words on them in their place."""

    texts: tuple[LeftText, ...]
    separator: str  # between texts, and words on them

    def applied(self, given: str, templates: Templates, before: ShownTexts | None) -> str:
        """Return words on the texts; what those before no longer show comes again."""
        shown, labels = list[str](), list[str]()
        for pieces, label in self.texts:
            text = made_of(given, pieces)
            if before is None or before.show(text):
                labels.append(label)
            else:
                shown.append(text)
        return self.separator.join([*shown, *filter(None, templates.location_annotations(labels))])


Piece: TypeAlias = Slice | Left | str
"""A piece of what was sent: of what was given, texts that were left out, or words of ours."""


def made_of(given: str, pieces: Iterable[Slice | str]) -> str:
    """Return what is made of pieces of what was given, and words of ours."""
    return "".join([one if isinstance(one, str) else given[slice(*one)] for one in pieces])


class Edit(NamedTuple):
    """How a message was sent, without its text."""

    pieces: tuple[Piece, ...] | None = None  # in order; None for what was sent as given
    cuts: tuple[int, ...] = ()  # the lengths of its parts, where a cache has breakpoints
    marks: tuple[int, ...] = ()  # parts with a breakpoint behind them; -1 is what stands before
    group: tuple[str, ...] = ()  # the names of its prefix group

    def applied(self, given: str, templates: Templates, before: ShownTexts | None = None) -> str:
        """Return what is sent for a text; `before` is what stands before it now, if that is new."""
        if self.pieces is None:
            return given
        texts = [
            one.applied(given, templates, before) if isinstance(one, Left) else one
            for one in self.pieces
        ]
        return made_of(given, texts)

    def encoded(self) -> bytes:
        """Return it as planners keep it: as JSON."""
        return json.dumps(self).encode()

    @classmethod
    def decoded(cls, written: bytes | None) -> Edit | None:
        """Return an edit that was written by `encoded`; None for anything else."""
        try:
            return None if written is None else cls.of_json(json.loads(written))
        except (ValueError, RecursionError):
            return None

    @classmethod
    def of_json(cls, value: Any, length: int = sys.maxsize) -> Edit | None:
        """Return an edit of a text of some length; None for anything else."""
        try:
            pieces, cuts, marks, group = value
            read = None if pieces is None else tuple(_of_json(one, length) for one in pieces)
            is_sound = all(type(one) is int for one in (*cuts, *marks))
            is_sound &= min(cuts, default=0) >= 0 and all(isinstance(one, str) for one in group)
        except (TypeError, ValueError, LookupError, AttributeError, RecursionError):
            return None
        return cls(read, tuple(cuts), tuple(marks), tuple(group)) if is_sound else None


def _of_json(value: Any, length: int) -> Piece:
    if isinstance(value, str):
        return value
    if isinstance(value[0], list):
        texts, separator = value
        read = [(tuple(_of_json(one, length) for one in pieces), label) for pieces, label in texts]
        labels = [label for _, label in read]
        if not all(isinstance(one, str) for one in (*labels, separator)):
            raise ValueError("labels are strings")
        if any(isinstance(one, Left) for pieces, _ in read for one in pieces):
            raise ValueError("what is left out is made of texts")
        return Left(tuple(LeftText(*one) for one in read), separator)  # type: ignore[arg-type]
    start, end = value
    if not (type(start) is type(end) is int and 0 <= start <= end <= length):
        raise ValueError("it does not stand in the text")
    return Slice(start, end)


class PromptRecords:
    """What became of a planner's prompts. Thread-safe."""

    def __init__(self) -> None:
        self._lock = ForkSafeLock(self._forget_all)
        self._forget_all()

    def _forget_all(self) -> None:
        self._counts: Counter[str] = Counter()
        self._silent: dict[str, Counter[str]] = {}

    def counts(self) -> Counter[str]:
        """Return what became of prompts, by its name."""
        with self._lock:
            return self._counts.copy()

    def count(self, kind: str, outcomes: Iterable[str]) -> Counter[str]:
        """Count what became of a wrapper's prompts; return that of all since one was planned."""
        with self._lock:
            silent = self._silent.setdefault(kind, Counter())
            for one in outcomes:
                self._counts[one] += 1
                silent[one] += 1
                if one == "planned":
                    silent.clear()
            return silent.copy()
