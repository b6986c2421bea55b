"""What the benchmarks share: where the data is, how it is read, and tables."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from rich.table import Table

from ctxreuse import ContextRequest
from ctxreuse.measure.traces.json_lines import read_lines
from ctxreuse.measure.traces.trace_files import Corpus, TraceRequest, read_corpus, read_trace
from stand_in_data import write_stand_in_data

STAND_IN = Path(__file__).resolve().parent.parent / ".cache" / "stand-in-data"


def data_folder(*names: str, folder: Path | None = None) -> Path:
    """Return the folder of public data; end with a message if it lacks one of the names.

    Without a folder it is what CTXREUSE_DATA names, or else data that are made here.
    """
    named = folder or os.environ.get("CTXREUSE_DATA")
    if not named:
        folder = write_stand_in_data(STAND_IN)
        print(f"CTXREUSE_DATA is not set: made-up questions, in {folder}, stand for public data")
        return folder
    folder = Path(named)
    for name in names:
        if not (folder / name).exists():
            sys.exit(f"there is no {name} in {folder}, which should be the folder of public data")
    return folder


def new_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of options whose help begins with a text as it is."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def read_named_trace(data: Path, name: str) -> tuple[list[TraceRequest], Corpus]:
    """Return a trace and its corpus; `xquad_k5` has five blocks a request."""
    folder, depth = name.split("_")
    corpus = read_corpus(str(data / folder / "corpus.jsonl"))
    return read_trace(str(data / folder / f"trace_{depth}.jsonl"), corpus), corpus


def read_requests(data: Path, name: str, most: int | None = None) -> list[ContextRequest]:
    """Return the first requests of a trace, all of them without a number."""
    trace, _ = read_named_trace(data, name)
    return [ContextRequest(one.blocks, one.query) for one in trace[:most]]


def right_answers(data: Path, name: str, key: str) -> dict[str | int, list[str]]:
    """Return the known right answers of a data set's questions, by their "id" or "question"."""
    right: dict[str | int, list[str]] = {}
    for line in read_lines(str(data / name / "queries.jsonl")):
        answers = line.get("answers", (list,), [])
        if answers:
            right.setdefault(line.get(key, (str, int)), answers)
    return right


def new_table(title: str, names: Iterable[str], numbers: Iterable[str]) -> Table:
    """Return a table with columns of names and, aligned to the right, of numbers."""
    table = Table(title=title)
    for column in names:
        table.add_column(column, no_wrap=True)
    for column in numbers:
        table.add_column(column, justify="right")
    return table
