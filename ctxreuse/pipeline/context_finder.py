"""Finding contexts in a prompt's messages, and why one stays where it is."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Literal, NamedTuple, TypeAlias

from ctxreuse.context.blocks import ContextBlock
from ctxreuse.context.rendering import DEFAULT_TEMPLATES
from ctxreuse.pipeline.known_texts import (
    ANY_KIND,
    EXACT_KINDS,
    Form,
    KnownSpan,
    KnownTexts,
    TextList,
    words_at,
)

_TAG = re.compile(r"</?[A-Za-z][\w-]*\s*/?>")
_UNPAIRED = re.compile(r"(?is)<(?:br|hr|sep)\b|.*/>")
_SAID = re.compile(r"[^\W_]|[^\x00-\x7f\s\u2010-\u2027\u2500-\u257f]")  # stars may rate a text
_RULE = 3  # signs of a rule within a line
_SENTENCE_ENDS = tuple(".!?:;\"')]\u2026\u201d\u2019\u3002")

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
    "not_found": "they show no two texts that a retriever returned in the same process and tenant; "
    "if a prompt has several documents, put their unchanged texts in with format_context, in the "
    "tenant's scope (ctxreuse serve: send them as `documents`)",
    "words_between": "they show documents with words between them; put those in with "
    "format_context(document_prompt=...)",
    "in_history": "their documents stand in messages of earlier turns",
    "behind_changing_words": "something else stands in front of the documents each time; put "
    "{context} before {question}, and no date, name or id in front",
    "too_short": "their documents are shorter than words on their order",
    "sequence": "their documents are parts of one text in reading order",
    "numbers": "the application speaks of citations or numbers, and the documents have none; put "
    "them in with format_context(labels=True) (ctxreuse serve: name a `conversation`)",
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
    r"\b(?:cit(?:e[rsz]?|ed|ing|ations?)|footnotes?|numbered|respectively|integers?"
    r"|(?:first|second|third|fourth|fifth|last|main|top|best|primary|other"
    rf"|remaining|next|previous|which|\d+(?:st|nd|rd|th)) {_NOUN}"
    rf"|{_NOUN} (?:{_PLACE}|\#)|{_NOUN}[ _]\d+|{_PLACE} of (?:the |each |every |all )?{_NOUN}"
    r"|(?:by|its|their|the) (?:numbers?|ind(?:ex|exes|ices)|positions?)(?! of)"
    rf"|(?:for|score|rate) (?:each|every) {_NOUN}|per {_NOUN}"
    r"|zitier\w*|quellen?|fuentes?|citar?|fontes|fonti|bronnen"
    r"|nummern?|num\u00e9ros?|n\u00fameros?|numer[ou]?)\b"
    r"|\[\d{1,3}\]|(?<![^\W_])sourc[e\u00e9]"
    r"|\u043d\u043e\u043c\u0435\u0440|\u0438\u0441\u0442\u043e\u0447\u043d\u0438\u043a"
    r"|\u7f16\u53f7|\u5f15\u7528|\u6765\u6e90|\u756a\u53f7|\u51fa\u5178|\ubc88\ud638|\ucd9c\ucc98",
    re.IGNORECASE | re.ASCII,
)
"""Words that may tell texts by their place, or ask an answer to do so, in some languages."""
_NOT_ASKED = re.compile(
    r"\b(?:(?:from|us(?:e|ing)|on|(?:not|information) in|across|read|given|(?:here|below) are) "
    r"(?:(?:only|the|these|any|all|following|given|provided|retrieved|multiple|several|different"
    r"|other|outside|external)\W){1,4}|if (?:the|no) |has a title and a |what is its "
    r"|(?:only|wh(?:at|ere) (?:is|are|was|were)) (?:\w+ ){0,2}"
    r"(?=\w+ of (?!your|each|every|th[ai]|the (?:answer|claim|fact|information)))"
    r"|(?:open|power|light|energy)[ _-])sources?\b(?! (?:that|used|you))"
    r"|\bsource (?:code|language|of truth)|(?:^[ </]*|\. )sources?[:>]\s*$",
    re.IGNORECASE | re.MULTILINE,
)
"""Uses of the word source that ask an answer for none: for the texts, a river's, a heading."""
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
_OWN_NUMBER = re.compile(r"\A(\W{0,3}(?:[A-Za-z]+[ _]{1,3}){0,2}#?)(\d+)\W")


class Context(NamedTuple):
    """Known texts that stand in a message one after the other, with one separator between them."""

    message: str
    spans: tuple[KnownSpan, ...]
    start: int
    end: int
    texts: list[str]
    blocks: list[ContextBlock]  # of labelled texts what stands under the label
    is_labelled: bool  # each text stands under a label of ours
    is_numbered: bool  # the texts begin alike, but for a number of the application's
    separator: str
    ranked: list[int]  # the places of the texts, best first: as their list ranks them, if ours

    @classmethod
    def of(cls, message: str, spans: Sequence[KnownSpan], held: TextList | None) -> Context:
        """Return known texts as a context."""
        known, ranked = [one.known for one in spans], list(range(len(spans)))
        if held and held.take_back:
            ranked.sort(key=lambda place: known[place].rank_in(held) or 0)
        texts = [one.form.text for one in known]
        heads = {(head[1].strip(), head[2]) for one in texts if (head := _OWN_NUMBER.match(one))}
        return cls(
            message,
            tuple(spans),
            spans[0].start,
            spans[-1].end,
            texts,
            [one.block for one in known],
            all(one.form.block is not None for one in known),
            len(heads) == len(set(texts)) and len({words for words, _ in heads}) == 1,
            message[spans[0].end : spans[1].start],
            ranked,
        )


