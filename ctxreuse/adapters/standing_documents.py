"""Finding retrieved documents that an application has joined into a prompt by itself."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ctxreuse.adapters.context_search import FoundContext, block_span
from ctxreuse.context.blocks import ContextBlock, text_digest
from ctxreuse.context.rendering import Templates
from ctxreuse.planning.plan import Plan

_MOST_STARTS = 8
_LONGEST_SEPARATOR = 64
_LEAST_LENGTH = 2
"""How long documents have to be, in lengths of the words that rank them."""
_SEPARATOR = re.compile(r"[ \t\r]*\n(?:[ \t\r\n\-=_*#~]*\n)?[ \t]*")
"""The end of a line, and lines that are empty or a rule."""
_BEFORE = re.compile(r"(?:\A|[\n:>(\[]|\"\"\"|```)[ \t]{0,16}\Z")
_BEHIND = re.compile(r"[ \t]{0,16}(?:\Z|[\r\n<)\]]|\"\"\"|```)")
"""Elsewhere the last document may be the beginning of a longer one, and the first one an end."""


_NOUN = (
    "(?:documents?|docs?|passages?|chunks?|paragraphs?|snippets?|excerpts?|contexts?|match(?:es)?)"
)
_PLACE = r"(?:numbers?|no\.|ind(?:ex|exes|ices)|ids?|positions?|ranks?)"
_PLACES = re.compile(
    r"\b(?:cit(?:e|es|ed|ing|ations?)|footnotes?|numbered|respectively|order in which"
    r"|(?<!multiple )sources?"  # as the default template of a tree of summaries has it
    r"|(?:in|keep) (?:the|this|that|their|its) (?:\w+ )?order"
    rf"|(?:first|second|third|fourth|fifth|last|main|top|best|primary|(?:most|least) relevant|other"
    rf"|remaining|next|previous|\d+(?:st|nd|rd|th)) {_NOUN}"
    rf"|{_NOUN} (?:{_PLACE}|\#)|{_NOUN}[ _]\d+|{_PLACE} of (?:the |each |every |all )?{_NOUN}"
    r"|zitier\w*|quellen?|sourc\u00e9e?s?|citer|fuentes?|citar|fonti)\b"
    r"|\[\d{1,3}\]",
    re.IGNORECASE | re.ASCII,
)
"""Words that may tell documents by their place, or ask an answer to do so."""
_NUMBERS = re.compile(r'"type": ?"(?:integer|number)"')
_LEAST_SHOWN = 20
"""Characters; a shorter text may stand anywhere by chance."""
_MOST_LOOKED_FOR = 16


class StandingDocuments(NamedTuple):
    """Documents that stand in a text."""

    start: int
    text: str
    spans: tuple[tuple[int, int, int], ...]

    @property
    def end(self) -> int:
        """Where they end in the text that they stand in."""
        return self.start + len(self.text)


class JoinedContext(NamedTuple):
    """Documents that an application joined into one of a prompt's texts."""

    text: int
    start: int
    found: FoundContext


def joined_context(
    texts: Sequence[str], retrieved: Sequence[Sequence[ContextBlock]]
) -> JoinedContext | None:
    """Return the documents that an application joined into the texts of a prompt."""
    longest: tuple[int, StandingDocuments] | None = None
    found: JoinedContext | None = None
    for blocks in sorted(retrieved, key=len, reverse=True):
        documents = [one.text for one in blocks]
        standing = [
            (number, standing_documents(text, documents)) for number, text in enumerate(texts)
        ]
        for number, one in standing:
            if one is None:
                continue
            if longest is None:
                longest = number, one
                found = JoinedContext(number, one.start, _found(one, blocks))
            elif not (longest[0] == number and _is_inside(one, longest[1])):
                return None
    if found is not None:
        others = (*texts[: found.text], *texts[found.text + 1 :])
        if any(found.found.text in text for text in others):
            return None
    return found


def may_be_moved(
    joined: JoinedContext, texts: Sequence[str], retrieved: Sequence[Sequence[ContextBlock]]
) -> bool:
    """Return whether joined documents mean the same in another order."""
    around = list(texts)
    given = around[joined.text]
    end = joined.start + len(joined.found.text)
    around[joined.text : joined.text + 1] = given[: joined.start], given[end:]
    if any(map(names_places, around)):
        return False
    others = {one.text.strip() for blocks in retrieved for one in blocks}
    return not any(
        other in text for other in others if len(other) >= _LEAST_SHOWN for text in around
    )


