"""A benchmark's results for a terminal, and as CSV."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

import numpy as np
from rich.console import RenderableType
from rich.table import Table

from ctxreuse.bench.trials import Part
from ctxreuse.errors import InputFileError
from ctxreuse.evaluation.answers import Interval, bootstrap_interval
from ctxreuse.evaluation.results import Results
from ctxreuse.evaluation.runs import Run
from ctxreuse.evaluation.tables import in_words, policy_table, times

_CSV = (
    "part",
    "policy",
    "deduplicated",
    "capacity_tokens",
    "k",
    "sessions",
    "requests",
    "prompt_tokens",
    "cached_tokens",
    "prefilled_tokens",
    "hit_ratio",
    "planning_ms",
    "first_token_p50_s",
    "first_token_p95_s",
    "scored",
    "f1",
    "exact_match",
    "failures",
)


def renderables(results: Results) -> Iterator[RenderableType]:
    """Yield what a terminal shows of a benchmark."""
    yield f"[bold]{results.title}[/]: {in_words(results.trace)}"
    yield ", ".join(f"{name}: {value}" for name, value in results.settings)
    policies = results.part()
    if policies and policies[0].first_token_s:
        yield _engine_table("What the engine reported", policies)
    elif policies:
        yield policy_table(policies)
    by_k = results.part(Part.k)
    if by_k:
        bounds = {str(k): f"{share:.3f}" for k, share in results.bounds}
        yield _grid("Hit ratio by blocks a request", by_k, lambda run: str(run.k), bounds)
    by_sessions = results.part(Part.sessions)
    if by_sessions:
        size = by_sessions[0].capacity_tokens
        cache = "an unlimited cache" if size is None else f"a cache of {size:,} tokens"
        title = f"Hit ratio by conversations at a time, with {cache}"
        yield _grid(title, by_sessions, lambda run: str(run.sessions), {})
        if by_sessions[0].first_token_s:
            yield _engine_table("What the engine reported", by_sessions)
    ablations = results.part(Part.ablations)
    if ablations and ablations[0].first_token_s:
        yield _engine_table("One idea less", ablations)
    elif ablations:
        yield _ablations(ablations, policies)
    yield from results.notes


def write_csv(results: Results, path: Path) -> None:
    """Write one line a run.

    Raises:
        InputFileError: If the file cannot be written.
    """
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(_CSV)
            for run in results.runs:
                writer.writerow(_csv_row(run))
    except OSError as error:
        raise InputFileError(f"{path}: cannot be written: {error.strerror}") from error


def _csv_row(run: Run) -> list[object]:
    total = run.total
    return [
        run.part,
        run.policy,
        run.deduplicated,
        run.capacity_tokens,
        run.k,
        run.sessions,
        len(run.prompt_tokens),
        total.prompt_tokens,
        total.cached_tokens,
        total.prefilled_tokens,
        round(total.hit_ratio, 6),
        run.planning_ms,
        *(round(percentile(run, share), 6) if run.first_token_s else None for share in (50, 95)),
        len(run.scores),
        *((round(mean, 6) for mean in means(run)) if run.scores else (None, None)),
        run.failures,
    ]


def percentile(run: Run, share: float) -> float:
    """Return a percentile of an engine run's times to the first token, in seconds."""
    return float(np.percentile(run.first_token_s, share))


def means(run: Run) -> tuple[float, float]:
    """Return the mean F1 and the share of exact matches of an engine run with scored answers."""
    return fmean(f1 for _, f1, _ in run.scores), fmean(exact for *_, exact in run.scores)