class FoundContexts(NamedTuple):
    """What a message shows of known texts."""

    contexts: tuple[Context, ...]
    has_others: bool  # several other known texts, with words between them
    words: tuple[str, ...]  # outside of known texts
    spans: tuple[KnownSpan, ...]


def is_sequence(forms: Sequence[Form]) -> bool:
    """Return whether neighbours of one document stand in reading order, and none the other way."""
    at = {form.name: place for place, form in enumerate(forms) if form.name is not None}
    steps = [
        at[form.follower] - place
        for place, form in enumerate(forms)
        if form.follower is not None and form.follower in at
    ]
    return 1 in steps and min(steps) > 0


def contexts_in(
    known: KnownTexts,
    tenant: str,
    message: str,
    root: Hashable = None,
    *,
    rendered_only: bool = False,
) -> FoundContexts | None:
    """Return the contexts that a message shows; None where that is too much work.

    A list of the run at hand, else the newest one of each text, whose texts stand in more than one
    run stays where it is: a document would come under another's title.
    """
    spans = known.standing_at(tenant, message)
    if spans is None:
        return None
    if rendered_only:
        spans = [one for one in spans if one.known.is_ours]
    ends = [0, *(one.end for one in spans)]
    starts = [*(one.start for one in spans), len(message)]
    words = tuple([message[end:start] for end, start in zip(ends, starts, strict=True)])
    if len(spans) < 2:
        return FoundContexts((), False, words, tuple(spans))
    runs = list(_runs(message, spans))
    if spans[0].known.form.kind not in EXACT_KINDS:
        bare = [KnownSpan(*words_at(one.start, one.known.form.text), one.known) for one in spans]
        stripped = list(_runs(message, bare))
        if len(stripped) < len(runs) + (message[bare[0].end : bare[1].start] == "\n\n"):
            runs = stripped
    lists = [dict.fromkeys(one.known.list_of(root) for one in run) for run in runs]
    shown = [frozenset(one.known.form.text for one in run) for run in runs]
    # that each list stands in; one that stands there twice is whole both times
    pieces = Counter(chain.from_iterable(dict(zip(shown, lists, strict=True)).values()))
    contexts: list[Context] = []
    others: set[str] = set()
    for run, of_run, texts in zip(runs, lists, shown, strict=True):
        kinds = {one.known.form.kind for one in run} - {ANY_KIND}
        if len(texts) > 1 and len(kinds) < 2 and all(pieces[one] == 1 for one in of_run):
            common = (
                one for one in of_run if all(span.known.rank_in(one) is not None for span in run)
            )
            contexts.append(Context.of(message, run, next(common, None)))
        else:
            others |= texts
    return FoundContexts(tuple(contexts), len(others) > 1, words, tuple(spans))


def _runs(message: str, spans: Sequence[KnownSpan]) -> Iterator[list[KnownSpan]]:
    """Yield the longest runs of texts with the same separator between them."""
    run, joint = [spans[0]], None
    for span in spans[1:]:
        separator = message[run[-1].end : span.start]
        if separator == joint or (joint is None and _joins(separator)):
            run.append(span)
            joint = separator
            continue
        yield _whole(message, run)
        run, joint = [span], None
    yield _whole(message, run)


def _joins(separator: str) -> bool:
    """Return whether nobody has said anything between two texts, and they stand apart.

    What is closed behind a text is opened before the next one.
    """
    bare = _TAG.sub("", separator)
    paired = [one for one in _TAG.findall(separator) if not _UNPAIRED.match(one)]
    closed = [one.strip("</ >") for one in paired if one.startswith("</")]
    if _SAID.search(bare) or closed[::-1] != [one.strip("< >") for one in paired[len(closed) :]]:
        return False
    return "\n" in separator or bare != separator or len(bare.strip()) >= _RULE


def _whole(message: str, run: list[KnownSpan]) -> list[KnownSpan]:
    """Return a run without its last text if that may go on behind it, and without quotations.

    A text at an end of the run that stands in it again may be one in the words around it.
    """
    start, end, _ = run[-1]
    behind = message[end : end + 2]
    goes_on = behind[:1].isalnum() or (
        behind[:1] in (" ", "\t") and not message.endswith(_SENTENCE_ENDS, start, end)
    )
    texts = [one.known.form.text for one in run]
    first, last = 0, len(run) - (goes_on and behind.strip() != "")
    while texts[first] in texts[first + 1 :]:
        first += 1
    while texts[last - 1] in texts[first : last - 1]:
        last -= 1
    return run[first:last]


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
    before, behind = message[: context.start], message[context.end :]
    is_led = before.endswith(tuple(text + context.separator for text in texts))
    if is_led or sum(text in before or text in behind for text in texts) * 2 >= len(texts):
        return "twice"
    if is_sequence([span.known.form for span in context.spans]):
        return "sequence"
    if context.end - context.start < _LEAST_LENGTH * _WORDS_ON_ORDER:
        return "too_short"
    said = reason_of_words(words, schema, is_numbered=context.is_labelled or context.is_numbered)
    return said or ("behind_changing_words" if has_new_front else None)


def reason_of_words(
    words: Iterable[str], schema: str = "", *, is_numbered: bool = False
) -> Reason | None:
    """Return why texts stay where they are for what an application says of them."""
    said = [*words, schema.replace("_", " ")]
    if any(map(_ORDER.search, said)):
        return "order"
    asked = any(_NUMBERS.search(_NOT_ASKED.sub("", one)) for one in said)
    if not is_numbered and (asked or _OF_A_SCHEMA.search(schema)):
        return "numbers"
    return None
