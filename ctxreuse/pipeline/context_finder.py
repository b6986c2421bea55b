"""Finding contexts in a prompt's messages: known texts with one separator between them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from ctxreuse.context.blocks import ContextBlock
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


class Context(NamedTuple):
    """Known texts that stand in a message one after the other."""

    message: str
    spans: tuple[KnownSpan, ...]
    start: int
    end: int
    texts: list[str]
    blocks: list[ContextBlock]  # of labelled texts what stands under the label
    is_labelled: bool  # each text stands under a label of ours
    separator: str  # between each two
    ranked: list[int]  # the places of the texts, best first: as their list ranks them, if ours

    @classmethod
    def of(cls, message: str, spans: Sequence[KnownSpan], held: TextList | None) -> Context:
        """Return known texts as a context."""
        known, ranked = [one.known for one in spans], list(range(len(spans)))
        if held is not None and held.take_back is not None:
            ranked.sort(key=lambda place: known[place].rank_in(held) or 0)
        return cls(
            message,
            tuple(spans),
            spans[0].start,
            spans[-1].end,
            [one.form.text for one in known],
            [one.block for one in known],
            all(one.form.block is not None for one in known),
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