def _grid(
    title: str, runs: Sequence[Run], column: Callable[[Run], str], bounds: Mapping[str, str]
) -> Table:
    """Return a table with a row a policy and a column for each value that was tried."""
    columns = list(dict.fromkeys(map(column, runs)))
    table = Table(title=title)
    table.add_column("order of the blocks", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right")
    for policy in dict.fromkeys(run.policy for run in runs):
        ratios = {column(run): run.total.hit_ratio for run in runs if run.policy == policy}
        table.add_row(
            policy, *(f"{ratios[name]:.3f}" if name in ratios else "" for name in columns)
        )
    if bounds:
        table.add_section()
        table.add_row("reuse bound", *(bounds[name] for name in columns))
    return table


def _ablations(runs: Sequence[Run], base: Sequence[Run]) -> Table:
    """Return a table of what each idea is worth.

    Args:
        runs: The policies, whole and with one idea less.
        base: As retrieved, nothing left out, with each cache.
    """
    before = {run.capacity_tokens: run for run in reversed(base)}
    capacities = list(dict.fromkeys(run.capacity_tokens for run in runs))
    table = Table(title="One idea less: hit ratio; prefilled tokens, as many times as retrieved")
    table.add_column("", no_wrap=True)
    for capacity in capacities:
        table.add_column("unlimited" if capacity is None else f"{capacity:,}", justify="right")
    for policy in dict.fromkeys(run.policy for run in runs):
        cells = {
            run.capacity_tokens: f"{run.total.hit_ratio:.3f}"
            + (f"  {times(run, before[run.capacity_tokens]):.2f}" if before else "")
            for run in runs
            if run.policy == policy
        }
        table.add_row(policy, *(cells[capacity] for capacity in capacities))
    return table


def _engine_table(title: str, runs: Sequence[Run]) -> Table:
    """Return a table of what a server reported.

    Each row but for the number of answers is about the requests that the first run answered, too.
    """
    base = runs[0]
    has_scores = any(run.scores for run in runs)
    table = Table(title=title)
    table.add_column("order of the blocks")
    for column in (
        "left out\nwhat a chat\nshows",
        "\n\nanswered",
        "\nhit\nratio",
        "\n\nprefilled",
        "to as\nretrieved",
        "first token\np50 ms",
        "\np95",
        "p50 to as\nretrieved",
        *(("F1", "F1,\nchange", "exact\nmatch") if has_scores else ()),
    ):
        table.add_column(column, justify="right")
    for run in runs:
        common = set(run.request_ids) & set(base.request_ids)
        part, plain = run.only(common), base.only(common)
        table.add_row(
            run.policy if run.sessions is None else f"{run.policy} ({run.sessions} at a time)",
            "yes" if run.deduplicated else "no",
            str(len(run.request_ids)),
            f"{part.total.hit_ratio:.3f}",
            f"{part.total.prefilled_tokens:,}",
            f"{times(part, plain):.2f}",
            *_times_to_first_token(part, plain),
            *(_scores(part, plain, is_base=run is base) if has_scores else ()),
        )
    return table


def _times_to_first_token(run: Run, base: Run) -> Iterator[str]:
    if not run.first_token_s:
        yield from ("", "", "")
        return
    half, most = (percentile(run, share) for share in (50, 95))
    yield f"{1e3 * half:,.0f}"
    yield f"{1e3 * most:,.0f}"
    yield f"{half / percentile(base, 50):.2f}"


def _scores(run: Run, base: Run, *, is_base: bool) -> Iterator[str]:
    """Yield F1, its paired change against a run of the same questions, and exact match."""
    plain = {one: f1 for one, f1, _ in base.scores}
    pairs = [(f1, plain[one]) for one, f1, _ in run.scores if one in plain]
    if not pairs:
        yield from ("", "", "")
        return
    yield _cell(bootstrap_interval([f1 for f1, _ in pairs]))
    yield "" if is_base else _cell(bootstrap_interval([f1 - before for f1, before in pairs]), "+")
    yield f"{means(run)[1]:.3f}"


def _cell(interval: Interval, sign: str = "") -> str:
    return f"{interval.mean:{sign}.3f}\n[{interval.low:{sign}.3f}, {interval.high:{sign}.3f}]"
