"""What `ctxreuse doctor` does: asks what it was given, and says what it has found."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace

from ctxreuse.errors import MissingExtraError
from ctxreuse.measure.doctor.doctor_config import DoctorConfig
from ctxreuse.measure.doctor.engine_findings import (
    engine_findings,
    metrics_finding,
    processes_finding,
)
from ctxreuse.measure.doctor.findings import AN_ANSWER, Finding, Verdict
from ctxreuse.measure.doctor.front_findings import check_documents, check_fronts
from ctxreuse.measure.doctor.log_watch import LogWatch
from ctxreuse.measure.doctor.probe import probe
from ctxreuse.measure.traces.recorded_prompts import read_recording


def examine(config: DoctorConfig, announce: Callable[[str], object]) -> list[Finding]:
    """Look at an engine, its metrics, a log and a recording, as far as they were given."""
    trace = None if config.recording is None else read_recording(config.recording, config.corpus)[1]
    recorded = [] if trace is None else [check_fronts(trace), *check_documents(trace)]
    return [*_examine_engine(config, announce), *recorded]


def _examine_engine(config: DoctorConfig, announce: Callable[[str], object]) -> Iterator[Finding]:
    if not (config.base_url or config.metrics_url or config.shared_log):
        return
    log = None
    if config.shared_log is not None:
        log = LogWatch(config.shared_log, config.stream, config.timeout_s)
    named = "--metrics" if config.base_url is None else "--base-url"
    try:
        readings = asyncio.run(probe(config, announce, log))
    except MissingExtraError as error:
        raise MissingExtraError(f"doctor {named}", "openai") from error
    findings = list(engine_findings(readings)) if config.base_url is not None else []
    if config.base_url is not None or config.metrics_url is not None:
        findings.append(metrics_finding(readings, is_asked_for=config.metrics_url is not None))
    for one in (*findings, processes_finding(readings, log, config.workers)):
        is_open = readings.is_silent and one.verdict is Verdict.UNKNOWN
        yield replace(one, needs=AN_ANSWER) if is_open else one
