"""Corpora and retrieval traces, as JSON lines.

A corpus line is a block: `id`, `text`, `tokens`, of which one of the latter two may be missing, and
optionally `title`, for people. A trace line is a retrieval, in arrival order: `request_id`,
`query`, `blocks` (ids, best first), and optionally `conversation_id`, `turn`, `tenant`, `system`,
`timestamp` (of its arrival, in milliseconds), `output_tokens` (of its answer), `sent` (how it was
sent; see `sent_calls`), `marks` (after how many of its blocks a mark stood; 0 is behind the system
text), `in_run` (whether a run of a framework retrieved them, which sees its model's prompts, too).
Further fields are skipped.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ctxreuse.context.blocks import BlockId, ContextBlock
from ctxreuse.context.checks import checked_kind
from ctxreuse.context.files import file_errors
from ctxreuse.context.tokens import estimate_tokens
from ctxreuse.errors import InputFileError, InvalidBlockError, describe
from ctxreuse.measure.traces.json_lines import STANDARD_STREAM, JsonLine, read_lines
from ctxreuse.measure.traces.recording import CORPUS, FRONTS, TRACE
from ctxreuse.measure.traces.sent_calls import SentCall, sent_call_of

Corpus = Mapping[BlockId, ContextBlock]

Titles = Mapping[BlockId, str]
"""What people know blocks by, as far as they have a title."""


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
    in_run: bool | None = None
    front: str | None = None


def request_fields(line: JsonLine) -> dict[str, Any]:
    """Return what lines of traces and of plans say alike of a request."""
    return {
        "request_id": line.get("request_id", (str, int)),
        "query": line.get("query", (str,), ""),
        "conversation_id": line.get("conversation_id", (str, int), None),
        "turn": line.count("turn", 0),
        "tenant": line.get("tenant", (str,), ""),
        "system": line.get("system", (str,), None),
        "timestamp_ms": line.time_ms("timestamp", None),
        "sent": sent_call_of(line),
    }


def block_tokens(block: ContextBlock) -> int:
    """Return a block's length: as the corpus says, or else estimated."""
    return estimate_tokens(block.text) if block.tokens is None else block.tokens


def read_corpus(path: str) -> dict[BlockId, ContextBlock]:
    """Read a corpus."""
    corpus: dict[BlockId, ContextBlock] = {}
    for line in read_lines(path):
        block_id = line.get("id", (str, int))
        tokens = line.count("tokens", None)
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


def read_titles(path: str) -> dict[BlockId, str]:
    """Read the titles of a corpus's blocks: of those that have one."""
    if path == STANDARD_STREAM:
        return {}  # it has been read
    titles = ((line.get("id", (str, int)), line.fields.get("title")) for line in read_lines(path))
    return {block_id: title for block_id, title in titles if title and isinstance(title, str)}


def read_trace(path: str, corpus: Corpus) -> list[TraceRequest]:
    """Read a trace."""
    trace: list[TraceRequest] = []
    seen: set[str | int] = set()
    for line in read_lines(path):
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
        trace.append(
            TraceRequest(
                blocks=tuple(blocks),
                output_tokens=line.natural("output_tokens", None),
                marks=line.marks("marks", len(blocks)),
                in_run=line.get("in_run", (bool,), None),
                **request_fields(line),
            )
        )
    return trace


def read_recording(
    trace: str, corpus: str | None = None
) -> tuple[dict[BlockId, ContextBlock], list[TraceRequest]]:
    """Read a trace and its blocks."""
    checked_kind("trace", trace, (str, os.PathLike), "a path")
    path = Path(trace)
    with file_errors(trace, "read"):
        if not path.exists():
            raise InputFileError(f"{trace}: there is no such file or folder")
        if path.is_dir():
            path /= TRACE
    blocks = read_corpus(corpus_path(trace) if corpus is None else corpus)
    return blocks, _with_fronts(read_trace(str(path), blocks), path.with_name(FRONTS))


def _with_fronts(trace: list[TraceRequest], path: Path) -> list[TraceRequest]:
    """Return a trace with what stands before its documents in prompts, as far as that is known."""
    with file_errors(path, "read"):
        if not path.is_file():
            return trace
    lines = read_lines(str(path))
    fronts = {line.get("request_id", (str, int)): line.get("front", (str,)) for line in lines}
    return [replace(one, front=fronts.get(one.request_id)) for one in trace]


def corpus_path(trace: str) -> str:
    """Return where the blocks of a trace are, or of a recording, if nothing else is said."""
    path = Path(trace)
    return str((path if path.is_dir() else path.parent) / CORPUS)
