"""What the commands share: how they print, and how progress shows."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import get_terminal_size
from typing import Any

from rich import table as rich_tables
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from typer.core import TyperCommand, TyperGroup

from ctxreuse.context.files import check_writable, file_errors
from ctxreuse.context.tokens import well_formed
from ctxreuse.errors import InputFileError
from ctxreuse.measure.table import Bad, Good, Shown, Table
from ctxreuse.measure.traces.json_lines import STANDARD_STREAM


def say(text: str) -> None:
    """Print on standard error, where no output of a command goes; do without if nobody takes it."""
    with suppress(OSError):
        print(text, file=sys.stderr)


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
                for part in _rich_tables(one, console):
                    console.print(part)
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


def check_outputs(*paths: str | Path | None) -> None:
    """Check, before long work, that files could be written."""
    for path in paths:
        if path is not None:
            check_writable(path)


@contextmanager
def progress(task: str, steps: int) -> Iterator[Callable[[], object]]:
    """Show how far a task is, on standard error: a bar, or in a file or a pipe lines."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield ProgressLines(task, steps).advance
        return
    with Progress(console=console, transient=True) as bar:
        number = bar.add_task(task, total=steps)
        yield lambda: bar.advance(number)


class ProgressLines:
    """Says now and then how far a task is, and when it will be done; nothing of a short one."""

    def __init__(self, task: str, steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._task = task
        self._steps = steps
        self._clock = clock
        self._done = 0
        self._begun = clock()
        self._next = self._begun + _SECONDS_A_LINE

    def advance(self) -> None:
        """Count a step."""
        self._done += 1
        now = self._clock()
        if now < self._next or self._done >= self._steps:
            return
        passed = now - self._begun
        left = passed / self._done * (self._steps - self._done)
        share = self._done / self._steps
        say(f"ctxreuse: {self._task}: {share:.0%}, about {_duration(left)} left")
        self._next = now + max(_SECONDS_A_LINE, passed / 4)  # fewer lines of a long task


def _duration(seconds: float) -> str:
    """Return a time in words, rounded up to what people care for."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if seconds < 90 * 60:
        return f"{round(seconds / 60)} minutes"
    return f"{seconds / 3_600:.1f} hours"


_PIPED_WIDTH = 80
_LEAST_HELP_WIDTH = 80
_SECONDS_A_LINE = 5.0
_WIDEST = 10_000
_NAME_WIDTH = 20
_LAYOUTS = ((False, _NAME_WIDTH), (True, 8))
"""Whether numbers and their intervals are parted, and the width that the names then need."""
_LEAST_TEXT_WIDTH = 12
"""Of a column of words."""


def _rich_tables(table: Table, console: Console) -> Iterator[rich_tables.Table]:
    """Lay a table out; one that is too wide breaks names, else parts columns, never numbers."""
    wide = _laid_out(table)
    if _width(wide, console) <= console.width:
        yield wide
    elif table.is_text:
        is_roomy = console.width >= (_LEAST_TEXT_WIDTH + 3) * len(table.head)
        yield wide if is_roomy or len(table.head) < 4 else _laid_out(_turned(table))
    else:
        for part in _parts(table, console):
            yield _fitting(part, console)


def _fitting(table: Table, console: Console) -> rich_tables.Table:
    wide = _laid_out(table)
    if _width(wide, console) <= console.width:
        return wide
    for parts_numbers, least in _LAYOUTS:
        room = console.width - _width(_laid_out(table, 0, parts_numbers), console)
        if room >= least:
            return _laid_out(table, room, parts_numbers)
    return wide


def _parts(table: Table, console: Console) -> Iterator[Table]:
    """Yield a table's columns in as few tables as fit, each with the names in front."""
    first = 1
    while first < len(table.head):
        last = first + 1
        while last < len(table.head) and _fits(_columns(table, first, last + 1), console):
            last += 1
        yield _columns(table, first, last)
        first = last


def _fits(table: Table, console: Console) -> bool:
    room = console.width - _width(_laid_out(table, 0), console)
    return room >= min(_NAME_WIDTH, max(map(cell_len, (row[0] for row in table.rows)), default=0))


def _columns(table: Table, first: int, last: int) -> Table:
    """Return a table with its first column and some others."""

    def cut(row: tuple[str, ...]) -> tuple[str, ...]:
        return row if len(row) == 1 else (row[0], *row[first:last])

    title = table.title if first == 1 else f"{table.title} (continued)" if table.title else ""
    return Table(title, cut(table.head), tuple(map(cut, table.rows)))


def _turned(table: Table) -> Table:
    """Return a table of words with a row for each cell, under the name of its column."""
    rows: list[tuple[str, ...]] = []
    for row in table.rows:
        rows.append((row[0],))
        if len(row) > 1:
            rows += zip(table.head[1:], row[1:], strict=True)
    return Table(table.title, (table.head[0], ""), tuple(rows), is_text=True)


def _width(laid_out: rich_tables.Table, console: Console) -> int:
    return console.measure(laid_out, options=console.options.update(width=_WIDEST)).maximum


def _laid_out(
    table: Table, name_width: int | None = None, parts_numbers: bool = False
) -> rich_tables.Table:
    """Lay a table out; `name_width` None is as wide as names come, and all others, too."""
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
