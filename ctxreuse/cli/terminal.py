"""What the commands share: how they print, and how progress shows."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from shutil import get_terminal_size
from typing import Any

from rich import table as rich_tables
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from typer.core import TyperCommand, TyperGroup

from ctxreuse.context.files import file_errors
from ctxreuse.context.tokens import well_formed
from ctxreuse.errors import InputFileError
from ctxreuse.measure.table import Shown, Table
from ctxreuse.measure.traces.json_lines import STANDARD_STREAM


def say(text: str) -> None:
    """Print on standard error, where no output of a command goes; do without if nobody takes it."""
    with suppress(OSError, ValueError):  # ValueError: a program that is recorded has closed it
        if sys.stderr is not None:  # None would be standard output
            print(f"ctxreuse: {text}", file=sys.stderr)


def put(text: str) -> None:
    """Print a line on standard output as it is."""
    with file_errors("standard output", "written"):
        print(text)


def show(things: Iterable[Shown]) -> None:
    """Print lines and tables on standard output, none of their text taken as markup."""
    console = _Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = _Console(width=_PIPED_WIDTH, highlight=False)
    for one in things:
        with file_errors("standard output", "written"):
            if isinstance(one, Table):
                console.print(_fitting(one, console))
            else:
                console.print(well_formed(one), markup=False)


class _WritesHelp:
    """A command whose help goes to standard output, and is plain text on a narrow terminal."""

    rich_markup_mode: Any

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]  # of Typer's own class
        for param in params:
            if getattr(param, "is_flag", False) and param.metavar is None:
                param.metavar = ""
        return params

    def format_help(self, ctx: Any, formatter: Any) -> None:
        with file_errors("standard output", "written"):
            if get_terminal_size().columns < _LEAST_HELP_WIDTH:
                self.rich_markup_mode = None
            try:
                super().format_help(ctx, formatter)  # type: ignore[misc]  # of Typer's own class
            except SystemExit as end:  # Rich's, in silence, where the reader of a pipe is gone
                raise end.__context__ or end from None


class Command(_WritesHelp, TyperCommand):
    """A command."""


class CommandGroup(_WritesHelp, TyperGroup):
    """All commands."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise  # called where the error is handled; Rich would end the process in silence


def only_one_from_standard_input(*paths: str) -> None:
    """Check that at most one of some paths is standard input."""
    if paths.count(STANDARD_STREAM) > 1:
        raise InputFileError("only one file can be read from standard input ('-')")


@contextmanager
def progress(task: str, steps: int) -> Iterator[Callable[[], object]]:
    """Show how far a task is, as a bar on standard error where that is a terminal."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        number = bar.add_task(task, total=steps)
        yield lambda: bar.advance(number)


_PIPED_WIDTH = 80
_LEAST_HELP_WIDTH = 80
_WIDEST = 10_000
_LEAST_NAME_WIDTH = 8
_LEAST_TEXT_WIDTH = 12  # of a column of words


def _fitting(table: Table, console: Console) -> rich_tables.Table:
    """Lay a table out; one that is too wide breaks names, else its cells stand below each other."""
    narrow = _laid_out(table, _LEAST_TEXT_WIDTH if table.is_text else _LEAST_NAME_WIDTH)
    options = console.options.update(width=_WIDEST)
    has_room = console.measure(narrow, options=options).maximum <= console.width
    is_small = table.is_text and len(table.head) < 4
    return _laid_out(table if has_room or is_small else _turned(table))


def _turned(table: Table) -> Table:
    """Return a table with a row for each cell, under the name of its column."""
    rows: list[tuple[str, ...]] = []
    for row in table.rows:
        rows.append((row[0],))
        if len(row) > 1:
            heads = (" ".join(name.replace("-\n", "").split()) for name in table.head[1:])
            rows += zip(heads, row[1:], strict=True)
    return Table(table.title, (table.head[0], ""), tuple(rows), is_text=True)


def _laid_out(table: Table, most: int | None = None) -> rich_tables.Table:
    """Lay a table out, columns that may be broken at most so wide."""
    frame: dict[str, Any] = {"title": escape(table.title)} if table.title else {"box": None}
    shown = rich_tables.Table(**frame)
    for number, name in enumerate(table.head):
        is_words = table.is_text or not number
        shown.add_column(
            name,
            justify="left" if is_words else "right",
            no_wrap=not is_words,
            overflow="fold",
            max_width=most if is_words else None,
        )
    for row in table.rows:
        cells = [escape(well_formed(cell)) for cell in row]
        if len(cells) == 1:
            shown.add_section()
            shown.add_row(f"[italic]{cells[0]}[/]")
        else:
            shown.add_row(*cells)
    return shown
