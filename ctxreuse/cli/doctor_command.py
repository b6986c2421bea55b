"""`ctxreuse doctor`: why the prefix cache does not hit."""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer

from ctxreuse.cli.terminal import AsJson, put, say


def doctor(
    recording: Annotated[
        str | None,
        typer.Argument(
            help="A folder that `ctxreuse record` wrote, or a trace: does anything vary in front "
            "of the contexts?"
        ),
    ] = None,
    corpus: Annotated[
        str | None,
        typer.Option("--corpus", help="Its blocks; corpus.jsonl beside the trace if not given."),
    ] = None,
    base_url: Annotated[
        str | None,
        typer.Option(
            help="Send this engine four made-up prompts, each at most 20,000 tokens long: is the "
            "cache on, does usage report it, does a common half hit? The key is taken from "
            "OPENAI_API_KEY."
        ),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            "--metrics", help="Where vLLM's metrics are, if not at /metrics of the same server."
        ),
    ] = None,
    shared_log: Annotated[
        str | None,
        typer.Option(
            envvar="CTXREUSE_SHARED_LOG",
            help="The log that the processes share: who writes to it? The file of a SQLiteLog, or "
            "the URL of a RedisLog's server, whose secret is not needed; a password is in no list "
            "of processes if CTXREUSE_SHARED_LOG holds the URL.",
        ),
    ] = None,
    stream: Annotated[
        str | None,
        typer.Option(help="The name of the RedisLog's stream, if it is not the usual one."),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="How many processes of yours send prompts to the engine."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The model to ask; the server's first one if not given.")
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=64,
            max=20_000,
            help="How long a prompt is, about; without it 2,800, or what large cache blocks need.",
        ),
    ] = None,
    watch: Annotated[
        float,
        typer.Option(min=0, max=3_600, help="Seconds without a prompt, to see those of others."),
    ] = 2.0,
    timeout: Annotated[
        float, typer.Option(min=0.1, max=3_600, help="Seconds that an answer may take.")
    ] = 30.0,
    as_json: AsJson = False,
) -> None:
    """Say why an engine's prefix cache does not hit, and what to do.

    A verdict, then a line for each check. Ends with exit code 1 if there is a problem. What cannot
    be told from outside is "not known", and no problem. Prompts are made up, and what they cost is
    said before they are sent; nothing of a recording is sent anywhere.

    `ctxreuse doctor recording --base-url http://127.0.0.1:8000/v1`
    """
    # loads clients of engines
    from ctxreuse.measure.doctor import (
        DoctorConfig,
        examine,
        finding_lines,
        findings_json,
        is_healthy,
        verdict,
    )

    findings = examine(
        DoctorConfig(
            recording=recording,
            corpus=corpus,
            base_url=base_url,
            metrics_url=metrics,
            shared_log=shared_log,
            stream=stream,
            workers=workers,
            model=model,
            api_key=os.environ.get("OPENAI_API_KEY") or "EMPTY",
            tokens=tokens,
            quiet_s=watch,
            timeout_s=timeout,
        ),
        lambda words: say(f"ctxreuse: {words}"),
    )
    if as_json:
        put(json.dumps(findings_json(findings)))
    else:
        put(f"{verdict(findings)}\n")
        for line in finding_lines(findings):
            put(line)
    if not is_healthy(findings):
        raise typer.Exit(1)
