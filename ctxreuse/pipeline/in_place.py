"""Why a context is planned or stays where it is: one function, one table of words."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal, TypeAlias

from ctxreuse.context.rendering import DEFAULT_TEMPLATES
from ctxreuse.pipeline.context_finder import Context, is_sequence

Reason: TypeAlias = Literal[
    "words_between",
    "behind_changing_words",
    "too_short",
    "sequence",
    "numbers",
    "order",
    "twice",
    "too_long",
]
"""Why a context stays in place; see the guide on what happens to a prompt."""

REMEDIES = {
    "not_found": "they show no text that a retriever returned in the same process and tenant; put "
    "the documents in with format_context, and leave their texts as they are",
    "words_between": "they show documents with words between them; put those in with "
    "format_context(document_prompt=...)",
    "in_history": "their documents stand in messages of earlier turns",
    "behind_changing_words": "something else stands in front of the documents each time; put "
    "{context} before {question}, and no date, name or id in front",
    "too_short": "their documents are shorter than words on their order",
    "sequence": "their documents are parts of one text in reading order",
    "numbers": "the application speaks of citations or numbers, and the documents have none; put "
    "them in with format_context(labels=True)",
    "order": "the application says what the order of the documents means",
    "twice": "they show the same documents twice",
    "too_long": "their texts begin alike too often to be told apart",
}
"""What to change, by what became of prompts."""

_MOST_COMPARED = 64
_LEAST_LENGTH = 2
"""How long documents have to be, in lengths of the words that rank them."""
_WORDS_ON_ORDER = len(DEFAULT_TEMPLATES.order_annotation(["10", "11", "12"]))

_NOUN = "(?:documents?|docs?|passages?|chunks?|paragraphs?|snippets?|excerpts?|match(?:es)?)"
_PLACE = r"(?:numbers?|no\.|ind(?:ex|exes|ices)|ids?|positions?|ranks?)"
_NUMBERS = re.compile(
    r"\b(?:cit(?:e|es|ed|ing|ations?)|footnotes?|numbered|respectively|integers?"
    r"|(?<!multiple )sources?"  # as the default template of a tree of summaries has it
    r"|(?:first|second|third|fourth|fifth|last|main|top|best|primary|other"
    rf"|remaining|next|previous|\d+(?:st|nd|rd|th)) {_NOUN}"
    rf"|{_NOUN} (?:{_PLACE}|\#)|{_NOUN}[ _]\d+|{_PLACE} of (?:the |each |every |all )?{_NOUN}"
    r"|(?:by|its|their|the) (?:numbers?|ind(?:ex|exes|ices)|positions?)"
    rf"|(?:for|score|rate) (?:each|every) {_NOUN}|per {_NOUN}"
    r"|zitier\w*|quellen?|sourc\u00e9e?s?|citer|fuentes?|citar?|fontes|fonti|bronnen"
    r"|nummern?|num\u00e9ros?|n\u00fameros?|numer[ou]?)\b"
    r"|\[\d{1,3}\]"
    r"|\u043d\u043e\u043c\u0435\u0440|\u0438\u0441\u0442\u043e\u0447\u043d\u0438\u043a"
    r"|\u7f16\u53f7|\u5f15\u7528|\u6765\u6e90|\u756a\u53f7|\u51fa\u5178|\ubc88\ud638|\ucd9c\ucc98",
    re.IGNORECASE | re.ASCII,
)
"""Words that may tell texts by their place, or ask an answer to do so, in some languages."""
_OF_A_SCHEMA = re.compile(r'(?i)"type": ?"(?:integer|number)"|ind(?:ex|ices)|position')
_ORDER = re.compile(
    r"\b(?:sorted|chronolog\w*|oldest|newest|earliest|transcript|rank(?:ed|ing|s)"
    r"|order in which|ordered|(?:in|keep) (?:the|this|that|their|its) (?:\w+ )?order"
    r"|(?:in|by) (?:\w+ )?order of|(?:most|least) (?:relevant|recent|important)|best first"
    r"|steps? (?:below|above|in)|(?:these|the|following) steps|conversation so far|key passage"
    r"|supersed\w+|come first|sortiert|geordnet|reihenfolge|tri\u00e9e?s par|ordenad[ao]s"
    r"|ordinat[ei]|cronol\w*)\b|\u65f6\u95f4\u987a\u5e8f|\u6642\u7cfb\u5217|\u0445\u0440\u043e\u043d\u043e\u043b\u043e\u0433",
    re.IGNORECASE,
)
"""Words that may say what the order of texts means."""
_OWN_NUMBER = re.compile(r"\A\W{0,3}(?:[A-Za-z]+[ _]){0,2}#?\d+\W")


def reason_in_place(
    context: Context,
    words: Iterable[str],
    *,
    role: str = "user",
    schema: str = "",
    ranking: re.Pattern[str] | None = None,
    has_new_front: bool = False,
) -> Reason | None:
    """Return why a context stays where it is; `ranking` finds an earlier plan's words on order."""
    texts, message = context.texts[:_MOST_COMPARED], context.message
    if role == "tool":
        return "behind_changing_words"  # it stands behind its question
    if ranking is not None and ranking.search(message, context.end):
        return "order"
    around = message[: context.start], message[context.end :]
    if sum(any(text in other for other in around) for text in texts) * 2 >= len(texts):
        return "twice"
    if is_sequence([span.known.form for span in context.spans]):
        return "sequence"
    if context.end - context.start < _LEAST_LENGTH * _WORDS_ON_ORDER:
        return "too_short"
    is_numbered = context.is_labelled or have_own_numbers(context.texts)
    said = reason_of_words(words, schema, is_numbered=is_numbered)
    return said or ("behind_changing_words" if has_new_front else None)


def reason_of_words(
    words: Iterable[str], schema: str = "", *, is_numbered: bool = False
) -> Reason | None:
    """Return why texts stay where they are for what an application says of them."""
    said = [*words, schema.replace("_", " ")]
    if any(map(_ORDER.search, said)):
        return "order"
    if not is_numbered and (any(map(_NUMBERS.search, said)) or _OF_A_SCHEMA.search(schema)):
        return "numbers"
    return None


def have_own_numbers(texts: Iterable[str]) -> bool:
    """Return whether the application has put a number in front of each text."""
    return all(map(_OWN_NUMBER.match, texts))
