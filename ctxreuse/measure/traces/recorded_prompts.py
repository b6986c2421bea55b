"""The prompts of a recording: what a model was sent, and where documents stand in it.

A line of the file is a text that stands in prompts, once, or a prompt: the numbers of its texts,
how many requests were recorded before it, and what names its run. A document in a text is its name
in the corpus; in a recording without text, other lines are salted hashes, as long as they were.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from operator import ne
from pathlib import Path
from typing import Any, NamedTuple

from ctxreuse.context.blocks import BlockId, ContextBlock
from ctxreuse.context.files import file_errors
from ctxreuse.measure.traces.json_lines import JsonLine, read_lines
from ctxreuse.measure.traces.recording import PROMPTS
from ctxreuse.measure.traces.trace_files import TraceRequest, read_requests, trace_path
from ctxreuse.pipeline.known_texts import STARTS, KnownSpan, KnownTexts, words_at
from ctxreuse.pipeline.memories import memories_in
from ctxreuse.pipeline.prompt_turn import PromptPart
from ctxreuse.planning.prompt_records import Slice

MEMORIES = "Mem0"  # as its recorder names itself
_RULE = re.compile(r"\n+[^\w\s<>]{3,}\n+")
_OBJECTS = tuple(map(re.compile, (r"\},\s*\{", r"\[\s*\{", r"\}\s*\]")))  # of JSON, in a list
_QUOTES = {"''", '""'}
_MORE_SPACE = re.compile(r"(?<=\s)\s+\Z")
_TAGS = re.compile(r"</(\w+)>\s*<\1[\s>]")
_BYTES_A_TOKEN = 4
# a name such as "report-3-1" has no place in it
_NUMBER = r"(?<!\w)(?<!\w[-./:#]){}(?![-./:#]?\w)"
_PLACES = ("\ue000", "\ue001")  # stand for a place in a text, counted from 0 and from 1


class RecordedPrompt(NamedTuple):
    """What a model was sent."""

    parts: tuple[PromptPart, ...]
    beside: str  # tools and schemas, in front of it
    after: int  # so many requests were recorded before it
    retrieved: tuple[str | int, ...]  # the requests of its run
    run: str
    framework: str
    tenant: str
    conversation_id: str | int | None
    rendered: frozenset[int] = frozenset()  # the parts whose documents format_context has put in


class DocumentPiece(NamedTuple):
    """A document in a text, with what the application wrote on it."""

    start: int
    end: int
    document: str
    at: int  # where the document itself begins
    # of a memory as JSON: what does not differ from search to search
    lasting: tuple[Slice | str, ...] = ()


def pieces(text: str, spans: Sequence[KnownSpan]) -> list[DocumentPiece]:
    """Cut a text between its documents, at one separator without words; else bare ones."""
    raw = [(one.start, one.end) for one in spans]
    bare = [words_at(start, text[start:end]) for start, end in raw]
    for at in (bare, raw):  # LlamaIndex shows texts stripped
        gaps = {text[end:start] for (_, end), (start, _) in pairwise(at)}
        if len(gaps) == 1:
            break
    # as Python shows a list: those with an apostrophe have other quotes
    is_quoted = {text[start - 1 : start] + text[end : end + 1] for start, end in at} == _QUOTES
    starts, ends = [start - is_quoted for start, _ in at], [end + is_quoted for _, end in at]
    is_cut = len(gaps) != 1 or any(map(str.isalnum, "".join(gaps)))
    for separator, opening, closing in _separators("".join(gaps)) if is_cut else ():
        counts = {len(separator.findall(gap)) for gap in gaps}
        if len(counts) != 1 or counts == {0}:
            continue
        parted = [next(separator.finditer(text, end)).span() for end in ends[:-1]]
        inner = [(end, start) for (_, end), start in zip(parted, starts[1:], strict=True)]
        # around the first and the last one stand as many lines as around the others
        above = max(text.count("\n", *at) for at in inner)
        below = max(text.count("\n", end, at) for end, (at, _) in zip(ends, parted, strict=False))
        begin = starts[0]
        for _ in range(above + 1):
            begin = text.rfind("\n", 0, max(0, begin))
        before = [0, *(one.end() for one in opening.finditer(text, 0, starts[0]))]
        # it stands between the lines above, too
        more = max(len(separator.findall(text, *at)) for at in inner)
        begin = max(begin + 1, before[max(0, len(before) - 1 - more)])
        starts, end = [begin, *(at for at, _ in inner)], closing.search(text, ends[-1])
        lines = text[ends[-1] : end and end.start()].splitlines(keepends=True)[: below + 1]
        ends = [*(at for at, _ in parted), ends[-1] + len("".join(lines).rstrip("\n"))]
        break
    return [
        DocumentPiece(start, end, text[first:last], first)
        for start, end, (first, last) in zip(starts, ends, at, strict=True)
    ]


def _separators(between: str) -> Iterator[tuple[re.Pattern[str], ...]]:
    """Yield what may stand between documents, before the first one, and behind the last one."""
    if (tag := _TAGS.search(between)) is not None:
        opening, closing = rf"(?=<{tag[1]}[\s>])", rf"(?<=</{tag[1]}>)"
        yield tuple(map(re.compile, (rf"{closing}\s*{opening}", opening, closing)))
    if _OBJECTS[0].search(between):
        yield _OBJECTS
    for one in (*_RULE.findall(between)[:1], "\n\n", "\n"):
        yield (re.compile(re.escape(one)),) * 3


def memory_pieces(text: str) -> list[DocumentPiece]:
    """Return the objects of a search result of Mem0 as JSON; none of another text."""
    return [
        DocumentPiece(one.start, one.end, one.memory["memory"], one.start, one.lasting)
        for one in memories_in(text)
    ]


class SeenPrompt(NamedTuple):
    """A prompt, and the documents in its parts, those of messages that are no answers."""

    prompt: RecordedPrompt
    pieces: dict[int, Sequence[DocumentPiece]]
    outside: Sequence[TraceRequest]  # that were recorded since the prompt before

    @property
    def retrieved(self) -> Sequence[str | int]:
        """The requests whose documents it shows: searches of stores and of Mem0 are of no run."""
        return self.prompt.retrieved or [one.request_id for one in self.outside]

    def told(self, is_alone: bool) -> dict[str, Any]:
        """Return what it says of a request, which may show no other turn's documents."""
        parts, first = self.prompt.parts, min(self.pieces)
        shown = {
            one.document.strip(): form
            for number, at in reversed(self.pieces.items())
            for one, form in zip(at, shown_forms(parts[number].text, at), strict=True)
        }
        text = parts[first].text[: self.pieces[first][0].start]
        before = [self.prompt.beside, *(one.text for one in parts[:first]), text]
        is_known = is_alone or all(one.role != "assistant" for one in parts[:first])
        return {
            "shown": shown,
            "framework": self.prompt.framework,
            "front": "\n".join(before).strip() if is_known else None,
            **({"conversation_id": None} if is_alone else {}),
        }


