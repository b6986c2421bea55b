"""`ctxreuse demo`, `estimate`, `report` and `bench`: what ordering saves."""

from __future__ import annotations

import json
import platform
import re
import shlex
import sys
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

from ctxreuse.cli.command_options import PrintsJson, api_key
from ctxreuse.cli.terminal import check_outputs, progress, put, say, show
from ctxreuse.measure.bench.recorded_bench import (
    BenchConfig,
    bench_output,
    bench_recording,
    write_answers,
)
from ctxreuse.measure.options import CACHES, PRICES, option
from ctxreuse.measure.report import write_pictures, write_report
from ctxreuse.measure.results.measured_savings import EstimateConfig, measure_savings
from ctxreuse.measure.results.prices import prices_given
from ctxreuse.measure.results.results_file import Results
from ctxreuse.measure.results.tables import estimate_output, results_json
from ctxreuse.rules.cache_rules import cache_profile


@dataclass(frozen=True, kw_only=True)
class DemoCommand:
    """Plan questions about the Python reference in several ways, and show what each saves.

    Needs no server, no model and no download; takes some seconds.
    """

    output: Path = option(
        "Folder for the plot and the results.", Path("demo-output"), "--output", "-o"
    )
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
    """Say what ordering would save of a trace: as retrieved, papers' orders, ctxreuse.

    Conversations are replayed, each turn answered "OK.", with and without de-duplication; an
    unlimited cache and smaller ones.

    `ctxreuse estimate recording --workers 8` also says what eight processes on one engine reach:
    without a shared log they may compute more than as retrieved, with it about what one does.

    `ctxreuse estimate recording --cache openai --prices prices.json` shows the bill of a hosted
    model: what the prompts cost as they are sent today, with marks, and planned.
    """

    html: str | None = option("Write a report, one HTML file that needs no network, too.", None)
    results: str | None = option("Write what a report shows, as JSON, too.", None)

    def run(self) -> None:
        """Show the estimate."""
        check_outputs(self.html, self.results)
        for_report = self.html is not None or self.results is not None
        measured = stamped(measure_savings(self, for_report=for_report, progress=progress))
        if self.results is not None:
            measured.write(self.results)
        if self.html is not None:
            write_page(measured, self.html)
        if self.as_json:
            put(json.dumps(results_json(measured)))
        else:
            show(estimate_output(measured))


@dataclass(frozen=True, kw_only=True)
class ReportCommand:
    """Make a page of results that people can look at."""

    results: str = option("What `ctxreuse estimate --results` wrote.", argument=True)
    output: str = option("The HTML file; it needs no network.", "report.html", "--output", "-o")
    pictures: Path | None = option("A folder for the charts as PNG files, too.", None)

    def run(self) -> None:
        """Write the page."""
        check_outputs(self.output)
        measured = Results.read(self.results)
        write_page(measured, self.output)
        if self.pictures is not None:
            for path in write_pictures(measured, self.pictures):
                say(f"ctxreuse: wrote {path}")


@dataclass(frozen=True, kw_only=True)
class BenchCommand(PrintsJson, BenchConfig):
    """Replay a recording on an engine in two or three orders: hit ratios, times to first token.

    Its requests are sent as they were retrieved, in the order of ctxreuse, and with
    `--order paper` in that of the papers. The orders take turns, some requests each, and each finds
    a cache of its own, empty at first. Turns of a conversation stand behind the engine's answers to
    the turns before.

    `ctxreuse bench recording --base-url http://127.0.0.1:8000/v1`

    `ctxreuse bench recording --base-url URL --answer-tokens 200 --answers answers.jsonl` writes a
    line a question with the answer in each order, for a judge: do they stay as good?

    vLLM needs --enable-prompt-tokens-details, else it does not say what was cached. Recordings
    without texts (--hash-only) cannot be sent.
    """

    answers: Path | None = option(
        "Write the questions that were answered in every order, each with all its answers, as JSON "
        "lines.",
        None,
    )

    def run(self) -> None:
        """Send the recording."""
        check_outputs(self.answers)
        measured = bench_recording(replace(self, api_key=api_key()), progress)
        if self.answers is not None:
            write_answers(measured, self.answers)
            say(f"ctxreuse: wrote {self.answers}")
        if self.as_json:
            put(json.dumps(results_json(measured.results)))
        else:
            show(bench_output(measured.results))


def stamped(results: Results) -> Results:
    """Return results with the command that made them, without passwords, and its day."""
    command = re.sub(r"(?<=://)[^/@\s]*@", "", shlex.join(["ctxreuse", *sys.argv[1:]]))
    return replace(
        results,
        command=command,
        date=f"{date.today():%Y-%m-%d}",
        python=platform.python_version(),
    )


def write_page(results: Results, path: str) -> None:
    """Write a report, and say so."""
    write_report(results, path)
    say(f"ctxreuse: wrote {path}")
