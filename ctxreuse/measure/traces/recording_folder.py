"""A recording, as commands are given it: a folder, or a trace with its corpus beside it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from ctxreuse.context.blocks import BlockId, ContextBlock
from ctxreuse.context.checks import checked_kind
from ctxreuse.context.files import file_errors
from ctxreuse.errors import InputFileError
from ctxreuse.measure.traces.json_lines import read_lines
from ctxreuse.measure.traces.recording import CORPUS, FRONTS, TRACE
from ctxreuse.measure.traces.trace_files import TraceRequest, read_corpus, read_trace


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
