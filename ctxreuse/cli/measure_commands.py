"""`ctxreuse demo`, `estimate`, `report`, `bench`: what is saved; `doctor`, `lint`: why not more."""

from __future__ import annotations

import json
import platform
import re
import shlex
import sys
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import typer

from ctxreuse.cli.terminal import PrintsJson, api_key, progress, put, say, show
from ctxreuse.context.files import check_writable
from ctxreuse.errors import InvalidRequestError
from ctxreuse.measure.bench.recorded_bench import (
    BenchConfig,
    Judge,
    answers_of,
    bench_recording,
    in_words,
)
from ctxreuse.measure.doctor.examination import examine
from ctxreuse.measure.doctor.findings import finding_lines, findings_json, is_healthy, verdict
from ctxreuse.measure.doctor.probe import DoctorConfig
from ctxreuse.measure.lint import lint
from ctxreuse.measure.options import BESIDE_TRACE, CACHES, PRICES, option
from ctxreuse.measure.report import write_pictures, write_report
from ctxreuse.measure.report.report_page import check_report
from ctxreuse.measure.results.measured_savings import EstimateConfig, measure_savings
from ctxreuse.measure.results.prices import prices_given
from ctxreuse.measure.results.results import Results
from ctxreuse.measure.results.tables import estimate_output, results_json
from ctxreuse.measure.traces.json_lines import write_lines
from ctxreuse.measure.traces.recorded_prompts import read_recording
from ctxreuse.rules.cache_rules import cache_profile


@dataclass(frozen=True, kw_only=True)
class DemoCommand:
    """Plan questions about the Python reference in several ways, and show what each saves.

    Needs no server, no model and no download; takes some seconds.
    """

    output: Path = option("Folder for the plot.", Path("demo-output"), "--output", "-o")
    cache: str = option(f"{CACHES} Of a provider's cache, what is shown is the bill.", "vllm")
    prices: str | None = option(PRICES, None, metavar="FILE|MODEL")

    def run(self) -> None:
        """Show the demo."""
        from ctxreuse.measure.demo.demo_run import run_demo

        profile = cache_profile(self.cache)
        known = prices_given(self.prices, profile)
        show(run_demo(self.output, progress, known, profile))


@dataclass(frozen=True, kw_only=True)
class EstimateCommand(PrintsJson, EstimateConfig):
    """Say what would be saved of a recording or a trace, and which change saves it.

    A recording of LangChain or LlamaIndex has whole prompts. They are replayed as they are, and
    with each change that applies. Of a trace, and for a provider's bill, only the documents are
    replayed, and each turn of a conversation is answered "OK.".

    `ctxreuse estimate recording --cache openai --prices prices.json` shows the bill of a hosted
    model: as sent today, with breakpoints, and planned.
    """

    html: str | None = option(
        "Write a report, one HTML file that needs no network, too.", None, "--html", "-o"
    )

    def run(self) -> None:
        """Show the estimate."""
        measured = _measured(self, self.html)
        if self.as_json:
            put(json.dumps(results_json(measured)))
        else:
            show(estimate_output(measured))


@dataclass(frozen=True, kw_only=True)
class ReportCommand(EstimateConfig):
    """Write an estimate as an HTML page, and its charts as pictures.

    `ctxreuse report recording -o report.html`
    """

    output: str = option("The HTML file; it needs no network.", "report.html", "--output", "-o")
    pictures: Path | None = option("A folder for the charts as PNG files, too.", None)

    def run(self) -> None:
        """Write the page."""
        measured = _measured(self, self.output)
        if self.pictures is not None:
            for path in write_pictures(measured, self.pictures):
                say(f"wrote {path}")


def _measured(asked: EstimateConfig, html: str | None) -> Results:
    check_writable(html)
    if html is not None:
        check_report()
    measured = stamped(measure_savings(asked, for_report=html is not None, progress=progress))
    if html is not None:
        write_report(measured, html)
        say(f"wrote {html}")
    return measured