def seen_prompts(
    prompts: Iterable[RecordedPrompt], requests: Sequence[TraceRequest]
) -> Iterator[SeenPrompt]:
    """Find the documents in prompts, of all requests that were recorded before each."""
    known, done = KnownTexts(sys.maxsize, re.compile(f"{STARTS.pattern}|'")), 0
    # by a part's identity: its text stands in several prompts
    found: dict[int, Sequence[DocumentPiece]] = {}
    for prompt in prompts:  # those of threads may have changed places
        outside, done = requests[done : prompt.after], max(done, prompt.after)
        for request in outside:
            number = None if request.source == MEMORIES else 1  # tools that show JSON stay as is
            texts = map(document_text, request.blocks)
            known.add(request.tenant, [form for one in texts for form in forms_of(one)[:number]])
        for part in prompt.parts:
            if part.is_text and part.role != "assistant" and id(part) not in found:
                spans = known.standing_at(prompt.tenant, part.text)
                found[id(part)] = memory_pieces(part.text) or pieces(part.text, spans or ())
        shown = {n: at for n, one in enumerate(prompt.parts) if (at := found.get(id(one)))}
        yield SeenPrompt(prompt, shown, outside)


def forms_of(text: str) -> list[str]:
    """Return a text as it is, and as JSON and Python show it, without quotes."""
    shown = json.dumps(text), json.dumps(text, ensure_ascii=False), repr(text)
    return [text, *(one[1:-1] for one in shown)]


