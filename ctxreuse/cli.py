"""The `ctxreuse` command."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import ctxreuse
from ctxreuse.cache import BlockLevelCache, PrefixCacheSimulator
from ctxreuse.errors import CtxreuseError, InputFileError
from ctxreuse.evaluation import simulate as simulation
from ctxreuse.evaluation.explain import (
    explain_plan,
    explanation_json,
    explanation_tables,
    in_words,
)
from ctxreuse.evaluation.jsonl import STANDARD_STREAM, write_lines
from ctxreuse.evaluation.outcomes import Replay
from ctxreuse.evaluation.planfile import read_plan
from ctxreuse.evaluation.replay import plan_trace
from ctxreuse.evaluation.traces import read_corpus, read_trace

if TYPE_CHECKING:
    from ctxreuse.evaluation.results import Results

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
    """,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    add_completion=False,
)


class ModeName(StrEnum):
    """How the requests of a trace are planned."""

    online = "online"
    offline = "offline"


class StrategyName(StrEnum):
    """Whose order the blocks are put in."""

    reuse = "reuse"
    paper = "paper"
    none = "none"


class SourceName(StrEnum):
    """Where blocks are seen."""

    langchain = "langchain"
    llamaindex = "llamaindex"
    openai = "openai"


CorpusPath = Annotated[
    str,
    typer.Option("--corpus", help="Blocks: a JSON object a line with id, text, tokens (optional)."),
]


