"""`ctxreuse record`, `estimate` and `report`: what an application would save."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ctxreuse.cli.common import output_console, progress, say
from ctxreuse.evaluation.replay.outcomes import Replay
from ctxreuse.evaluation.replay.policies import POLICIES
from ctxreuse.evaluation.replay.simulate import load_tokenizer
from ctxreuse.evaluation.traces.trace_files import read_corpus, read_trace

if TYPE_CHECKING:
    from ctxreuse.evaluation.results.results_file import Results


class SourceName(StrEnum):
    """Where blocks are seen."""

    langchain = "langchain"
    llamaindex = "llamaindex"
    openai = "openai"


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
    from ctxreuse.evaluation.traces.recorded_program import run_recorded
    from ctxreuse.evaluation.traces.recording import TraceRecorder

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
    from ctxreuse.evaluation.replay import estimate as estimating
    from ctxreuse.evaluation.results import tables
    from ctxreuse.evaluation.results.results_file import Results
    from ctxreuse.evaluation.results.runs import K_PART, Run

    trace_path, corpus_path = estimating.files_of(trace, corpus)
    blocks = read_corpus(corpus_path)
    requests = read_trace(trace_path, blocks)
    summary = estimating.TraceSummary.of(requests)
    encoder = None if tokenizer is None else load_tokenizer(str(tokenizer))
    capacities = [None, *capacity_tokens] if capacity_tokens else summary.cache_sizes()
    has_report = html is not None or results is not None
    ks = estimating.usual_ks(requests) if has_report else []
    rounds = estimating.runs_of(requests) * len(capacities) + len(POLICIES) * len(ks)
    with progress("replaying", 2 * rounds * len(requests)) as advance:
        replay = Replay(requests, blocks, encoder, advance)
        outcomes = list(estimating.estimate(replay, capacities))
        policy_runs = list(map(Run.of, outcomes))
        over_k = list(estimating.estimate_over_k(replay, ks))
    if has_report:
        measured = Results.of(
            Path(trace).name,
            "blocks" if tokenizer is None else "tokens",
            summary,
            [*policy_runs, *(Run.of(one, part=K_PART, k=k) for k, one in over_k)],
            estimating.shown(outcomes).planned,
            blocks,
            bounds=estimating.reuse_bounds(requests, ks),
        )
        if results is not None:
            measured.write(results)
        if html is not None:
            write_page(measured, html)
    if as_json:
        typer.echo(json.dumps(tables.as_json(summary, policy_runs)))
        return
    for shown in tables.estimate_renderables(summary, policy_runs):
        output_console().print(shown)


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
    from ctxreuse.evaluation.results.results_file import Results

    measured = Results.read(results)
    write_page(measured, output)
    if pictures is not None:
        from ctxreuse.evaluation.report import write_pictures

        for path in write_pictures(measured, pictures):
            say(f"ctxreuse: wrote {path}")


def write_page(results: Results, path: str) -> None:
    """Write a report, and say so."""
    from ctxreuse.evaluation.report import write_report

    write_report(results, path)
    say(f"ctxreuse: wrote {path}")
