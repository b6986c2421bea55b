"""Whether anything varies in front of the contexts, where it ends what prompts have in common."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from ctxreuse.measure.table import shortened
from ctxreuse.measure.traces.trace_files import TraceRequest

FRONT_PARTS = ("system text", "first paragraph", "text before the documents")
_SYSTEM, _FIRST, _BEFORE = FRONT_PARTS
_MOST_REQUESTS = 5_000
_MOST_SET_UPS = 8
_MOST_WORDS = 500
_MOST_CHARACTERS = 20_000
_ALIKE = 0.5
OFTEN = 0.1  # share of the requests that begin in a new way from which on this is a problem
_NEARLY_ALL = 0.9
_LONGEST_OPENING = 100  # words; of what is longer, the rest is a document
_CUT_OPENING = re.compile(r"\s*(?:\S+\s+){60}")
_SHOWN_BEFORE = 3
_LONGEST_WORD = 24
_DIGEST = re.compile(r"[0-9a-f]{32}")


class Variation(NamedTuple):
    """Where texts of one set-up part."""

    part: str
    forms: int
    requests: int
    before: str
    values: tuple[str, str]
    tenant: str
    at: int
    all_texts: frozenset[str]

    def __str__(self) -> str:
        first, second = self.values
        parts = f"it begins with “{first}” and with “{second}”"
        if self.before:
            parts = f"“{self.before}” is followed by “{first}” and by “{second}”"
        return f"{self.forms:,} forms of the {self.part} in {self.requests:,} requests: {parts}"

    @property
    def is_often(self) -> bool:
        """Whether so many requests begin in a new way that little can hit."""
        return self.forms > OFTEN * self.requests

    @property
    def remedy(self) -> str:
        """What to do about it."""
        if all(map(is_digest, self.all_texts)):
            return "record some requests without --hash-only: where texts differ is not in this one"
        return "say it behind the documents, such as in the question"


def front_variations(trace: Sequence[TraceRequest]) -> Iterator[Variation]:
    """Yield what varies in front of the contexts of a trace."""
    for part, texts in texts_in_front(first_turns(trace)).items():
        by_tenant: dict[str, Counter[str]] = {}
        for tenant, text in texts:
            by_tenant.setdefault(tenant, Counter())[text] += 1
        for tenant, forms in by_tenant.items():
            several = (one for one in _set_ups(forms) if len(one) > 1)
            yield from (_variation(part, tenant, one) for one in several)


def texts_in_front(requests: Sequence[TraceRequest]) -> dict[str, list[tuple[str, str]]]:
    """Return tenant and text of the requests that have one, for each part of what is in front."""
    return {
        _SYSTEM: [(one.tenant, front_text(_SYSTEM, one)) for one in requests if one.system],
        _FIRST: list(_openings(requests)),
        _BEFORE: [(one.tenant, front_text(_BEFORE, one)) for one in requests if one.front],
    }


def is_digest(system: str | None) -> bool:
    """Return whether a system text is none, but what stands for it in a recording without texts."""
    return system is not None and _DIGEST.fullmatch(system) is not None


def front_text(part: str, request: TraceRequest) -> str:
    """Return a part of a request as far as it is compared: "" if it has none."""
    if part == _FIRST:
        return _opening(request)
    return ((request.system if part == _SYSTEM else request.front) or "")[:_MOST_CHARACTERS]


def fronts_that_differ(trace: Sequence[TraceRequest]) -> int | None:
    """Return in how many of a trace's requests something stands in front that no other one has."""
    requests = first_turns(trace)
    if len(requests) < min(len(trace), _MOST_REQUESTS):
        return None
    is_whole = all(one.sent is not None for one in requests)  # else it may be a document
    found = [one for one in front_variations(trace) if is_whole or one.part != _FIRST]
    varying = [one.forms for one in found if one.forms >= max(2, _NEARLY_ALL * one.requests)]
    different = min(len(requests), sum(varying))
    return different if different >= max(2, _NEARLY_ALL * len(requests)) else None


def behind_fronts(trace: Sequence[TraceRequest]) -> list[TraceRequest]:
    """Return requests with what stands before their documents as a part of their system text."""
    return [
        replace(one, system=f"{one.system or ''} {one.front}") if one.front else one
        for one in trace
    ]