@app.callback(invoke_without_command=True)
def _main(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(ctxreuse.__version__)
        raise typer.Exit


@app.command()
def plan(
    trace: Annotated[
        str,
        typer.Option(
            "--trace",
            help="Retrievals in arrival order: a JSON object a line with request_id, query, "
            "blocks; '-' reads standard input.",
        ),
    ],
    corpus: CorpusPath,
    mode: Annotated[
        ModeName,
        typer.Option(help="online: one request after the other; offline: all as one batch."),
    ],
    strategy: Annotated[
        StrategyName,
        typer.Option(help="reuse: this package's order; paper: ContextPilot's; none: as it is."),
    ] = StrategyName.reuse,
    dedup: Annotated[
        bool,
        typer.Option(
            "--dedup",
            help="Replay each conversation, answering 'OK.', and leave out what it shows already.",
        ),
    ] = False,
    capacity_tokens: Annotated[
        int | None,
        typer.Option(min=0, help="Tokens that the engine's cache holds, if it is known."),
    ] = None,
    output: Annotated[
        str, typer.Option("--output", "-o", help="Where to write; '-' is standard output.")
    ] = STANDARD_STREAM,
) -> None:
    """Plan the requests of a trace: one JSON line a request, in execution order."""
    _only_one_from_standard_input(trace, corpus)
    blocks = read_corpus(corpus)
    requests = read_trace(trace, blocks)
    planner = ctxreuse.ReusePlanner(capacity_tokens=capacity_tokens)
    with _progress("planning", len(requests)) as advance:
        planned = plan_trace(
            requests, planner, mode.value, strategy.value, conversations=dedup, advance=advance
        )
    write_lines(output, (request.as_json() for request in planned))


@app.command()
def simulate(
    plan: Annotated[
        str,
        typer.Option("--plan", help="What `ctxreuse plan` wrote; '-' reads standard input."),
    ],
    corpus: CorpusPath,
    capacity_tokens: Annotated[
        int | None,
        typer.Option(min=0, help="Tokens that the cache holds; unlimited if not given."),
    ] = None,
    block_size: Annotated[
        int, typer.Option(min=1, help="Tokens of an engine block; only with --tokenizer.")
    ] = 16,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="A tokenizer.json: simulate whole prompts token by token. Without it, each block "
            "counts as its tokens, and questions and annotations as none."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show the hit ratio that an engine with a prefix cache would reach on a plan."""
    _only_one_from_standard_input(plan, corpus)
    blocks = read_corpus(corpus)
    planned = read_plan(plan)
    if tokenizer is None:
        usages = simulation.simulate_blocks(planned, blocks, BlockLevelCache(capacity_tokens))
    else:
        usages = simulation.simulate_tokens(
            planned,
            blocks,
            PrefixCacheSimulator(capacity_tokens, block_size),
            simulation.load_tokenizer(str(tokenizer)),
        )
    with _progress("simulating", len(planned)) as advance:
        total = simulation.total_usage(usages, advance)
    figures: dict[str, int | float | str | None] = {
        "requests": len(planned),
        "prompt_tokens": total.prompt_tokens,
        "cached_tokens": total.cached_tokens,
        "prefilled_tokens": total.prefilled_tokens,
        "hit_ratio": round(total.hit_ratio, 6),
        "capacity_tokens": capacity_tokens,
        "level": "block" if tokenizer is None else "token",
    }
    if as_json:
        typer.echo(json.dumps(figures))
        return
    table = Table(show_header=False, box=None)
    for name, value in figures.items():
        shown = f"{value:,}" if isinstance(value, int) else value
        table.add_row(name.replace("_", " "), "unlimited" if value is None else str(shown))
    _output_console().print(table)


@app.command()
def explain(
    plan: Annotated[
        str,
        typer.Option("--plan", help="What `ctxreuse plan` wrote; '-' reads standard input."),
    ],
    corpus: CorpusPath,
    request: Annotated[
        str | None, typer.Option(help="Explain this request only, in words; its request_id.")
    ] = None,
    worst: Annotated[
        int, typer.Option(min=0, help="How many of the requests that lost most to list.")
    ] = 10,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="A tokenizer.json: also say at which token of the prompt two part."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object a request instead.")
    ] = False,
) -> None:
    """Say why requests hit or miss the prefix cache.

    Each request is compared with those before it: the closest earlier prompt, the block at which
    they part, the tokens that are computed again, and the cause.
    """
    _only_one_from_standard_input(plan, corpus)
    blocks = read_corpus(corpus)
    planned = read_plan(plan)
    if request is not None and request not in {str(one.request_id) for one in planned}:
        raise InputFileError(f"{plan}: there is no request {request!r}; see its request_id fields")
    encoder = None if tokenizer is None else simulation.load_tokenizer(str(tokenizer))
    with _progress("comparing", len(planned)) as advance:
        explained = []
        for one in explain_plan(planned, blocks, encoder):
            explained.append(one)
            advance()
    if request is not None:
        explained = [one for one in explained if str(one.explanation.request_id) == request]
    if as_json:
        for one in explained:
            typer.echo(json.dumps(explanation_json(one)))
    elif request is not None:
        for one in explained:
            typer.echo(in_words(one))
    else:
        for table in explanation_tables(explained, worst):
            _output_console().print(table)


@app.command()
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
    html: Annotated[
        str | None, typer.Option(help="Write a report, one HTML file that needs no network, too.")
    ] = None,
    results: Annotated[
        str | None, typer.Option(help="Write what a report shows, as JSON, too.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Say what ordering would save of a trace: as retrieved, papers' order, ctxreuse.

    Conversations are replayed, each turn answered "OK.", with and without de-duplication; an
    unlimited cache and smaller ones.
    """
    from ctxreuse.evaluation import estimate as estimating
    from ctxreuse.evaluation import estimate_tables
    from ctxreuse.evaluation.results import Results

    trace_path, corpus_path = estimating.files_of(trace, corpus)
    blocks = read_corpus(corpus_path)
    requests = read_trace(trace_path, blocks)
    summary = estimating.TraceSummary.of(requests)
    encoder = None if tokenizer is None else simulation.load_tokenizer(str(tokenizer))
    capacities = [None, *capacity_tokens] if capacity_tokens else summary.cache_sizes()
    runs = estimating.runs_of(requests) * len(capacities)
    with _progress("replaying", 2 * runs * len(requests)) as advance:
        replay = Replay(requests, blocks, encoder, advance)
        outcomes = list(estimating.estimate(replay, capacities))
    if html is not None or results is not None:
        level = "blocks" if tokenizer is None else "tokens"
        measured = Results.of(Path(trace).name, level, summary, outcomes, blocks)
        if results is not None:
            measured.write(results)
        if html is not None:
            _write_report(measured, html)
    if as_json:
        typer.echo(json.dumps(estimate_tables.as_json(summary, outcomes)))
        return
    for shown in estimate_tables.renderables(summary, outcomes, capacities):
        _output_console().print(shown)


@app.command()
def report(
    results: Annotated[str, typer.Argument(help="What `ctxreuse estimate --results` wrote.")],
    output: Annotated[
        str, typer.Option("--output", "-o", help="The HTML file; it needs no network.")
    ] = "report.html",
    pictures: Annotated[
        Path | None, typer.Option(help="A folder for the charts as PNG files, too.")
    ] = None,
) -> None:
    """Make a page of results that people can look at."""
    from ctxreuse.evaluation.results import Results

    measured = Results.read(results)
    _write_report(measured, output)
    if pictures is not None:
        from ctxreuse.report import write_pictures

        for path in write_pictures(measured, pictures):
            _say(f"ctxreuse: wrote {path}")


def _write_report(results: Results, path: str) -> None:
    from ctxreuse.report import write_report

    write_report(results, path)
    _say(f"ctxreuse: wrote {path}")


@app.command()
def demo(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for the plot and the results.")
    ] = Path("demo-output"),
) -> None:
    """Plan real questions about the Python reference in several ways, and show what each saves.

    Needs no server, no model and no download; takes some seconds.
    """
    from ctxreuse.demo.run import run_demo

    run_demo(output, _output_console())


@app.command(context_settings={"allow_interspersed_args": False})
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
        list[SourceName] | None,
        typer.Option(
            help="What to listen to; several may be given. Without it, the retrievers of LangChain "
            "and LlamaIndex. openai reads paragraphs of prompts as blocks."
        ),
    ] = None,
    module: Annotated[bool, typer.Option("--module", "-m", help="As in python -m.")] = False,
) -> None:
    """Run a program as it is, and write down what it retrieves or sends.

    `ctxreuse record -o recording app.py --port 8000`, then `ctxreuse estimate recording`.
    """
    from ctxreuse.evaluation.recorded_program import run_recorded
    from ctxreuse.evaluation.recording import TraceRecorder

    with TraceRecorder(output, hash_only=hash_only) as recorder:
        try:
            run_recorded(
                program,
                arguments or [],
                recorder,
                [one.value for one in source or []],
                is_module=module,
            )
        finally:
            _say(f"ctxreuse: {recorder.requests} requests recorded in {output}")


def _say(text: str) -> None:
    """Print on standard error, where no output of a command goes."""
    print(text, file=sys.stderr)


def _only_one_from_standard_input(*paths: str) -> None:
    if paths.count(STANDARD_STREAM) > 1:
        raise InputFileError("only one file can be read from standard input ('-')")


def _output_console() -> Console:
    """Return a console that does not squeeze tables where no terminal sets a width."""
    console = Console()
    return console if console.is_terminal else Console(width=110)


@contextmanager
def _progress(task: str, total: int) -> Iterator[Callable[[], object]]:
    """Show a progress bar on standard error, if people are looking at it."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        number = progress.add_task(task, total=total)
        yield lambda: progress.advance(number)


def main() -> None:
    """Run the command; errors that the user can mend go to standard error, exit code 2."""
    try:
        app()
    except CtxreuseError as error:
        print(f"ctxreuse: {error}", file=sys.stderr)
        sys.exit(2)
