"""What a benchmark shows: tables, CSV, and what has changed since an earlier one."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias

from ctxreuse.context.files import write_text
from ctxreuse.context.thoughts import without_thoughts
from ctxreuse.context.tokens import well_formed
from ctxreuse.measure.replay.simulate import RunResult
from ctxreuse.measure.results.bill import Bill
from ctxreuse.measure.results.results import Results
from ctxreuse.measure.results.tables import (
    POLICY,
    Runs,
    bill_lines,
    bootstrap_interval,
    by_kind,
    cache_sizes,
    engine_table,
    first_token_seconds,
    in_words,
    interval_words,
    reached,
    results_json,
    tables,
    verdict_output,
)
from ctxreuse.measure.results.verdict import cache_words
from ctxreuse.measure.table import Shown, Table
from public_data.benchmark import Measured, Part
from public_data.quality.scoring import exact_match, token_f1

_Scores: TypeAlias = Mapping[str, tuple[float, float]]
"""By request: F1 and exact match of its answer."""


def scores(run: RunResult, references: Mapping[str, Sequence[str]]) -> _Scores:
    """Return the scores of an engine's answers to questions with known right answers."""
    return {
        one: (token_f1(said, references[one]), exact_match(said, references[one]))
        for one, answer in zip(run.request_ids, run.answers, strict=True)
        if references.get(one)
        for said in (without_thoughts(answer),)
    }


def bench_output(measured: Measured, *, is_scored: bool) -> Iterator[Shown]:
    """Yield what a terminal shows of a benchmark."""
    results = measured.results
    yield from verdict_output(results)
    yield f"{results.title}: {in_words(results.trace)}"
    yield ", ".join(f"{name}: {value}" for name, value in results.settings)
    yield from tables(results)
    yield from more_tables(measured, is_scored=is_scored)
    bill = Bill.of(results)
    if bill is not None:
        yield from bill_lines(bill)
    yield from results.notes


def bench_json(results: Results) -> dict[str, Any]:
    """Return a benchmark as a JSON object: what an estimate has, of all parts."""
    found = results_json(results, results.runs)
    runs = [
        {"part": run.part, "k": run.k, "sessions": run.sessions, **told}
        for run, told in zip(results.runs, found["runs"], strict=True)
    ]
    more = {"title": results.title, "settings": dict(results.settings), "notes": results.notes}
    return {**more, **found, "runs": runs}


def more_tables(measured: Measured, *, is_scored: bool) -> Iterator[Table]:
    """Yield the tables of what only benchmarks measure: scores, sessions, ablations."""
    results = measured.results
    policies, ablations = results.part(), results.part(Part.ablations)
    sessions = results.part(Part.sessions)
    for runs in (policies, sessions, ablations) if is_scored else ():
        if any(run.answers for run in runs):
            yield from _score_table(runs, measured.references)
    if results.part(Part.k):
        yield _ks(results)
    if sessions:
        size = cache_words(sessions[0].capacity_tokens)
        title = f"Hit ratio by conversations at a time, with {size}"
        yield _grid(title, sessions, lambda run: str(run.sessions))
    if any(run.first_token_s for run in sessions):
        title = "Conversations at a time, as the engine reported"
        yield engine_table(title, sessions, lambda run: f"{run.policy} ({run.sessions})")
    if any(run.first_token_s for run in ablations):
        yield engine_table("One idea less, as the engine reported", ablations)
    elif ablations:
        groups = {
            cache_words(size): [run for run in ablations if run.capacity_tokens == size]
            for size in cache_sizes(ablations)
        }
        columns = {"": lambda run: run.policy} | reached(policies)
        yield Table.of("One idea less", groups, columns)


def _ks(results: Results) -> Table:
    """Return hit ratios by blocks a request, and how much of them had been sent before."""
    more = "" if results.level == "blocks" else ", of block tokens alone"
    more += "; histories come on top" if results.trace.conversations else ""
    bounds = {str(k): f"{share:.3f}" for k, share in results.bounds}
    shown = _grid("Hit ratio by blocks a request", results.part(Part.k), lambda run: str(run.k))
    last = (f"reuse bound{more}", *(bounds.get(name, "") for name in shown.head[1:]))
    return Table(shown.title, shown.head, (*shown.rows, last))


def _grid(title: str, runs: Runs, column: Callable[[RunResult], str]) -> Table:
    """Return a table of hit ratios with a row a policy and a column for each value."""
    ratios: dict[str, dict[str, str]] = {}
    for run in runs:
        ratios.setdefault(run.policy, {})[column(run)] = f"{run.total.hit_ratio:.3f}"

    def cell(name: str, row: tuple[str, Mapping[str, str]]) -> str:
        return row[1].get(name, "")

    columns: dict[str, Callable[[tuple[str, Mapping[str, str]]], str]] = {
        name: partial(cell, name) for name in dict.fromkeys(map(column, runs))
    }
    rows, first = {"": ratios.items()}, {next(iter(POLICY)): lambda row: row[0]}
    return Table.of(title, rows, first | columns)