def shown_forms(text: str, at: Sequence[DocumentPiece], *, is_bare: bool = True) -> list[str]:
    """Return documents as a text shows them, their places left out of what stands around them."""
    # a chunk's own line breaks are left out in some prompts only
    sides = [
        [_MORE_SPACE.sub("", text[one.start : one.at]), text[one.at + len(one.document) : one.end]]
        for one in at
    ]
    for first, name in enumerate(_PLACES):
        numbers = (re.compile(_NUMBER.format(place)) for place, _ in enumerate(at, first))
        pairs = zip(numbers, sides, strict=True)
        named = [[number.sub(name, side) for side in both] for number, both in pairs]
        if all(map(ne, named, sides)):  # else it is another number, such as a page's
            sides = named
    texts = (one.document.strip() if is_bare else one.document for one in at)
    return [one.join(both) for one, both in zip(texts, sides, strict=True)]


def with_place(form: str, place: int) -> str:
    """Return one of what `shown_forms` has returned, at a place."""
    for name, number in zip(_PLACES, (place, place + 1), strict=True):
        form = form.replace(name, str(number))
    return form


def read_recording(
    trace: str, corpus: str | None = None, *, independent: bool = False
) -> tuple[dict[BlockId, ContextBlock], list[TraceRequest], list[SeenPrompt]]:
    """Read a trace, its blocks and prompts; turns that show no earlier documents are of no chat.

    Nor is what a client sent, whose recorder names each beginning, and did not see go on.
    """
    blocks, requests = read_requests(trace, corpus)
    prompts = list(seen_prompts(read_prompts(trace_path(trace), blocks), requests))
    found = {name: one for one in reversed(prompts) if one.pieces for name in one.retrieved}
    # of each conversation: in how many messages a later turn's prompt shows documents
    shown_in: dict[object, set[int]] = defaultdict(set)
    for one in requests:
        if one.turn and one.request_id in found:
            shown_in[one.tenant, one.conversation_id].add(len(found[one.request_id].pieces))
    turns = Counter((one.tenant, one.conversation_id) for one in requests)
    for at, one in enumerate(requests):
        seen, chat = found.get(one.request_id), (one.tenant, one.conversation_id)
        is_alone = seen is not None and shown_in[chat] == {1}
        if not is_alone and (independent or (one.sent and turns[chat] == 1)):
            requests[at] = one = replace(one, conversation_id=None, turn=0)
        if seen:
            requests[at] = replace(one, **seen.told(is_alone=is_alone))
    return blocks, requests, prompts


def read_prompts(trace: Path, corpus: Mapping[BlockId, ContextBlock]) -> Iterator[RecordedPrompt]:
    """Read the prompts beside a trace; none if there are none."""
    path = trace.with_name(PROMPTS)
    with file_errors(path, "read"):
        if not path.is_file():
            return
    texts, rendered = dict[str | int, PromptPart](), set[str | int]()
    for line in read_lines(str(path)):
        number = line.natural("text", None)
        if number is not None:
            content = _content(line, corpus)
            texts[number] = PromptPart(
                line.get("role", (str,)), content, line.get("is_text", (bool,), True)
            )
            rendered |= {number} if line.get("is_rendered", (bool,), False) else set()
            continue
        numbers = line.ids("prompt")
        beside = line.natural("beside", None)
        if not texts.keys() >= {*numbers, *([beside] if beside else ())}:
            line.fail("a text of this prompt does not stand before it")
        yield RecordedPrompt(
            tuple(texts[one] for one in numbers),
            texts[beside].text if beside else "",
            line.natural("after", 0),
            tuple(line.ids("retrieved")),
            line.get("run", (str,), ""),
            line.get("framework", (str,), ""),
            line.get("tenant", (str,), ""),
            line.get("conversation_id", (str, int), None),
            frozenset(n for n, one in enumerate(numbers) if one in rendered),
        )


def _content(line: JsonLine, corpus: Mapping[BlockId, ContextBlock]) -> str:
    texts: list[str] = []
    for one in line.get("content", (list,)):
        named = one.get("block") if isinstance(one, dict) else None
        block = corpus.get(named) if isinstance(named, (str, int)) else None
        if block is None and not isinstance(one, str):
            line.fail("field 'content' must hold texts, and blocks that are in the corpus")
        text = one if block is None else document_text(block)
        texts.append(text.strip() if block is not None and one.get("is_bare") else text)
    return "".join(texts)


def document_text(block: ContextBlock) -> str:
    """Return a document's text; of a recording without text, one that is as long."""
    if block.text or not block.tokens:
        return block.text
    name = f"{block.id} "
    size = block.tokens * _BYTES_A_TOKEN
    return (name * (size // len(name) + 1))[:size].strip()