def without_fronts(trace: Sequence[TraceRequest]) -> list[TraceRequest]:
    """Return requests as they are without what varies in front of their documents."""
    alike = {
        (one.tenant, text): min(one.all_texts)
        for one in front_variations(trace)
        for text in one.all_texts
    }
    return [
        replace(
            one,
            system=alike.get((one.tenant, front_text(_SYSTEM, one)), one.system),
            blocks=tuple(block for block in one.blocks if (one.tenant, block.text) not in alike),
        )
        for one in trace
    ]


def first_turns(trace: Sequence[TraceRequest]) -> list[TraceRequest]:
    """Return the requests that are compared."""
    return [one for one in trace if not one.turn][:_MOST_REQUESTS]


def _openings(requests: Sequence[TraceRequest]) -> Iterator[tuple[str, str]]:
    """Yield tenant and first block of requests whose first block is no document."""
    by_tenant: dict[str, list[TraceRequest]] = {}
    for one in requests:
        if len(one.blocks) > 1 and one.blocks[0].text:
            by_tenant.setdefault(one.tenant, []).append(one)
    for tenant, own in by_tenant.items():
        later = {block.text for one in own for block in one.blocks[1:]}
        texts = [_opening(one) for one in own if one.blocks[0].text not in later]
        short = [text for text in texts if text]
        varying = (forms for forms in _set_ups(Counter(short)) if len(forms) > 1)
        if max(map(Counter.total, varying), default=0) >= max(2, _NEARLY_ALL * len(own)):
            yield from ((tenant, text) for text in short)


def _opening(request: TraceRequest) -> str:
    """Return a first block as far as it may be the application's own; "" where it is too long."""
    text = next((block.text for block in request.blocks), "")
    if len(text.split(None, _LONGEST_OPENING)) > _LONGEST_OPENING:
        cut = None if request.sent is None else _CUT_OPENING.match(text)
        text = "" if cut is None else cut[0]
    return text[:_MOST_CHARACTERS]


def _set_ups(forms: Mapping[str, int]) -> list[Counter[str]]:
    """Group texts that share half of their words; of very many groups, the first ones count."""
    found: list[tuple[set[str], Counter[str]]] = []  # with the words of each one's first text
    for text, number in forms.items():
        words = {""} if is_digest(text) else set(text.split(None, _MOST_WORDS)[:_MOST_WORDS])
        near = max(found, key=lambda one: _likeness(one[0], words), default=None)
        if near is None or _likeness(near[0], words) < _ALIKE:
            if len(found) == _MOST_SET_UPS:
                continue
            near = words, Counter()
            found.append(near)
        near[1][text] += number
    return [of_set_up for _, of_set_up in found]


def _likeness(some: set[str], others: set[str]) -> float:
    return len(some & others) / max(1, min(len(some), len(others)))


def _variation(part: str, tenant: str, forms: Counter[str]) -> Variation:
    """Return where texts part: the first place where a tenth of them does, in sorted order."""
    pairs = [(parting(one, other), one, other) for one, other in pairwise(sorted(forms))]
    pairs.sort(key=lambda pair: pair[0])
    place, *_ = pairs[int(OFTEN * len(pairs))]
    at, one, other = next(pair for pair in pairs if pair[0] == place)
    before, values = words_before(one[:at]), (word_at(one, at), word_at(other, at))
    number, texts = forms.total(), frozenset(forms)
    return Variation(part, len(forms), number, before, values, tenant, at, texts)


def words_before(text: str) -> str:
    """Return the last words of a text, shortened."""
    return " ".join(shortened(word, _LONGEST_WORD) for word in text.split()[-_SHOWN_BEFORE:])


def parting(one: str, other: str) -> int:
    """Return where the first word begins that two texts do not share, in characters."""
    shorter = min(len(one), len(other))
    at = bisect_left(range(1, shorter + 1), True, key=lambda end: one[:end] != other[:end])
    while at and not one[at - 1].isspace():
        at -= 1
    return at


def word_at(text: str, at: int) -> str:
    """Return the word at a place of a text, shortened."""
    words = text[at : at + 4 * _LONGEST_WORD].split(None, 1)
    return shortened(words[0], _LONGEST_WORD) if words else "its end"
