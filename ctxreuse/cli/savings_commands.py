"""`ctxreuse record`, `estimate` and `report`: what an application would save."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ctxreuse.cli.terminal import AsJson, HtmlPath, progress, say, show
from ctxreuse.evaluation.report import write_pictures, write_report
from ctxreuse.evaluation.results.results_file import Results
from ctxreuse.evaluation.results.tables import estimate_json, estimate_output
from ctxreuse.evaluation.results.trace_savings import measure_savings
from ctxreuse.evaluation.traces.recorded_program import run_recorded
from ctxreuse.evaluation.traces.recording import TraceRecorder


def record(
    program: Annotated[str, typer.Argument(help="A Python script, or with --module a module.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="What the program is given; behind its name.")
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for corpus.jsonl and trace.jsonl.")
    ] = Path("recording"),
    hash_only: Annotated[
        bool,
        typer.Option("--hash-only", help="Store no text: token counts and salted hashes only."),
    ] = False,
    source: Annotated[
        list[str] | None,
        typer.Option(
            help="What to listen to: langchain, llamaindex (their retrievers) or openai (reads "
            "paragraphs of prompts as blocks); several may be given. Without it, all retrievers."
        ),
    ] = None,
    module: Annotated[bool, typer.Option("--module", "-m", help="As in python -m.")] = False,
) -> None:
    """Run a program as it is, and record what it retrieves or sends.

    `ctxreuse record -o recording app.py --port 8000`, then `ctxreuse estimate recording`.
    """
    with TraceRecorder(output, hash_only=hash_only) as recorder:
        try:
            run_recorded(program, arguments or [], recorder, source or [], is_module=module)
        finally:
            if recorder.requests:
                say(f"ctxreuse: {recorder.requests} requests recorded in {output}")
            else:
                recorder.discard()  # an empty recording would stand in the next one's way
                say("ctxreuse: nothing was retrieved, so nothing is written; see --source")


def estimate(
    trace: Annotated[
        str,
        typer.Argument(
            help="A folder that `ctxreuse record` wrote, or a trace: a JSON object a line with "
            "request_id, query, blocks."
        ),
    ],
    corpus: Annotated[
        str | None,
        typer.Option("--corpus", help="Its blocks; corpus.jsonl beside the trace if not given."),
    ] = None,
    capacity_tokens: Annotated[
        list[int] | None,
        typer.Option(
            min=0,
            help="Tokens that the engine's cache holds; several may be given. Without it, some "
            "sizes that suit the trace.",
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="A tokenizer.json: count whole prompts token by token. Without it, each block "
            "counts as its tokens, and questions and annotations as none."
        ),
    ] = None,
    html: HtmlPath = None,
    results: Annotated[
        str | None, typer.Option(help="Write what a report shows, as JSON, too.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what ordering would save of a trace: as retrieved, papers' order, ctxreuse.

    Conversations are replayed, each turn answered "OK.", with and without de-duplication; an
    unlimited cache and smaller ones.
    """
    measured = measure_savings(
        trace,
        corpus,
        capacities=capacity_tokens or (),
        tokenizer=tokenizer,
        for_report=html is not None or results is not None,
        progress=progress,
    )
    if results is not None:
        measured.write(results)
    if html is not None:
        write_page(measured, html)
    if as_json:
        typer.echo(json.dumps(estimate_json(measured)))
    else:
        show(estimate_output(measured))


def report(
    results: Annotated[
        str, typer.Argument(help="What `ctxreuse estimate --results` or `bench` wrote.")
    ],
    output: Annotated[
        str, typer.Option("--output", "-o", help="The HTML file; it needs no network.")
    ] = "report.html",
    pictures: Annotated[
        Path | None, typer.Option(help="A folder for the charts as PNG files, too.")
    ] = None,
) -> None:
    """Make a page of results that people can look at."""
    measured = Results.read(results)
    write_page(measured, output)
    if pictures is not None:
        for path in write_pictures(measured, pictures):
            say(f"ctxreuse: wrote {path}")


def write_page(results: Results, path: str) -> None:
    """Write a report, and say so."""
    write_report(results, path)
    say(f"ctxreuse: wrote {path}")
