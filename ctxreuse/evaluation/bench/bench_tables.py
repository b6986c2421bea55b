"""A benchmark's results for a terminal, and as CSV."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from rich.console import RenderableType
from rich.markup import escape

from ctxreuse.errors import InputFileError
from ctxreuse.evaluation.results.results_file import Results
from ctxreuse.evaluation.results.runs import Run
from ctxreuse.evaluation.results.sheets import means, percentile, sheets
from ctxreuse.evaluation.results.tables import in_words, rich_table

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
    yield f"[bold]{escape(results.title)}[/]: {in_words(results.trace)}"
    yield escape(", ".join(f"{name}: {value}" for name, value in results.settings))
    yield from map(rich_table, sheets(results))
    yield from map(escape, results.notes)


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
