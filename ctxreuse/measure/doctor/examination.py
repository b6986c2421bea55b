"""What `ctxreuse doctor` does: asks what it was given, and says what it has found."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from ctxreuse.context.checks import checked_number, checked_optional_integer
from ctxreuse.errors import InvalidRequestError, MissingExtraError, describe
from ctxreuse.measure.doctor.engine_findings import (
    engine_findings,
    metrics_finding,
    processes_finding,
)
from ctxreuse.measure.doctor.findings import AN_ANSWER, Finding, Verdict
from ctxreuse.measure.doctor.front_findings import check_fronts
from ctxreuse.measure.doctor.log_watch import LogWatch
from ctxreuse.measure.doctor.probe import MOST_TOKENS, EngineReadings, ProbeSettings, probe
from ctxreuse.measure.options import BESIDE_TRACE, option
from ctxreuse.measure.traces.recording_folder import read_recording


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """What is looked at; at least one of them."""

    recording: str | None = option(
        "A folder that `ctxreuse record` wrote, or a trace: does anything vary in front of the "
        "contexts?",
        None,
        argument=True,
    )
    corpus: str | None = option(BESIDE_TRACE, None)
    base_url: str | None = option(
        "Send this engine four made-up prompts, each at most 20,000 tokens long: is the cache on, "
        "does usage report it, does a common half hit? The key is taken from OPENAI_API_KEY.",
        None,
    )
    metrics_url: str | None = option(
        "Where vLLM's metrics are, if not at /metrics of the same server.", None, "--metrics"
    )
    shared_log: str | None = option(
        "The log that the processes share: who writes to it? The file of a SQLiteLog, or the URL "
        "of a RedisLog's server, whose secret is not needed; a password is in no list of processes "
        "if CTXREUSE_SHARED_LOG holds the URL.",
        None,
        secret=True,
        envvar="CTXREUSE_SHARED_LOG",
    )
    stream: str | None = option(
        "The name of the RedisLog's stream, if it is not the usual one.", None
    )
    workers: int | None = option(
        "How many processes of yours send prompts to the engine.", None, min=1
    )
    model: str | None = option("The model to ask; the server's first one if not given.", None)
    tokens: int | None = option(
        "How long a prompt is, about; without it 2,800, or what large cache blocks need.",
        None,
        min=64,
        max=MOST_TOKENS,
    )
    quiet_s: float = option(
        "Seconds without a prompt, to see those of others.", 2.0, "--watch", min=0, max=3_600
    )
    timeout_s: float = option(
        "Seconds that an answer may take.", 30.0, "--timeout", min=0.1, max=3_600
    )
    api_key: str = field(default="EMPTY", repr=False)

    def __post_init__(self) -> None:
        """Check it."""
        if not (self.recording or self.base_url or self.metrics_url or self.shared_log):
            raise InvalidRequestError(
                "there is nothing to look at; give --base-url, --metrics, --shared-log or a folder "
                "that ctxreuse record wrote"
            )
        checked_optional_integer("workers", self.workers, 1)
        if (checked_optional_integer("tokens", self.tokens, 64) or 0) > MOST_TOKENS:
            raise InvalidRequestError(
                f"tokens must be at most {MOST_TOKENS:,}, not {describe(self.tokens)}"
            )
        checked_number("quiet_s", self.quiet_s)
        checked_number("timeout_s", self.timeout_s)


def examine(config: DoctorConfig, announce: Callable[[str], object]) -> list[Finding]:
    """Look at an engine, its metrics, a log and a recording, as far as they were given."""
    trace = None if config.recording is None else read_recording(config.recording, config.corpus)[1]
    fronts = [] if trace is None else [check_fronts(trace)]
    return [*_examine_engine(config, announce), *fronts]


def _examine_engine(config: DoctorConfig, announce: Callable[[str], object]) -> Iterator[Finding]:
    if not (config.base_url or config.metrics_url or config.shared_log):
        return
    log = None
    if config.shared_log is not None:
        log = LogWatch(config.shared_log, config.stream, config.timeout_s)
    settings = ProbeSettings(
        base_url=config.base_url,
        metrics_url=config.metrics_url,
        model=config.model,
        api_key=config.api_key,
        tokens=config.tokens,
        quiet_s=config.quiet_s,
        timeout_s=config.timeout_s,
    )
    option = "--metrics" if config.base_url is None else "--base-url"
    try:
        readings = asyncio.run(probe(settings, announce, log))
    except MissingExtraError as error:
        raise MissingExtraError(f"doctor {option}", "openai") from error
    for one in _of_engine(config, readings, log):
        is_open = readings.is_silent and one.verdict is Verdict.UNKNOWN
        yield replace(one, needs=AN_ANSWER) if is_open else one


def _of_engine(
    config: DoctorConfig, readings: EngineReadings, log: LogWatch | None
) -> Iterator[Finding]:
    if config.base_url is not None:
        yield from engine_findings(readings)
    if config.base_url is not None or config.metrics_url is not None:
        yield metrics_finding(readings, is_asked_for=config.metrics_url is not None)
    yield processes_finding(readings, log, config.workers)
