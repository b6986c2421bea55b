"""What the commands share: how they print, and how progress shows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Any

import typer
from rich import table as rich_tables
from rich.cells import cell_len
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
                console.print(_rich_table(one, console))
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


_WIDEST = 10_000
_LAYOUTS = ((False, 20), (True, 8))
"""Whether numbers and their intervals are parted, and the width that the names then need."""


def _rich_table(table: Table, console: Console) -> rich_tables.Table:
    """Lay a table out; where it is too wide, break names, then intervals, but no number."""
    wide = _laid_out(table)
    if table.is_text or _width(wide, console) <= console.width:
        return wide
    for parts_numbers, least in _LAYOUTS:
        room = console.width - _width(_laid_out(table, 0, parts_numbers), console)
        if room >= least:
            return _laid_out(table, room, parts_numbers)
    return wide


def _width(laid_out: rich_tables.Table, console: Console) -> int:
    return console.measure(laid_out, options=console.options.update(width=_WIDEST)).maximum


def _laid_out(
    table: Table, name_width: int | None = None, parts_numbers: bool = False
) -> rich_tables.Table:
    """Lay a table out.

    Args:
        table: The table.
        name_width: Width of the first column; None as wide as it comes, and all others, too.
        parts_numbers: Whether the other columns are as narrow as their longest word.
    """
    frame: dict[str, Any] = {"title": escape(table.title)} if table.title else {"box": None}
    shown = rich_tables.Table(**frame)
    for number, name in enumerate(table.head):
        is_left = table.is_text or not number
        width = name_width
        if number and name_width is not None:
            cells = [name, *(row[number] for row in table.rows if len(row) > 1)]
            words = "\n".join(cells).split(None if parts_numbers else "\n")
            width = max(map(cell_len, words), default=0)
        shown.add_column(
            name,
            justify="left" if is_left else "right",
            no_wrap=not (table.is_text or number) and width is None,
            overflow="ellipsis" if width is None and not table.is_text else "fold",
            width=width,
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
