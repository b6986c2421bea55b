"""`ctxreuse lint`: what in a recorded trace keeps a prefix cache from hitting."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated

import typer

from ctxreuse.cli.bill_options import PricesGiven, prices_given
from ctxreuse.cli.terminal import AsJson, CacheName, put, show
from ctxreuse.context.cache_profile import cache_profile
from ctxreuse.measure.lint import lint
from ctxreuse.measure.traces.recording_folder import read_recording


def lint_recording(
    recording: Annotated[
        str, typer.Argument(help="A folder that `ctxreuse record` wrote, a trace, or a plan.")
    ],
    corpus: Annotated[
        str | None,
        typer.Option("--corpus", help="Its blocks; corpus.jsonl beside the trace if not given."),
    ] = None,
    cache: CacheName = None,
    prices: PricesGiven = None,
    as_json: AsJson = False,
) -> None:
    """Find in a recorded trace what keeps the prefix cache from hitting, and what it costs.

    Looks for text that varies in front of the documents (times, ids, counters), tools and documents
    in changing order, marks that are lost, too many or behind the question, and prompts just under
    the provider's minimum. Each finding names a request that shows it, the prompt tokens that were
    computed and could have been read, their share of the bill, and a remedy. One token can count
    in several findings.

    Ends with exit code 1 if anything is found. Nothing is sent anywhere. Tools and marks are in
    recordings of whole prompts:

    `ctxreuse record --source anthropic -o recording app.py`

    `ctxreuse lint recording --cache anthropic`
    """
    profile = cache_profile(cache or "vllm")
    known = prices_given(prices, profile)
    blocks, trace = read_recording(recording, corpus)
    report = replace(lint(trace, blocks, profile), prices=known)
    if as_json:
        put(json.dumps(report.as_json()))
    else:
        show(report.output())
    if report.findings:
        raise typer.Exit(1)
