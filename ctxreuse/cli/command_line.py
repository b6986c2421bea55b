"""The commands of `ctxreuse`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import ctxreuse
from ctxreuse.cli import savings_commands, trace_commands
from ctxreuse.cli.terminal import progress, put, show

app = typer.Typer(
    help="""Reorder retrieved blocks so that an LLM engine's prefix cache hits.

    Start with `ctxreuse demo`: it plans real retrievals in several ways and shows what each saves.

    With retrievals of your own, write one JSON object a line: a corpus with `id` and `text`, and a
    trace with `request_id`, `query` and `blocks` (ids, best first). Then:

    `ctxreuse plan --trace T.jsonl --corpus C.jsonl --mode online -o OUT.jsonl`

    `ctxreuse simulate --plan OUT.jsonl --corpus C.jsonl`

    `ctxreuse explain --plan OUT.jsonl --corpus C.jsonl`

    To see what your own application would save, write down what it retrieves, and replay that:

    `ctxreuse record -o recording app.py`

    `ctxreuse estimate recording`

    To compare ways to order blocks on public data or on yours: `ctxreuse bench --help`
    """,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    add_completion=False,
)


@app.callback(invoke_without_command=True)
def _main(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        put(ctxreuse.__version__)
        raise typer.Exit


def _demo(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for the plot and the results.")
    ] = Path("demo-output"),
) -> None:
    """Plan questions about the Python reference in several ways, and show what each saves.

    Needs no server, no model and no download; takes some seconds.
    """
    from ctxreuse.evaluation.demo.demo_run import run_demo

    show(run_demo(output, progress))


app.command("demo")(_demo)
app.command("record", context_settings={"allow_interspersed_args": False})(trace_commands.record)
app.command("estimate")(savings_commands.estimate)
app.command("report")(savings_commands.report)
app.command("bench")(savings_commands.bench)
app.command("plan")(trace_commands.plan)
app.command("simulate")(trace_commands.simulate)
app.command("explain")(trace_commands.explain)
