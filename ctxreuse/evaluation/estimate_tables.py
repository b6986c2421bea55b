"""An estimate in words, as a table, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from ctxreuse.evaluation.estimate import TraceSummary
from ctxreuse.evaluation.outcomes import Outcome
from ctxreuse.evaluation.policies import POLICIES
from ctxreuse.serving.rates import COMMON_RATES

_HISTORIES = "; the histories of conversations come on top"


def as_json(summary: TraceSummary, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return an estimate as a JSON object."""
    return {
        "trace": {**asdict(summary), "reuse_bound": round(summary.reuse_bound, 6)},
        "runs": [
            {
                "policy": outcome.policy.name,
                "deduplicated": outcome.deduplicated,
                "capacity_tokens": outcome.capacity_tokens,
                "prompt_tokens": outcome.total.prompt_tokens,
                "cached_tokens": outcome.total.cached_tokens,
                "hit_ratio": round(outcome.total.hit_ratio, 6),
                "planning_ms": round(outcome.planning_ms, 4),
            }
            for outcome in outcomes
        ],
    }


def renderables(
    summary: TraceSummary, outcomes: Sequence[Outcome], capacities: Sequence[int | None]
) -> list[RenderableType]:
    """Return an estimate for a terminal.

    Args:
        summary: What was replayed.
        outcomes: What came of it, as `estimate` yields it.
        capacities: Tokens that the caches hold.
    """
    rows: dict[tuple[bool, str], dict[int | None, Outcome]] = {}
    for outcome in outcomes:
        row = rows.setdefault((outcome.deduplicated, outcome.policy.name), {})
        row[outcome.capacity_tokens] = outcome
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
                f"{row[size].total.hit_ratio:.3f}  {_times(row[size], base[size]):.2f}"
                for size in capacities
            ]
            table.add_row(name, *cells, f"{row[capacities[0]].planning_ms:.3f}")
    names = {name for _, name in rows}
    too_large = [policy.name for policy in POLICIES if policy.name not in names]
    missing = [f"Left out, for the trace is too large for it: {'; '.join(too_large)}."]
    advice = _advice(list(rows.values()), base, capacities[0])
    return [_summary(summary), table, *(missing if too_large else []), *advice]


def _summary(summary: TraceSummary) -> str:
    turns = ""
    if summary.conversations:
        turns = f" ({summary.turns:,} of them turns of {summary.conversations:,} conversations)"
    return (
        f"{summary.requests:,} requests{turns} with {summary.blocks:,} different blocks and "
        f"{summary.block_tokens:,} block tokens in all. {summary.reuse_bound:.0%} of them had been "
        f"sent before: no order can have more of them served{_HISTORIES if turns else ''}."
    )


def _advice(
    rows: Sequence[dict[int | None, Outcome]], base: dict[int | None, Outcome], size: int | None
) -> list[str]:
    """Say what the best of this package's ways saves, one by one and as a batch."""
    advice = []
    before = base[size].total.prefilled_tokens
    for mode, when in (("online", "As they arrive"), ("offline", "As one batch")):
        ways = [
            row[size]
            for row in rows
            if row[size].policy.strategy == "reuse" and row[size].policy.mode == mode
        ]
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


def _times(outcome: Outcome, base: Outcome) -> float:
    before = base.total.prefilled_tokens
    return outcome.total.prefilled_tokens / before if before else 1.0
