"""Documents of a trace whose text changes from request to request, and what in it changes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ctxreuse.context.blocks import ContextBlock, text_digest
from ctxreuse.measure.traces.trace_files import TraceRequest, block_tokens
from ctxreuse.measure.traces.varying_fronts import parting, word_at, words_before

UNKNOWN = "whether documents change from request to request"
IN_TEXTS = "record some requests without --hash-only"
"""What says whether documents change, of which hashes say nothing."""

_LEAST_SHARE = 0.02  # of the block tokens; less is no cause
_OFTEN = 0.5  # of the times that a document is shown, its text is new
_OTHER_TEXT = re.compile(r"~[0-9a-f]{32}\Z")  # how a recording names further texts of one id
_WITH_DIGITS = re.compile(r"(?<!\S)[^\s\d]*\d\S*")
_FEWEST_WORDS = 16  # shorter texts may be alike by chance
_WORDS_A_NUMBER = 4


class ShownForm(NamedTuple):
    """A document as it was shown once: its block, and the text with what stands around it."""

    block: ContextBlock
    text: str


@dataclass(slots=True)
class _ChangingDocument:
    """The forms of a document, and what each new one has computed again."""

    tenant: str
    is_behind: bool = False
    forms: dict[str, ShownForm] = field(default_factory=dict)
    times: int = 0
    computed: Counter[int] = field(default_factory=Counter)  # tokens, by the request's position

    def add(self, form: ShownForm) -> bool:
        """Take note of a form; return whether the document had another one before."""
        self.times += 1
        before = len(self.forms)
        self.forms.setdefault(form.text, form)
        return 0 < before < len(self.forms)

    @property
    def changes(self) -> bool:
        """Whether so many of its texts are new that it is no family of documents."""
        return self.is_behind and len(self.forms) > max(1, _OFTEN * self.times)


class ChangingDocuments(NamedTuple):
    """What changes in documents."""

    documents: int
    before: str  # words in front of what changes, in its line
    values: tuple[str, str]
    framework: str
    is_around: bool  # it stands on the documents, not in them
    tokens: Mapping[int, int]  # that are computed again, by the request's position
    first: Mapping[tuple[str, str], ShownForm]  # by tenant and text: the document's first form

    def __str__(self) -> str:
        """Return what changes, in words."""
        where = "around the text of" if self.is_around else "in"
        line = f", behind “{self.before}”" if self.before else ""
        first, second = self.values
        return (
            f"a line {where} documents ({self.documents:,}) changes from request to request{line}, "
            f"such as “{first}” and “{second}”"
        )

    @property
    def remedy(self) -> str:
        """What to do about it, as an imperative without a dot."""
        keys = [word[:-1] for word in self.before.split() if word.endswith(":")]
        if self.framework == "llamaindex" and keys:
            if keys[0] == "__last_accessed__":
                return "give TimeWeightedPostprocessor time_access_refresh=False"
            return f'add "{keys[0]}" to the nodes\' excluded_llm_metadata_keys'
        if self.is_around:
            template = "text_template" if self.framework == "llamaindex" else "document_prompt"
            return f"leave it out of what you write on each document ({template})"
        if self.framework == "langchain":
            return "keep it out of page_content, in metadata that document_prompt leaves out"
        return "keep it out of the documents' texts"

    def settled(self, trace: Iterable[TraceRequest]) -> list[TraceRequest]:
        """Return requests in which each document has its first text."""
        return [
            replace(one, blocks=tuple(self._first(one, block) for block in one.blocks))
            for one in trace
        ]

    def _first(self, request: TraceRequest, block: ContextBlock) -> ContextBlock:
        text = request.shown.get(block.text.strip(), block.text)
        form = self.first.get((request.tenant, text))
        return block if form is None else form.block


def hides_texts(trace: Iterable[TraceRequest]) -> bool:
    """Return whether no block of a trace has a text, so that it is unknown whether any changes."""
    return {block.text for one in trace for block in one.blocks} == {""}


def changing_documents(trace: Sequence[TraceRequest]) -> ChangingDocuments | None:
    """Return what changes in a trace's documents; None if that costs hardly anything.

    Documents are one if their ids are, or their words but for those with digits; not if a request
    holds both.
    """
    every = list(_documents(trace))
    documents = [one for one in every if one.changes]
    tokens = Counter[int]()
    for one in documents:
        tokens.update(one.computed)
    total = sum(block_tokens(block) for one in trace for block in one.blocks)
    if tokens.total() <= _LEAST_SHARE * total:
        return None
    worst = max(documents, key=lambda one: one.computed.total())
    (block, text), (other_block, other), *_ = worst.forms.values()
    at = parting(text, other)
    return ChangingDocuments(
        len(documents),
        words_before(text[text.rfind("\n", 0, at) + 1 : at]),
        (word_at(text, at), word_at(other, at)),
        max(one.framework for one in trace),
        block.text == other_block.text,
        tokens,
        {
            (one.tenant, text): next(iter(one.forms.values()))
            for one in every
            if one.changes or len({form.block for form in one.forms.values()}) == 1
            for text in one.forms
        },
    )


def _documents(trace: Sequence[TraceRequest]) -> Iterator[_ChangingDocument]:
    """Yield the documents of a trace, those without a name left out."""
    rows = [{block.key: block for block in one.blocks} for one in trace]
    blocks = {key: block for row in rows for key, block in row.items()}
    names = {key: list(_names(block)) for key, block in blocks.items()}
    several = {
        (request.tenant, name)
        for request, row in zip(trace, rows, strict=True)
        for name, times in Counter(name for key in row for name in names[key]).items()
        if times > 1
    }
    known: dict[tuple[str, str], _ChangingDocument] = {}
    for position, (request, row) in enumerate(zip(trace, rows, strict=True)):
        for place, (key, block) in enumerate(row.items()):
            own = [pair for name in names[key] if (pair := (request.tenant, name)) not in several]
            document = next(filter(None, map(known.get, own)), _ChangingDocument(request.tenant))
            if own and document.add(
                ShownForm(block, request.shown.get(block.text.strip(), block.text))
            ):
                document.computed[position] += block_tokens(block)
            # what always begins a whole prompt are the application's words
            document.is_behind |= place > 0 or request.sent is None
            known |= dict.fromkeys(own, document)
    yield from {id(one): one for one in known.values()}.values()


def _names(block: ContextBlock) -> Iterator[str]:
    """Yield what names a block's document: its id, and its words if few of them have digits."""
    yield f"id {_OTHER_TEXT.sub('', str(block.id))}"
    rest, numbers = _WITH_DIGITS.subn("", block.text)
    words = rest.split()
    if 0 < _WORDS_A_NUMBER * numbers <= len(words) >= _FEWEST_WORDS:
        yield f"words {text_digest(' '.join(words)).hex()}"
