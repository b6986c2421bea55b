"""`ctxreuse doctor` and `lint`: why the prefix cache does not hit."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import typer

from ctxreuse.cli.command_options import PrintsJson, api_key
from ctxreuse.cli.terminal import progress, put, say, show
from ctxreuse.measure.doctor.examination import examine
from ctxreuse.measure.doctor.findings import finding_lines, findings_json, is_healthy, verdict
from ctxreuse.measure.doctor.probe import DoctorConfig
from ctxreuse.measure.lint import lint
from ctxreuse.measure.options import BESIDE_TRACE, CACHES, PRICES, option
from ctxreuse.measure.results.prices import prices_given
from ctxreuse.measure.traces.recorded_prompts import read_recording
from ctxreuse.rules.cache_rules import cache_profile


@dataclass(frozen=True, kw_only=True)
class DoctorCommand(PrintsJson, DoctorConfig):
    """Say why an engine's prefix cache does not hit, and what to do.

    A verdict, then a line for each check. Ends with exit code 1 if there is a problem. What cannot
    be told from outside is "not known", and no problem. Prompts are made up, and what they cost is
    said before they are sent; nothing of a recording is sent anywhere.

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
