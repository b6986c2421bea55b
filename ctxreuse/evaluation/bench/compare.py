"""Two results of the same benchmark, side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from ctxreuse.evaluation.results.results_file import Results
from ctxreuse.evaluation.results.runs import Run


def comparison(old: Results, new: Results) -> Iterator[RenderableType]:
    """Yield what has changed.

    Args:
        old: Earlier results.
        new: Those of now.
    """
    yield escape(f"compared with ctxreuse {old.version}, {old.title}")
    before_settings = dict(_settings(old))
    for name, value in _settings(new):
        was_set = before_settings.get(name, "not said")
        if was_set != value:
            yield escape(f"not the same setting: {name} was {was_set}, is {value}")
    before = {_key(run): run for run in old.runs}
    table = Table(title="Hit ratio and prefilled tokens, before and now")
    table.add_column("order of the blocks")
    for column in (
        "before",
        "now",
        "change",
        "prefilled,\ntimes before",
        "planning ms\nbefore",
        "now",
    ):
        table.add_column(column, justify="right")
    alike = 0
    new_parts, old_parts = ({run.part for run in one.runs} for one in (new, old))
    for part, number in Counter(run.part for run in new.runs).items():
        if part not in old_parts:
            yield f"not measured before: {part}, all {number:,} runs"
    for run in new.runs:
        earlier = before.pop(_key(run), None)
        if earlier is None:
            if run.part in old_parts:
                yield escape(f"not measured before: {_name(run)}")
            continue
        was, now = earlier.total, run.total
        if now == was:
            alike += 1
            continue
        change = now.hit_ratio - was.hit_ratio
        colour = "green" if change > 0 else "red"
        table.add_row(
            escape(_name(run)),
            f"{was.hit_ratio:.3f}",
            f"{now.hit_ratio:.3f}",
            f"[{colour}]{change:+.3f}[/]",
            f"{now.prefilled_tokens / max(1, was.prefilled_tokens):.3f}",
            f"{earlier.planning_ms:.3f}",
            f"{run.planning_ms:.3f}",
        )
    for run in before.values():
        if run.part in new_parts:
            yield escape(f"no longer measured: {_name(run)}")
    for part, number in Counter(run.part for run in before.values()).items():
        if part not in new_parts:
            yield escape(f"no longer measured: {part}, all {number:,} runs")
    if table.row_count:
        yield table
    yield f"{alike} of {len(new.runs)} runs are exactly as before"


def _settings(results: Results) -> tuple[tuple[str, str], ...]:
    return ("title", results.title), ("counted in", results.level), *results.settings


def _key(run: Run) -> tuple[object, ...]:
    return run.part, run.policy, run.deduplicated, run.capacity_tokens, run.k, run.sessions


def _name(run: Run) -> str:
    cache = "unlimited" if run.capacity_tokens is None else f"{run.capacity_tokens:,} tokens"
    sessions = "" if run.sessions is None else f", {run.sessions} at a time"
    shown = ", de-duplicated" if run.deduplicated else ""
    return f"{run.part}: {run.policy}{shown} (k={run.k}{sessions}, {cache})"
