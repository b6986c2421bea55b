"""Estimates in words, as tables, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from ctxreuse.evaluation.estimate import TraceSummary
from ctxreuse.evaluation.policies import POLICIES
from ctxreuse.evaluation.runs import Run
from ctxreuse.serving.rates import COMMON_RATES

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
        policy_table(runs),
        *(missing if too_large else []),
        *_advice([run for run in runs if run.capacity_tokens == runs[0].capacity_tokens]),
    ]


def policy_table(runs: Sequence[Run]) -> Table:
    """Return a table of policies by cache size.

    Args:
        runs: Policies with and without de-duplication, each with the same cache sizes; as retrieved
            first.
    """
    capacities = list(dict.fromkeys(run.capacity_tokens for run in runs))
    rows: dict[tuple[bool, str], dict[int | None, Run]] = {}
    for run in runs:
        rows.setdefault((run.deduplicated, run.policy), {})[run.capacity_tokens] = run
    base = next(iter(rows.values()))  # as retrieved, nothing left out
    table = Table(title="Hit ratio; prefilled tokens, as many times as retrieved; by cache size")
    table.add_column("order of the blocks", no_wrap=True)
    for capacity in capacities:
        table.add_column("unlimited" if capacity is None else f"{capacity:,}", justify="right")
    table.add_column("planning\nms", justify="right")
    for deduplicated in (False, True):
        of_kind = [(name, row) for (kind, name), row in rows.items() if kind == deduplicated]
        if deduplicated and of_kind:
            table.add_section()
            table.add_row("[italic]without what a chat shows[/]")
        for name, row in of_kind:
            cells = [
                f"{row[size].total.hit_ratio:.3f}  {times(row[size], base[size]):.2f}"
                for size in capacities
            ]
            table.add_row(name, *cells, f"{row[capacities[0]].planning_ms:.3f}")
    return table


def times(run: Run, base: Run) -> float:
    """Return how many times the tokens of another run had to be computed."""
    before = base.total.prefilled_tokens
    return run.total.prefilled_tokens / before if before else 1.0


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
