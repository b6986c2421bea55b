"""What the commands share: their options, how they print, and how progress shows."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import MISSING, Field, dataclass, fields
from shutil import get_terminal_size
from typing import Annotated, Any, Protocol, get_args, get_origin, get_type_hints

import typer
from rich import table as rich_tables
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from typer.core import TyperCommand, TyperGroup

from ctxreuse.context.files import file_errors
from ctxreuse.context.tokens import well_formed
from ctxreuse.errors import InputFileError, InvalidRequestError
from ctxreuse.measure.options import option
from ctxreuse.measure.table import Shown, Table
from ctxreuse.measure.traces.json_lines import STANDARD_STREAM


class Runs(Protocol):
    """A command: a frozen dataclass whose docstring is its help."""

    def run(self) -> None:
        """Do what the command does."""


@dataclass(frozen=True, kw_only=True)
class PrintsJson:
    """A command that prints a table or JSON."""

    as_json: bool = option("Print JSON instead of a table.", False, "--json")


def api_key() -> str:
    """Return the engine's key, which no option takes: command lines can be read by others."""
    return os.environ.get("OPENAI_API_KEY") or "EMPTY"


def command_of(command: type[Runs]) -> Callable[..., None]:
    """Return a function for Typer that makes a command of what is given, and runs it."""
    hints = get_type_hints(command)
    options = [one for one in fields(command) if "help" in one.metadata]  # type: ignore[arg-type]
    options.sort(key=lambda one: one.name == "as_json")  # last, as everywhere
    parameters = [other for one in options for other in _parameters(one, hints[one.name])]
    many = {one.name for one in parameters if get_origin(get_args(one.annotation)[0]) is list}

    def run(**given: Any) -> None:
        for name in [one for one in given if one.endswith(_NAMED)]:
            own, named = name.removesuffix(_NAMED), given.pop(name)
            if (given[own] is None) == (named is None):
                raise InvalidRequestError(f"give the {own} once, as an argument or with --{own}")
            given[own] = named if given[own] is None else given[own]
        command(
            **{name: tuple(one or ()) if name in many else one for name, one in given.items()}
        ).run()

    run.__doc__ = inspect.cleandoc(command.__doc__ or "")
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


_NAMED = "_named"


def _parameters(one: Field[Any], hint: Any) -> Iterator[inspect.Parameter]:
    """Yield a command's parameter, or two where it takes an argument by an option's name, too."""
    if one.metadata.get("argument") and one.metadata["names"]:
        argument = {**one.metadata, "names": ()}
        yield _parameter(one.name, None, argument, str | None)
        named = {"names": one.metadata["names"], "help": "The same, by name."}
        yield _parameter(f"{one.name}{_NAMED}", None, named, str | None)
    else:
        yield _parameter(one.name, one.default, one.metadata, hint)


def _parameter(
    name: str, default: Any, metadata: Mapping[str, Any], hint: Any
) -> inspect.Parameter:
    settings = dict(metadata)
    names, kind = settings.pop("names"), settings.pop("type", hint)
    default = inspect.Parameter.empty if default is MISSING else default
    origin: Any = get_origin(kind)
    if origin is Sequence:
        kind, default = list[get_args(kind)[0]], default or None  # type: ignore[misc]
    if settings.pop("argument", False):
        info: Any = typer.Argument(**settings)
    else:
        info = typer.Option(*(names or [f"--{name.replace('_', '-')}"]), **settings)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info]
    )


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
        console = _Console(width=_USUAL_WIDTH, highlight=False)
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
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params

    def format_help(self, ctx: Any, formatter: Any) -> None:
        with file_errors("standard output", "written"):
            if get_terminal_size().columns < _USUAL_WIDTH:
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


_USUAL_WIDTH = 80
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
        heads = (" ".join(name.replace("-\n", "").split()) for name in table.head[1:])
        rows += (row[0],), *zip(heads, row[1:], strict=False)  # a heading has no more
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