@dataclass(frozen=True, kw_only=True)
class BenchCommand(PrintsJson, BenchConfig):
    """Replay a recording on an engine in two or three orders: hit ratios, times to first token.

    Its requests are sent as they were retrieved, in the order of ctxreuse, and with
    `--order paper` in that of the papers. The orders take turns. Each begins with an empty cache of
    its own. In a conversation, the engine's own answers stand between the turns.

    `ctxreuse bench recording --base-url http://127.0.0.1:8000/v1`

    `ctxreuse bench recording --base-url URL --answer-tokens 200 --answers answers.jsonl --judge URL
    MODEL` writes the answers in each order, and has a model compare them with those as retrieved.

    Start vLLM with --enable-prompt-tokens-details, else it does not say what was cached. Recordings
    without texts (--hash-only) cannot be sent.
    """

    answers: Path | None = option(
        "Write the questions that were answered in every order, each with all its answers, as JSON "
        "lines.",
        None,
    )
    judge: tuple[str, str] | None = option(
        "A model that compares these answers: its OpenAI-compatible address (key as of --base-url) "
        "and its name. It sees each pair twice, with the sides swapped: one is better where it "
        "says so both times; else it is a tie.",
        None,
        metavar="URL MODEL",
    )

    def run(self) -> None:
        """Send the recording."""
        if self.judge is not None and self.answers is None:
            raise InvalidRequestError("--judge compares answers; give --answers FILE, too")
        check_writable(self.answers)
        judge = None if self.judge is None else Judge(*self.judge, api_key())
        if judge is not None:
            judge.check()
        results, trace = bench_recording(replace(self, api_key=api_key()), progress)
        lines, judged = answers_of(results, trace), dict[str, Any]()
        if self.answers is not None:
            write_lines(str(self.answers), lines)
            say(f"wrote {self.answers}")
        if judge is not None:
            judged = {**judge.compare(lines, progress)}
            write_lines(str(self.answers), lines)
        if self.as_json:
            put(json.dumps(results_json(results) | {"judged": judged}))
        else:
            show(estimate_output(results))
            show(in_words(judged))


@dataclass(frozen=True, kw_only=True)
class DoctorCommand(PrintsJson, DoctorConfig):
    """Say why an engine's prefix cache does not hit, and what to do.

    It prints a verdict, then a line for each check. Exit code 1 says that there is a problem. What
    cannot be told from outside is "not known", and no problem. Prompts are made up, and what they
    cost is said before they are sent. Nothing of a recording is sent anywhere.

    `ctxreuse doctor recording --base-url http://127.0.0.1:8000/v1`
    """

    def run(self) -> None:
        """Look, and say what was found."""
        findings = examine(replace(self, api_key=api_key()), say)
        if self.as_json:
            put(json.dumps(findings_json(findings)))
        else:
            put(f"{verdict(findings)}\n")
            for line in finding_lines(findings):
                put(line)
        if not is_healthy(findings):
            raise typer.Exit(1)


@dataclass(frozen=True, kw_only=True)
class LintCommand(PrintsJson):
    """Find in a recorded trace what keeps the prefix cache from hitting, and what it costs.

    It looks for text that varies in front of the documents (times, ids, counters), tools and
    documents in changing order, breakpoints that are lost, too many or behind the question, and
    prompts just under the provider's minimum. Each finding names a request, the prompt tokens that
    could have been read, their share of the bill, and a remedy. A token can count in several.

    Exit code 1 says that something was found. Nothing is sent anywhere. Only recordings of whole
    prompts have tools and breakpoints:

    `ctxreuse record --source anthropic -o recording app.py`

    `ctxreuse lint recording --cache anthropic`
    """

    recording: str = option(
        "A folder that `ctxreuse record` wrote, a trace, or a plan.", argument=True
    )
    corpus: str | None = option(BESIDE_TRACE, None)
    cache: str = option(CACHES, "vllm")
    prices: str | None = option(PRICES, None, metavar="FILE|MODEL")

    def run(self) -> None:
        """Look, and say what was found."""
        profile = cache_profile(self.cache)
        known = prices_given(self.prices, profile)
        blocks, trace, _ = read_recording(self.recording, self.corpus)
        report = replace(lint(trace, blocks, profile, progress), prices=known)
        if self.as_json:
            put(json.dumps(report.as_json()))
        else:
            show(report.output())
        if report.findings:
            raise typer.Exit(1)


def stamped(results: Results) -> Results:
    """Return results with the command that made them, without passwords, and its day."""
    command = re.sub(r"(?<=://)[^/@\s]*@", "", shlex.join(["ctxreuse", *sys.argv[1:]]))
    return replace(
        results, command=command, date=f"{date.today():%Y-%m-%d}", python=platform.python_version()
    )
