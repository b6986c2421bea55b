"""Corpora and retrieval traces, as JSON lines or as arrays of such objects.

A corpus line is a block: `id` (or `_id`, as BEIR has it), `text`, `tokens`, of which one of the
latter two may be missing, and optionally `title`, for people. A trace line is a retrieval, in
arrival order: `request_id`, `query`, `blocks` (ids, best first), and optionally `conversation_id`,
`turn`, `tenant`, `system`, `timestamp` (of its arrival, in milliseconds), `output_tokens` (of its
answer), `sent` (how it was sent; see `sent_calls`), `marks` (after how many of its blocks a mark
stood; 0 is behind the system text). Further fields are skipped. A TREC run is a trace, too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

from ctxreuse.context.blocks import BlockId, ContextBlock
from ctxreuse.context.checks import checked_kind
from ctxreuse.context.files import file_errors
from ctxreuse.context.tokens import estimate_tokens
from ctxreuse.errors import InputFileError, InvalidBlockError, describe
from ctxreuse.measure.traces.json_lines import STANDARD_STREAM, JsonLine, read_lines
from ctxreuse.measure.traces.recording import CORPUS, TRACE
from ctxreuse.measure.traces.sent_calls import SentCall, sent_call_of

Corpus = Mapping[BlockId, ContextBlock]

Titles = Mapping[BlockId, str]  # what people know blocks by


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One retrieval of a trace."""

    request_id: str | int
    query: str
    blocks: tuple[ContextBlock, ...]
    conversation_id: str | int | None = None
    turn: int = 0
    tenant: str = ""
    system: str | None = None
    timestamp_ms: float | None = None
    output_tokens: int | None = None
    sent: SentCall | None = None
    marks: tuple[int, ...] | None = None
    # of a recording
    source: str = ""  # what was asked
    front: str | None = None  # what stands before its documents
    shown: Mapping[str, str] = field(default_factory=dict)  # by text: with what stands around it
    framework: str = ""


def request_fields(line: JsonLine) -> dict[str, Any]:
    """Return what lines of traces and of plans say alike of a request."""
    return {
        "request_id": line.get("request_id", (str, int)),
        "query": line.get("query", (str,), ""),
        "conversation_id": line.get("conversation_id", (str, int), None),
        "turn": line.natural("turn", 0),
        "tenant": line.get("tenant", (str,), ""),
        "system": line.get("system", (str,), None),
        "timestamp_ms": line.amount("timestamp", None),
        "sent": sent_call_of(line),
    }


def block_tokens(block: ContextBlock) -> int:
    """Return a block's length: as the corpus says, or else estimated."""
    return estimate_tokens(block.text) if block.tokens is None else block.tokens


def read_corpus(path: str) -> dict[BlockId, ContextBlock]:
    """Read a corpus."""
    corpus: dict[BlockId, ContextBlock] = {}
    for line in read_lines(path):
        block_id = _id_of(line)
        tokens = line.natural("tokens", None)
        text = line.get("text", (str,), ... if tokens is None else "")
        try:
            block = ContextBlock(id=block_id, text=text, tokens=tokens)
        except InvalidBlockError as error:
            line.fail(str(error))
        earlier = corpus.setdefault(block_id, block)
        if earlier.text != text:
            line.fail(
                f"id {describe(block_id)} has had another text before; give every text its own id"
            )
    return corpus


def _id_of(line: JsonLine) -> BlockId:
    is_beir = "_id" in line.fields and "id" not in line.fields
    block_id: BlockId = line.get("_id" if is_beir else "id", (str, int))
    return block_id


def read_titles(path: str) -> dict[BlockId, str]:
    """Read the titles of a corpus's blocks: of those that have one."""
    if path == STANDARD_STREAM:
        return {}  # it has been read
    titles = ((_id_of(line), line.fields.get("title")) for line in read_lines(path))
    return {block_id: title for block_id, title in titles if title and isinstance(title, str)}


def read_trace(path: str, corpus: Corpus) -> list[TraceRequest]:
    """Read a trace."""
    return list(_requests(read_lines(path), corpus))


def _requests(lines: Iterable[JsonLine], corpus: Corpus) -> Iterator[TraceRequest]:
    seen: set[str | int] = set()
    for line in lines:
        request_id = line.get("request_id", (str, int))
        if request_id in seen:
            line.fail(f"request_id {describe(request_id)} was there before; ids must be unique")
        seen.add(request_id)
        blocks = []
        for block_id in line.ids("blocks"):
            block = corpus.get(block_id)
            if block is None:
                line.fail(
                    f"block {describe(block_id)} is not in the corpus; "
                    "add it there, or pass the corpus that the trace was made with"
                )
            blocks.append(block)
        yield TraceRequest(
            blocks=tuple(blocks),
            output_tokens=line.natural("output_tokens", None),
            marks=line.marks("marks", len(blocks)),
            source=line.get("source", (str,), ""),
            **request_fields(line),
        )


def read_requests(
    trace: str, corpus: str | None = None
) -> tuple[dict[BlockId, ContextBlock], list[TraceRequest]]:
    """Read a trace and its blocks."""
    lines = read_lines(str(trace_path(trace)))
    first = list(islice(lines, 1))
    for line in first:  # which says what the file is, before its corpus is missed
        line.get("request_id", (str, int))
        line.ids("blocks")
    blocks = read_corpus(corpus_path(trace) if corpus is None else corpus)
    return blocks, list(_requests(chain(first, lines), blocks))


def trace_path(trace: str) -> Path:
    """Return the file of a trace, or of the recording in a folder; '-' is standard input."""
    checked_kind("trace", trace, (str, os.PathLike), "a path")
    path = Path(trace)
    if str(trace) == STANDARD_STREAM:
        return path
    with file_errors(trace, "read"):
        if not path.exists():
            raise InputFileError(f"{trace}: there is no such file or folder")
        if path.is_dir():
            path /= TRACE
            if not path.exists():
                wanted = "write one: ctxreuse record -o FOLDER app.py"
                raise InputFileError(f"{trace}: the folder holds no recording; {wanted}")
    return path


def corpus_path(trace: str) -> str:
    """Return where the blocks of a trace are, or of a recording, if nothing else is said."""
    path = Path(trace)
    return str((path if path.is_dir() else path.parent) / CORPUS)
