"""Estimates in words, as tables, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from ctxreuse.evaluation.replay.estimate import TraceSummary
from ctxreuse.evaluation.replay.policies import POLICIES
from ctxreuse.evaluation.results.runs import Run
from ctxreuse.evaluation.results.sheets import Sheet, policy_sheet
from ctxreuse.serving.emulation.rates import COMMON_RATES

_HISTORIES = "; the histories of conversations come on top"


def as_json(summary: TraceSummary, runs: Sequence[Run]) -> dict[str, Any]:
    """Return an estimate as a JSON object."""
    return {
        "trace": {**asdict(summary), "reuse_bound": round(summary.reuse_bound, 6)},
        "runs": [
            {
                "policy": run.policy,
                "deduplicated": run.deduplicated,
                "capacity_tokens": run.capacity_tokens,
                "prompt_tokens": run.total.prompt_tokens,
                "cached_tokens": run.total.cached_tokens,
                "hit_ratio": round(run.total.hit_ratio, 6),
                "planning_ms": run.planning_ms,
            }
            for run in runs
        ],
    }


def estimate_renderables(summary: TraceSummary, runs: Sequence[Run]) -> list[RenderableType]:
    """Return an estimate for a terminal.

    Args:
        summary: What was replayed.
        runs: What came of it; as retrieved first.
    """
    names = {run.policy for run in runs}
    too_large = [policy.name for policy in POLICIES if policy.name not in names]
    missing = [f"Left out, for the trace is too large for it: {'; '.join(too_large)}."]
    return [
        in_words(summary),
        rich_table(policy_sheet(runs)),
        *(missing if too_large else []),
        *_advice([run for run in runs if run.capacity_tokens == runs[0].capacity_tokens]),
    ]


def rich_table(sheet: Sheet) -> Table:
    """Return a table for a terminal."""
    table = Table(title=sheet.title)
    for number, name in enumerate(sheet.head):
        table.add_column(name, justify="right" if number else "left", no_wrap=not number)
    for row in sheet.rows:
        if len(row) == 1:
            table.add_section()
            table.add_row(f"[italic]{row[0]}[/]")
        else:
            table.add_row(*row)
    return table


def in_words(summary: TraceSummary) -> str:
    """Return what was replayed, in words."""
    turns = ""
    if summary.conversations:
        turns = f" ({summary.turns:,} of them turns of {summary.conversations:,} conversations)"
    return (
        f"{summary.requests:,} requests{turns} with {summary.blocks:,} different blocks and "
        f"{summary.block_tokens:,} block tokens in all. {summary.reuse_bound:.0%} of them had been "
        f"sent before: no order can have more of them served{_HISTORIES if turns else ''}."
    )


def _advice(runs: Sequence[Run]) -> list[str]:
    """Say what the best of this package's ways saves, one by one and as a batch."""
    advice = []
    before = runs[0].total.prefilled_tokens
    for mode, when in (("online", "As they arrive"), ("offline", "As one batch")):
        ways = [run for run in runs if (run.strategy, run.mode) == ("reuse", mode)]
        if not ways or not before:
            continue
        best = min(ways, key=lambda one: one.total.prefilled_tokens)
        saved = before - best.total.prefilled_tokens
        seconds = saved / COMMON_RATES.prefill_tokens_per_s
        advice.append(
            f"{when}: {saved / before:.0%} fewer tokens to compute "
            f"({best.total.prefilled_tokens:,} instead of {before:,}); at "
            f"{COMMON_RATES.prefill_tokens_per_s:,.0f} tokens a second, {seconds:,.1f} s less."
        )
    return advice
