"""A recording, sent to an engine in two or three orders that take turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from ctxreuse.context.checks import checked_choice
from ctxreuse.errors import InputFileError, InvalidRequestError
from ctxreuse.measure.bench.live_engine import LiveEngine
from ctxreuse.measure.options import BESIDE_TRACE, KEEP_BEST, option
from ctxreuse.measure.replay.estimate import TraceSummary, deduplications
from ctxreuse.measure.replay.policies import AS_SENT, TraceMode, tried_policies
from ctxreuse.measure.replay.run_result import Run
from ctxreuse.measure.replay.simulate import Progress, Replay, no_progress
from ctxreuse.measure.results.results import Results, results_of
from ctxreuse.measure.traces.recorded_prompts import read_recording
from ctxreuse.measure.traces.trace_files import TraceRequest
from ctxreuse.planner import Strategy
from ctxreuse.rules.cache_rules import CacheRules, cache_profile
from ctxreuse.serving.emulation.word_tokenizer import WordTokenizer

_ORDERS = [one for one in get_args(Strategy) if one != "none"]


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """What is sent, and to whom."""

    recording: str = option(
        "A folder that `ctxreuse record` wrote, or a trace as `ctxreuse plan` reads it.",
        argument=True,
    )
    corpus: str | None = option(BESIDE_TRACE, None)
    base_url: str = option(
        "The engine's address, such as http://127.0.0.1:8000/v1. Its key is taken from "
        "OPENAI_API_KEY."
    )
    model: str | None = option("The model to ask; the server's first one if not given.", None)
    order: Sequence[str] = option(
        "An order to compare with the retriever's: reuse (this package's) or paper "
        "(ContextPilot's); several may be given. Without it, reuse.",
        (),
    )
    mode: TraceMode = option(
        "online: each request is planned as it comes; offline: all as one batch.", "online"
    )
    cache: str = option(
        "Its cache: vllm, sglang, or 'vllm(states=junctions)' for models that keep states; then "
        "our order is sent with primes, too, which count as computed.",
        "vllm",
    )
    keep_best: bool = option(KEEP_BEST, False)
    requests: int | None = option(
        "How many requests to send, from the first on; without it, all.", None, min=1
    )
    independent: bool = option("Take turns of conversations as independent requests.", False)
    answer_tokens: int = option(
        "The longest answer in tokens; 1 is enough for the times.", 1, min=1
    )
    api_key: str = field(default="EMPTY", repr=False)


def bench_recording(
    config: BenchConfig, progress: Progress = no_progress
) -> tuple[Results, Sequence[TraceRequest]]:
    """Send a recording in each order; return what the engine says, and the requests."""
    rules = cache_profile(config.cache)
    if rules.lives:
        raise InvalidRequestError(
            f"cache must be that of an engine of your own, such as vllm, not {config.cache!r}"
        )
    blocks, trace, _ = read_recording(config.recording, config.corpus)
    trace = trace[: config.requests]
    if config.independent:
        trace = [replace(one, conversation_id=None, turn=0) for one in trace]
    _check_texts(config.recording, trace)
    runs, summary = list(_runs(config, trace, rules)), TraceSummary.of(trace)
    small = summary.cache_sizes()[1:2]
    with (
        progress("sending", 2 * len(runs) * len(trace) * (1 + len(small))) as advance,
        LiveEngine(
            config.base_url, config.model, config.api_key, config.answer_tokens, advance, rules
        ) as engine,
    ):
        measured = engine.measure(runs)
        replay = Replay(trace, blocks, WordTokenizer(), advance, rules)
        simulated = [
            replay.measure(replace(run, capacity_tokens=size)) for run in runs for size in small
        ]
    found = results_of(
        Path(config.recording).name,
        "engine",
        summary,
        measured + simulated,
        notes=tuple(note for one in measured for note in one.notes),
        keep_best=config.keep_best,
        cache=rules,
    )
    return found, trace


def _check_texts(recording: str, trace: Sequence[TraceRequest]) -> None:
    if not trace:
        raise InputFileError(f"{recording}: holds no requests; record some")
    for one in trace:
        if any(block.tokens and not block.text for block in one.blocks):
            raise InputFileError(
                f"{recording}: request {one.request_id!r} has blocks without texts; record again "
                "without --hash-only"
            )


def _runs(config: BenchConfig, trace: Sequence[TraceRequest], rules: CacheRules) -> Iterator[Run]:
    """Yield the retriever's order, and others, alone and leaving out what a conversation shows."""
    orders = {checked_choice("order", one, _ORDERS) for one in config.order} or {"reuse"}
    yield Run(AS_SENT, trace, deduplicate=False)
    for policy in tried_policies(rules, keep_best=config.keep_best):
        if policy.mode != config.mode or policy.order_name not in orders:
            continue
        for deduplicate in deduplications(trace):
            yield Run(policy, trace, deduplicate)


def answers_of(results: Results, trace: Sequence[TraceRequest]) -> list[dict[str, Any]]:
    """Return the questions that were answered in all orders, with each answer under its order."""
    answers = {
        run.policy: dict(zip(run.request_ids, run.answers, strict=True))
        for run in results.runs
        if run.capacity_tokens is None  # not simulated; the de-duplicated run of two is the last
    }
    lines: list[dict[str, Any]] = []
    for one in trace:
        said = {name: of_run.get(str(one.request_id)) for name, of_run in answers.items()}
        if None not in said.values():
            lines.append({"request_id": one.request_id, "query": one.query, "answers": said})
    return lines
