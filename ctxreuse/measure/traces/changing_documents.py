"""Documents of a trace whose text changes from request to request, and what in it changes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from ctxreuse.context.blocks import ContextBlock, text_digest
from ctxreuse.measure.traces.recorded_prompts import MEMORIES, forms_of
from ctxreuse.measure.traces.trace_files import TraceRequest, block_tokens
from ctxreuse.measure.traces.varying_fronts import parting, word_at, words_before

UNKNOWN = "whether documents change from request to request"
IN_TEXTS = "record some requests without --hash-only"  # for hashes say nothing of it

_LEAST_SHARE = 0.02  # of the block tokens; less is no cause
_OFTEN = 0.5  # of the times that a document is shown, its text is new
_OTHER_TEXT = re.compile(r"~[0-9a-f]{32}\Z")  # how a recording names further texts of one id
_WITH_DIGITS = re.compile(r"(?<!\S)[^\s\d]*\d\S*")
_FEWEST_WORDS = 16  # shorter texts may be alike by chance
_WORDS_A_NUMBER = 4
_METADATA = re.compile(r"\S.*?: ")  # a line of a node's
_WORD = re.compile(r"[^\s,()\[\]{}<>]+")
_FIELD = re.compile(
    rf"(?:, )?(?:(?<!\S)\S{{1,40}}: +)?({_WORD.pattern}) ?"
)  # a word, with its name


@dataclass(slots=True)
class _ChangingDocument:
    """The forms of a document, and what each new one has computed again."""

    tenant: str
    is_behind: bool = False
    forms: dict[str, ContextBlock] = field(default_factory=dict)  # by the text as it is shown
    times: int = 0
    computed: Counter[int] = field(default_factory=Counter)  # tokens, by the request's position

    def add(self, block: ContextBlock, shown: str) -> bool:
        """Take note of a form; return whether the document had another one before."""
        self.times += 1
        before = len(self.forms)
        self.forms.setdefault(shown, block)
        return 0 < before < len(self.forms)

    @property
    def changes(self) -> bool:
        """Whether so many of its texts are new that it is no family of documents."""
        return self.is_behind and len(self.forms) > max(1, _OFTEN * self.times)

    def changed(self, text: str) -> dict[str, str]:
        """Return the lines of a text that change, and what of them all forms have."""
        lasting = set.intersection(*(set(_WORD.findall(form)) for form in self.forms))
        kept = partial(_FIELD.sub, lambda found: found[0] if found[1] in lasting else "")
        lines = ((line, kept(line)) for line in text.splitlines(keepends=True))
        return {line: kept for line, kept in lines if kept != line}

    def settled(self, often: Set[str]) -> tuple[ContextBlock, str]:
        """Return the first form without lines that change and say nothing but what others say."""
        (first, block), *_ = self.forms.items()
        own, text = self._without(block.text, often), self._without(first, often)
        if len(own) < _OFTEN * len(block.text) or not any(x in text for x in forms_of(own.strip())):
            return block, first  # another text with the same name
        if own != block.text:
            block = ContextBlock(text=own.strip(), id=block.id)
        return block, text

    def _without(self, text: str, often: Set[str]) -> str:
        changed = self.changed(text)
        lines = ((line, changed.get(line, line)) for line in text.splitlines(keepends=True))
        return "".join(x for line, x in lines if x == line or {*_WORD.findall(x)} - often)


_TEMPLATES = {"langchain": " (document_prompt)", "llamaindex": " (text_template)"}


class ChangingDocuments(NamedTuple):
    """What changes in documents."""

    documents: int
    before: str  # words in front of what changes, in its line
    values: tuple[str, str]
    framework: str
    keys: Sequence[str]  # of LlamaIndex's metadata
    is_around: bool  # it stands on the documents, not in them
    tokens: Mapping[int, int]  # that are computed again, by the request's position
    # by tenant and text, the document without them: its block, and as it is shown
    without: Mapping[tuple[str, str], tuple[ContextBlock, str]]

    def __str__(self) -> str:
        where = "around the text of" if self.is_around else "in"
        behind = f", behind “{self.before}”" if self.before else ""
        return (
            f"lines {where} documents ({self.documents:,}) change from request to request{behind}, "
            f"such as “{'” and “'.join(self.values)}”"
        )

    @property
    def remedy(self) -> str:
        """What to do about it, as an imperative without a dot."""
        if self.keys == ["__last_accessed__"]:
            return "give TimeWeightedPostprocessor time_access_refresh=False"
        if self.keys:
            named = " and ".join(f'"{one}"' for one in self.keys)
            return f"add {named} to the nodes' excluded_llm_metadata_keys"
        one = "memory" if self.framework == MEMORIES else "document"
        if self.is_around:
            template = _TEMPLATES.get(self.framework, "")
            return f"leave them out of what you write on each {one}{template}"
        if self.framework == "langchain":
            return "keep them out of page_content, in metadata that document_prompt leaves out"
        return f"keep them out of each {one}'s text"

    def settled(self, trace: Iterable[TraceRequest]) -> list[TraceRequest]:
        """Return requests whose documents are without what changes."""
        without, settled = self.without, list[TraceRequest]()
        for one in trace:
            blocks = (without.get((one.tenant, _as_shown(one, x)), (x,))[0] for x in one.blocks)
            settled.append(replace(one, blocks=tuple(blocks)))
        return settled


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
    (text, block), (other, other_block), *_ = worst.forms.items()
    at, is_around = parting(text, other), block.text == other_block.text
    lines, metadata = worst.changed(text), text.partition("\n\n")[0]
    [(source, _)] = Counter(one.source for one in trace).most_common(1)
    framework = source if source == MEMORIES else max(one.framework for one in trace)
    is_metadata = framework == "llamaindex" and all(map(_METADATA.match, metadata.splitlines()))
    keys = [one.partition(": ")[0] for one in lines if is_metadata and one in f"{metadata}\n"]
    changed = (" ".join(one.changed(next(iter(one.forms))).values()) for one in documents)
    said = Counter(word for one in changed for word in set(_WORD.findall(one)))
    often = {word for word, number in said.items() if number > max(1, _OFTEN * len(documents))}
    settled = {
        (one.tenant, text): form
        for one in every
        if one.changes or len({*one.forms.values()}) == 1 < len(one.forms)
        for form in (one.settled(often),)
        for text in one.forms
    }
    before = words_before(text[text.rfind("\n", 0, at) + 1 : at])
    values, number = (word_at(text, at), word_at(other, at)), len(documents)
    keys = [] if is_around else keys
    return ChangingDocuments(number, before, values, framework, keys, is_around, tokens, settled)


def _documents(trace: Sequence[TraceRequest]) -> Iterator[_ChangingDocument]:
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
            if own and document.add(block, _as_shown(request, block)):
                document.computed[position] += block_tokens(block)
            # what always begins a whole prompt are the application's words
            document.is_behind |= place > 0 or request.sent is None
            known |= dict.fromkeys(own, document)
    yield from {id(one): one for one in known.values()}.values()


def _as_shown(request: TraceRequest, block: ContextBlock) -> str:
    """Return a block's text as prompts show it, with what stands around it, if known."""
    return request.shown.get(block.text.strip(), block.text)


def _names(block: ContextBlock) -> Iterator[str]:
    """Yield what names a block's document: its id, and its words if few of them have digits."""
    yield f"id {_OTHER_TEXT.sub('', str(block.id))}"
    rest, numbers = _WITH_DIGITS.subn("", block.text)
    words = rest.split()
    if 0 < _WORDS_A_NUMBER * numbers <= len(words) >= _FEWEST_WORDS:
        yield f"words {text_digest(' '.join(words)).hex()}"