def shows_several(texts: Sequence[str], retrieved: Sequence[Sequence[ContextBlock]]) -> bool:
    """Return whether texts show two different documents of one list, in whatever way."""
    for blocks in retrieved:
        documents = {one.text.strip() for one in blocks[:_MOST_LOOKED_FOR]}
        shown = (
            any(document in text for text in texts)
            for document in documents
            if len(document) >= _LEAST_SHOWN
        )
        if sum(shown) > 1:
            return True
    return False


def names_places(text: str) -> bool:
    """Return whether a text may tell documents by their place, or ask an answer to do so."""
    return _PLACES.search(text) is not None


def asks_for_places(schema: str) -> bool:
    """Return whether tools or an answer's schema may ask for the places of documents."""
    return names_places(schema.replace("_", " ")) or _NUMBERS.search(schema) is not None


def standing_documents(text: str, documents: Sequence[str]) -> StandingDocuments | None:
    r"""Return how documents stand in a text, all, whole, in order, once; else None."""
    whole = {number: one for number, one in enumerate(documents) if one.strip()}
    bare = {number: one.strip() for number, one in whole.items()}
    if len(set(bare.values())) < 2:
        return None
    return _standing(text, whole) or _standing(text, bare)


def is_worth_ranking(found: FoundContext, templates: Templates) -> bool:
    """Return whether joined documents are long enough for the words that rank them."""
    places = map(str, range(1, len(found.spans) + 1))
    words = templates.order_annotation(list(places))
    return len(found.text) >= _LEAST_LENGTH * len(words)


def render_joined(plan: Plan, given: FoundContext) -> str:
    """Return what is sent for joined documents now that they are planned."""
    planned = [block.text for block in plan.blocks]
    as_given = [given.text[start:end] for _, start, end, *_ in given.spans]
    texts = [*planned, *(Counter(as_given) - Counter(planned)).elements()]
    if texts == as_given or sorted(texts) != sorted(as_given):
        return given.text
    text = joined_separator(given).join(texts)
    if plan.order_annotation is None:
        return text
    place_of = {block.key: str(place) for place, block in enumerate(plan.blocks, start=1)}
    places = [place_of[key] for key in plan.request.unique_blocks]
    return f"{text}{plan.templates.separator}{plan.templates.order_annotation(places)}"


def joined_separator(given: FoundContext) -> str:
    """Return what stands between each two of joined documents."""
    (_, _, end, *_), (_, start, *_) = given.spans[:2]
    return given.text[end:start]


def _standing(text: str, documents: Mapping[int, str]) -> StandingDocuments | None:
    first, start = next(iter(documents.values())), -1
    for _ in range(_MOST_STARTS):
        start = text.find(first, start + 1)
        if start < 0:
            return None
        found = _standing_at(text, start, documents)
        if found is not None:
            return None if text.find(found.text, start + 1) >= 0 else found
    return None


def _standing_at(text: str, start: int, documents: Mapping[int, str]) -> StandingDocuments | None:
    """Return the documents if they stand one after the other from a position on."""
    if not _BEFORE.search(text, max(0, start - 20), start):
        return None
    spans: list[tuple[int, int, int]] = []
    end, separator = start, ""
    for number, document in documents.items():
        if len(spans) == 1:
            within = end + _LONGEST_SEPARATOR + len(document)
            separator = text[end : max(end, text.find(document, end, within))]
            if not _SEPARATOR.fullmatch(separator):
                return None
        begin = end + len(separator)
        if text[end:begin] != separator or not text.startswith(document, begin):
            return None
        end = begin + len(document)
        spans.append((number, begin - start, end - start))
    if not _BEHIND.match(text, end):
        return None
    return StandingDocuments(start, text[start:end], tuple(spans))


def _found(standing: StandingDocuments, blocks: Sequence[ContextBlock]) -> FoundContext:
    """Return documents as a context; equal ones are one block, with the first of their ids."""
    placed = [
        (start, ContextBlock(id=blocks[number].id, text=standing.text[start:end]))
        for number, start, end in standing.spans
    ]
    by_id = sorted((block for _, block in placed), key=lambda one: repr(one.id), reverse=True)
    block_of = {one.text: one for one in by_id}  # whatever order equal ones were retrieved in
    spans = tuple(block_span(block_of[block.text], start) for start, block in placed)
    return FoundContext(standing.text, text_digest(standing.text), spans, is_joined=True)


def _is_inside(one: StandingDocuments, other: StandingDocuments) -> bool:
    return other.start <= one.start and one.end <= other.end