def _score_table(runs: Runs, references: Mapping[str, Sequence[str]]) -> Iterator[Table]:
    """Yield F1, its change against the first run's answers to the same questions, exact match."""
    base = scores(runs[0], references)
    scored = {id(run): scores(run, references) for run in runs}
    if not base:
        return

    def change(run: RunResult) -> str:
        own = scored[id(run)]
        pairs = [f1 - base[one][0] for one, (f1, _) in own.items() if one in base]
        return interval_words(bootstrap_interval(pairs), "+") if pairs else ""

    def shown(run: RunResult, at: int) -> list[float]:
        return [one[at] for one in scored[id(run)].values()]

    columns: dict[str, Callable[[RunResult], str]] = {
        **POLICY,
        "scored": lambda run: str(len(scored[id(run)])),
        "F1": lambda run: interval_words(bootstrap_interval(shown(run, 0))),
        "F1, change": change,
        "exact match": lambda run: f"{fmean(shown(run, 1)):.3f}",
    }
    answered = [run for run in runs if scored[id(run)]]
    yield Table.of("How good the answers are", by_kind(answered), columns)


def write_csv(measured: Measured, path: Path) -> None:
    """Write one line a run."""
    lines = [_line(run, measured.references) for run in measured.results.runs]
    table = io.StringIO()
    writer = csv.DictWriter(table, lines[0] if lines else [])
    writer.writeheader()
    writer.writerows(lines)
    write_text(path, well_formed(table.getvalue()))


def _line(run: RunResult, references: Mapping[str, Sequence[str]]) -> dict[str, object]:
    names = ("part", "policy", "deduplicated", "capacity_tokens", "k", "sessions")
    counts = ("prompt_tokens", "cached_tokens", "prefilled_tokens")
    scored = list(scores(run, references).values())
    return {
        **{name: getattr(run, name) for name in names},
        "requests": len(run.prompt_tokens),
        **{name: getattr(run.total, name) for name in counts},
        "hit_ratio": round(run.total.hit_ratio, 6),
        "planning_ms": run.planning_ms,
        "first_token_p50_s": None,
        "first_token_p95_s": None,
        **first_token_seconds(run),
        "scored": len(scored),
        "f1": round(fmean(f1 for f1, _ in scored), 6) if scored else None,
        "exact_match": round(fmean(exact for _, exact in scored), 6) if scored else None,
        "failures": run.failures,
    }


def comparison(old: Results, new: Results) -> Iterator[Shown]:
    """Yield what has changed between two results of the same benchmark."""
    yield f"compared with ctxreuse {old.version}, {old.title}"
    before_settings = dict(_settings(old))
    for name, value in _settings(new):
        was_set = before_settings.get(name, "not said")
        if was_set != value:
            yield f"not the same setting: {name} was {was_set}, is {value}"
    before = {_key(run): run for run in old.runs}
    now = {_key(run): run for run in new.runs}
    yield from _only_in(now, before, "not measured before")
    yield from _only_in(before, now, "no longer measured")
    both = [(run, before[key]) for key, run in now.items() if key in before]
    changed = [(run, earlier) for run, earlier in both if run.total != earlier.total]
    if changed:
        columns: dict[str, Callable[[tuple[RunResult, RunResult]], str]] = {
            next(iter(POLICY)): lambda pair: _run_name(pair[0]),
            "before": lambda pair: f"{pair[1].total.hit_ratio:.3f}",
            "now": lambda pair: f"{pair[0].total.hit_ratio:.3f}",
            "change": lambda pair: f"{pair[0].total.hit_ratio - pair[1].total.hit_ratio:+.3f}",
            "prefilled,\ntimes before": lambda pair: (
                f"{pair[0].total.prefilled_tokens / max(1, pair[1].total.prefilled_tokens):.3f}"
            ),
            "planning ms\nbefore": lambda pair: f"{pair[1].planning_ms:.3f}",
            "planning ms\nnow": lambda pair: f"{pair[0].planning_ms:.3f}",
        }
        yield Table.of("Hit ratio and prefilled tokens, before and now", {"": changed}, columns)
    yield f"{len(both) - len(changed)} of {len(new.runs)} runs are exactly as before"


def _only_in(
    runs: Mapping[tuple[object, ...], RunResult],
    others: Mapping[tuple[object, ...], RunResult],
    what: str,
) -> Iterator[str]:
    """Yield the parts of a benchmark, and the runs of common parts, that others lack."""
    parts = {run.part for run in others.values()}
    for part, number in Counter(run.part for run in runs.values()).items():
        if part not in parts:
            yield f"{what}: {part}, all {number:,} runs"
    for key, run in runs.items():
        if key not in others and run.part in parts:
            yield f"{what}: {_run_name(run)}"


def _settings(results: Results) -> tuple[tuple[str, str], ...]:
    return ("title", results.title), ("counted in", results.level), *results.settings


def _key(run: RunResult) -> tuple[object, ...]:
    return run.part, run.policy, run.deduplicated, run.capacity_tokens, run.k, run.sessions


def _run_name(run: RunResult) -> str:
    cache = "unlimited" if run.capacity_tokens is None else f"{run.capacity_tokens:,} tokens"
    sessions = "" if run.sessions is None else f", {run.sessions} at a time"
    shown = ", de-duplicated" if run.deduplicated else ""
    return f"{run.part}: {run.policy}{shown} (k={run.k}{sessions}, {cache})"
