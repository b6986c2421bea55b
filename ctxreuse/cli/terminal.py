"""What the commands share: how they print, and how progress shows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Any

import typer
from rich import table as rich_tables
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from typer.core import TyperCommand, TyperGroup

from ctxreuse.context.files import file_errors
from ctxreuse.context.tokens import well_formed
from ctxreuse.errors import InputFileError
from ctxreuse.evaluation.results.tables import Bad, Good, Shown, Table
from ctxreuse.evaluation.traces.json_lines import STANDARD_STREAM

CorpusPath = Annotated[
    str,
    typer.Option("--corpus", help="Blocks: a JSON object a line with id, text, tokens (optional)."),
]

PlanPath = Annotated[
    str, typer.Option("--plan", help="What `ctxreuse plan` wrote; '-' reads standard input.")
]
HtmlPath = Annotated[
    str | None,
    typer.Option("--html", help="Write a report, one HTML file that needs no network, too."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def say(text: str) -> None:
    """Print on standard error, where no output of a command goes; do without if nobody takes it."""
    with suppress(OSError):
        print(text, file=sys.stderr)


def put(text: str) -> None:
    """Print a line on standard output as it is.

    Raises:
        InputFileError: It cannot be written.
    """
    with file_errors("standard output", "written"):
        print(text)


def show(things: Iterable[Shown]) -> None:
    """Print lines and tables on standard output, none of their text taken as markup.

    Raises:
        InputFileError: They cannot be written.
    """
    console = _Console()
    if not console.is_terminal:
        console = _Console(width=110)  # tables are not squeezed where no terminal sets a width
    for one in things:
        with file_errors("standard output", "written"):
            if isinstance(one, Table):
                console.print(_rich_table(one))
            else:
                console.print(well_formed(one), markup=False)


class _WritesHelp:
    """A command whose help is standard output as any other."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        with file_errors("standard output", "written"):
            try:
                super().format_help(ctx, formatter)  # type: ignore[misc]  # of Typer's own class
            except SystemExit as end:  # Rich's, in silence, where the reader of a pipe is gone
                raise end.__context__ or end from None


class Command(_WritesHelp, TyperCommand):
    """A command."""


class Group(_WritesHelp, TyperGroup):
    """All commands."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise  # called where the error is handled; Rich would end the process in silence


def only_one_from_standard_input(*paths: str) -> None:
    """Check that at most one of some paths is standard input.

    Raises:
        InputFileError: More are.
    """
    if paths.count(STANDARD_STREAM) > 1:
        raise InputFileError("only one file can be read from standard input ('-')")


@contextmanager
def progress(task: str, steps: int) -> Iterator[Callable[[], object]]:
    """Show a progress bar on standard error, if people are looking at it."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        number = bar.add_task(task, total=steps)
        yield lambda: bar.advance(number)


def _rich_table(table: Table) -> rich_tables.Table:
    frame: dict[str, Any] = {"title": escape(table.title)} if table.title else {"box": None}
    shown = rich_tables.Table(**frame)
    for number, name in enumerate(table.head):
        is_left = table.is_text or not number
        shown.add_column(
            name,
            justify="left" if is_left else "right",
            no_wrap=not (table.is_text or number),
            overflow="fold" if table.is_text else "ellipsis",
        )
    for row in table.rows:
        if len(row) == 1:
            shown.add_section()
            shown.add_row(f"[italic]{_cell(row[0])}[/]")
        else:
            shown.add_row(*map(_cell, row))
    return shown


def _cell(text: str) -> str:
    shown = escape(well_formed(text))
    colour = "green" if isinstance(text, Good) else "red" if isinstance(text, Bad) else ""
    return f"[{colour}]{shown}[/]" if colour else shown
