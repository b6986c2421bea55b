"""What `ctxreuse doctor` does: asks what it was given, and says what it has found."""

from __future__ import annotations

import asyncio
import platform
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import distributions

from ctxreuse.errors import MissingExtraError
from ctxreuse.measure.doctor.engine_findings import (
    engine_findings,
    metrics_finding,
    processes_finding,
)
from ctxreuse.measure.doctor.findings import NO_ENGINE, Finding, Verdict
from ctxreuse.measure.doctor.probe import DoctorConfig, LogWatch, probe
from ctxreuse.measure.traces.changing_documents import (
    IN_TEXTS,
    UNKNOWN,
    changing_documents,
    hides_texts,
)
from ctxreuse.measure.traces.recorded_prompts import read_recording
from ctxreuse.measure.traces.trace_files import TraceRequest
from ctxreuse.measure.traces.varying_fronts import first_turns, front_variations, texts_in_front

_FRONTS = "in front of the contexts"


def examine(config: DoctorConfig, announce: Callable[[str], object]) -> list[Finding]:
    """Look at an engine, its metrics, a log and a recording, as far as they were given."""
    trace = None if config.recording is None else read_recording(config.recording, config.corpus)[1]
    recorded = [] if trace is None else [check_fronts(trace), *check_documents(trace)]
    installed = [check_installation()] if config.report else []
    if not (config.base_url or config.metrics_url or config.shared_log):
        return installed + recorded
    named_log, stream = config.shared_log, config.stream
    log = None if named_log is None else LogWatch(named_log, stream, config.timeout_s)
    named = "--metrics" if config.base_url is None else "--base-url"
    try:
        readings = asyncio.run(probe(config, announce, log))
    except MissingExtraError as error:
        raise MissingExtraError(f"doctor {named}", "openai") from error
    findings = list(engine_findings(readings)) if config.base_url is not None else []
    if config.base_url is not None or config.metrics_url is not None:
        findings.append(metrics_finding(readings, is_asked_for=config.metrics_url is not None))
    findings.append(processes_finding(readings, log, config.workers))
    if readings.error is not None and not readings.sent:
        findings = [
            replace(one, remedy=NO_ENGINE) if one.verdict is Verdict.UNKNOWN else one
            for one in findings
        ]
    return installed + findings + recorded


def check_installation() -> Finding:
    """Say which of the packages that ctxreuse can use are installed."""
    known = {str(one.name).lower().replace("_", "-"): one for one in distributions()}
    own = getattr(known.get("ctxreuse"), "requires", None) or ()
    asked = {"ctxreuse", *[re.split("[^a-z0-9-]", one)[0] for one in own]}
    held = ", ".join(f"{name} {known[name].version}" for name in sorted(asked) if name in known)
    found = f"Python {platform.python_version()}, {platform.platform()}: {held}"
    return Finding("installed", Verdict.OK, found)


def check_fronts(trace: Sequence[TraceRequest]) -> Finding:
    """Look for what varies in front of the contexts of a recorded trace."""
    changing = changing_documents(trace)  # which says more of a first paragraph that is a document
    requests = first_turns(trace if changing is None else changing.settled(trace))
    forms = sum(len(set(texts)) for texts in texts_in_front(requests).values())
    figures = {"requests": len(requests)}
    if not forms:
        if requests and all(one.sent is not None or one.front == "" for one in requests):
            found = f"0 texts in front of the contexts of {len(requests):,} whole prompts"
            return Finding(_FRONTS, Verdict.OK, found, "", figures)
        found = f"{len(requests):,} requests, none with a system text: retrievers do not see it"
        remedy = "record what clients send: ctxreuse record --source openai -o recording app.py"
        return Finding(_FRONTS, Verdict.UNKNOWN, found, remedy, figures)
    often = [one for one in front_variations(requests) if one.is_often]
    if often:
        worst = max(often, key=lambda one: one.requests)
        figures = {"requests": worst.requests, "forms": worst.forms, "set_ups": len(often)}
        return Finding(_FRONTS, Verdict.PROBLEM, str(worst), worst.remedy, figures)
    found = f"{forms:,} form{'s' * (forms > 1)} in {len(requests):,} requests"
    return Finding(_FRONTS, Verdict.OK, found, "", figures | {"forms": forms})


def check_documents(trace: Sequence[TraceRequest]) -> Iterator[Finding]:
    """Yield what changes in a recorded trace's documents, if anything does, or may."""
    changing = changing_documents(trace)
    if hides_texts(trace):
        yield Finding("documents", Verdict.UNKNOWN, UNKNOWN, IN_TEXTS)
    elif changing is not None:
        yield Finding("documents", Verdict.PROBLEM, str(changing), changing.remedy)
