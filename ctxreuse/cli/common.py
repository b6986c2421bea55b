"""What the commands share: where they print, and how long work shows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from ctxreuse.errors import InputFileError
from ctxreuse.evaluation.traces.json_lines import STANDARD_STREAM

CorpusPath = Annotated[
    str,
    typer.Option("--corpus", help="Blocks: a JSON object a line with id, text, tokens (optional)."),
]


def say(text: str) -> None:
    """Print on standard error, where no output of a command goes."""
    print(text, file=sys.stderr)


def only_one_from_standard_input(*paths: str) -> None:
    """Check that at most one of some paths is standard input.

    Raises:
        InputFileError: If more are.
    """
    if paths.count(STANDARD_STREAM) > 1:
        raise InputFileError("only one file can be read from standard input ('-')")


def output_console() -> Console:
    """Return a console that does not squeeze tables where no terminal sets a width."""
    console = Console()
    return console if console.is_terminal else Console(width=110)


@contextmanager
def progress(task: str, total: int) -> Iterator[Callable[[], object]]:
    """Show a progress bar on standard error, if people are looking at it."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as shown:
        number = shown.add_task(task, total=total)
        yield lambda: shown.advance(number)
