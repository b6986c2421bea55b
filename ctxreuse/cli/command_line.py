"""The commands of `ctxreuse`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

import ctxreuse
from ctxreuse.cli import doctor_command, lint_command, savings_commands, trace_commands
from ctxreuse.cli.bill_options import CacheSpec, PricesGiven, prices_given
from ctxreuse.cli.terminal import Command, Group, progress, put, show
from ctxreuse.context.cache_profile import cache_profile

app = typer.Typer(
    cls=Group,
    help="""Reorder retrieved blocks so that an LLM engine's prefix cache hits.

    Start with `ctxreuse demo`, which the extra `demo` installs: it plans real retrievals in several
    ways and shows what each saves.

    With retrievals of your own, write one JSON object a line: a corpus with `id` and `text`, and a
    trace with `request_id`, `query` and `blocks` (ids, best first). Then:

    `ctxreuse plan --trace T.jsonl --corpus C.jsonl --mode online -o OUT.jsonl`

    `ctxreuse simulate --plan OUT.jsonl --corpus C.jsonl`

    `ctxreuse explain --plan OUT.jsonl --corpus C.jsonl`

    To see what your own application would save, write down what it retrieves, and replay that:

    `ctxreuse record -o recording app.py`

    `ctxreuse estimate recording`

    To see what in your prompts keeps a cache from hitting, and what that costs:

    `ctxreuse lint recording --cache anthropic`

    Where the engine reports few hits, this says why:

    `ctxreuse doctor --base-url http://127.0.0.1:8000/v1`

    To compare ways to order blocks on public data or on yours: `ctxreuse bench --help`
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


def _demo(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for the plot and the results.")
    ] = Path("demo-output"),
    cache: CacheSpec = "vllm",
    prices: PricesGiven = None,
) -> None:
    """Plan questions about the Python reference in several ways, and show what each saves.

    Needs no server, no model and no download; takes some seconds.
    """
    from ctxreuse.measure.demo.demo_run import run_demo

    profile = cache_profile(cache)
    show(run_demo(output, progress, prices_given(prices, profile), profile))


_COMMANDS: dict[str, Callable[..., None]] = {
    "demo": _demo,
    "record": trace_commands.record,
    "estimate": savings_commands.estimate,
    "report": savings_commands.report,
    "bench": savings_commands.bench,
    "plan": trace_commands.plan,
    "simulate": trace_commands.simulate,
    "export": trace_commands.export,
    "explain": trace_commands.explain,
    "lint": lint_command.lint_recording,
    "doctor": doctor_command.doctor,
}
for _name, _function in _COMMANDS.items():
    # what is behind the program that `record` runs is the program's
    _settings = {"allow_interspersed_args": _name != "record"}
    app.command(_name, cls=Command, context_settings=_settings)(_function)
