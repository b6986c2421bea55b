"""The commands of `ctxreuse`."""

from __future__ import annotations

from typing import Annotated

import typer

import ctxreuse
from ctxreuse.cli import measure_commands, serve_command, trace_commands
from ctxreuse.cli.terminal import Command, CommandGroup, Runs, command_of, put

app = typer.Typer(
    cls=CommandGroup,
    help="""Reorder retrieved blocks so that an LLM engine's prefix cache hits.

    To see what your application would save, record what it retrieves, and replay that:

    `ctxreuse record -o recording app.py`

    `ctxreuse estimate recording`

    `ctxreuse demo` (extra `demo`) needs no application. For retrievals of your own, write two files
    with a JSON object a line: a corpus with `id` and `text`, and a trace with `request_id`, `query`
    and `blocks` (ids, best first). Then:

    `ctxreuse plan --trace T.jsonl --corpus C.jsonl --mode online -o OUT.jsonl`

    `ctxreuse simulate --plan OUT.jsonl --corpus C.jsonl`

    `ctxreuse explain --plan OUT.jsonl --corpus C.jsonl`
    """,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def _main(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        put(ctxreuse.__version__)
        raise typer.Exit


_COMMANDS: dict[str, type[Runs]] = {
    "record": trace_commands.RecordCommand,
    "estimate": measure_commands.EstimateCommand,
    "doctor": measure_commands.DoctorCommand,
    "demo": measure_commands.DemoCommand,
    "report": measure_commands.ReportCommand,
    "bench": measure_commands.BenchCommand,
    "plan": trace_commands.PlanCommand,
    "simulate": trace_commands.SimulateCommand,
    "explain": trace_commands.ExplainCommand,
    "lint": measure_commands.LintCommand,
    "serve": serve_command.ServeCommand,
}
for _name, _command in _COMMANDS.items():
    # what is behind the program that `record` runs is the program's
    _settings = {"allow_interspersed_args": _name != "record"}
    app.command(_name, cls=Command, context_settings=_settings)(command_of(_command))
