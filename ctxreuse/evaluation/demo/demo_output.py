"""What the demo shows: a table, one request before and after, a plot."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from ctxreuse.errors import MissingExtraError
from ctxreuse.evaluation.replay.plan_file import PlannedRequest
from ctxreuse.evaluation.traces.trace_files import Corpus, TraceRequest

if TYPE_CHECKING:
    from ctxreuse.evaluation.demo.demo_run import Compared

_COLOURS = ("#8c8c8c", "#e0a030", "#b06000", "#3f8fd2", "#1b4f8a")


def print_setting(console: Console, corpus: Corpus, trace: Sequence[TraceRequest]) -> None:
    """Say what is asked of what."""
    conversations = {request.conversation_id for request in trace} - {None}
    turns = sum(request.conversation_id is not None for request in trace)
    console.print(
        f"\n{len(trace)} questions ({turns} of them turns of {len(conversations)} conversations) "
        f"about {len(corpus)} blocks of the Python language reference, "
        f"{len(trace[0].blocks)} blocks a question.\n"
    )


def print_table(console: Console, outcomes: Sequence[Compared], small_cache_tokens: int) -> None:
    """Print hit ratios, prefilled tokens and planning time of all policies."""
    table = Table(title="What the engine's prefix cache serves")
    table.add_column("order of the blocks")
    for cache in ("unlimited", f"{small_cache_tokens:,}"):
        table.add_column(f"hit ratio\n{cache}", justify="right")
        table.add_column(f"prefilled\n{cache}", justify="right")
        table.add_column("to as\nretrieved", justify="right")
    table.add_column("planning\nms", justify="right")
    baselines = [
        outcome.total.prefilled_tokens for outcome in (outcomes[0].unlimited, outcomes[0].small)
    ]
    deduplicated: bool | None = None
    for compared in outcomes:
        if compared.unlimited.deduplicated != deduplicated:
            deduplicated = compared.unlimited.deduplicated
            table.add_section()
            words = "with" if deduplicated else "without"
            table.add_row(f"[italic]{words} de-duplication[/]")
        figures = []
        both = (compared.unlimited, compared.small)
        for outcome, baseline in zip(both, baselines, strict=True):
            total = outcome.total
            figures += [
                f"{total.hit_ratio:.3f}",
                f"{total.prefilled_tokens:,}",
                f"{total.prefilled_tokens / baseline:.2f}",
            ]
        figures.append(f"{compared.unlimited.planning_ms:.3f}")
        table.add_row(compared.unlimited.policy.name, *figures)
    console.print(table)
    console.print(
        "hit ratio: prompt tokens served from the cache / prompt tokens\n"
        "prefilled: tokens that the engine has to compute, so lower is better\n"
        f"unlimited, {small_cache_tokens:,}: tokens that the cache holds\n"
        "de-duplication: blocks that a conversation shows already are left out"
    )


def print_example(console: Console, corpus: Corpus, outcomes: Sequence[Compared]) -> None:
    """Show one request as retrieved and as planned online: the one that gains most."""
    retrieved, planned = (
        next(
            compared.unlimited
            for compared in outcomes
            if compared.unlimited.policy.strategy == strategy
            and compared.unlimited.policy.mode == "online"
            and not compared.unlimited.deduplicated
        )
        for strategy in ("none", "reuse")
    )
    gains = [
        after.cached_tokens - before.cached_tokens if plan.order_annotation else -1
        for before, after, plan in zip(
            retrieved.usages, planned.usages, planned.planned, strict=True
        )
    ]
    position = gains.index(max(gains))
    before, after = retrieved.planned[position], planned.planned[position]
    console.print(f"\n[bold]One request before and after[/]: “{after.query}”\n")
    table = Table(box=None)
    for outcome in (retrieved, planned):
        usage = outcome.usages[position]
        table.add_column(
            f"{outcome.policy.name}\n"
            f"{usage.cached_tokens:,} of {usage.prompt_tokens:,} tokens cached"
        )
    cached_before, cached_after = (_cached_blocks(plan, corpus) for plan in (before, after))
    for rank, (old, new) in enumerate(zip(before.blocks, after.blocks, strict=True)):
        table.add_row(
            _marked(f"{old}", rank < cached_before),
            _marked(f"{new}  (was {before.blocks.index(new) + 1})", rank < cached_after),
        )
    console.print(table)
    console.print("[green]●[/] served from the prefix cache")
    console.print(f"annotation: {after.order_annotation}", markup=False)


def plot_hit_ratio(path: Path, outcomes: Sequence[Compared], small_cache_tokens: int) -> None:
    """Plot the hit ratio over the run, for both caches, with repeated blocks left out.

    Args:
        path: The PNG file to write.
        outcomes: The policies' usages.
        small_cache_tokens: Size of the small cache.

    Raises:
        MissingExtraError: If matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("the demo's plot", "demo") from error

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    shown = [compared for compared in outcomes if compared.unlimited.deduplicated]
    titles = ("unlimited cache", f"cache of {small_cache_tokens:,} tokens")
    sides = ([one.unlimited for one in shown], [one.small for one in shown])
    for panel, title, side in zip(panels, titles, sides, strict=True):
        for outcome, colour in zip(side, _COLOURS, strict=True):
            ratios = [usage.hit_ratio for usage in accumulate(outcome.usages)]
            panel.plot(
                range(1, len(ratios) + 1),
                ratios,
                label=outcome.policy.name,
                color=colour,
                linestyle="--" if outcome.policy.mode == "offline" else "-",
            )
        panel.set_title(title)
        panel.set_xlabel("requests, in the order in which they ran")
        panel.set_ylim(0, 1)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("hit ratio so far")
    panels[0].legend(loc="upper left", fontsize="small")
    figure.suptitle("Prompt tokens served from the prefix cache")
    figure.savefig(path, dpi=110)


def _cached_blocks(plan: PlannedRequest, corpus: Corpus) -> int:
    """Return how many of the first blocks an earlier prompt had in front in the same order."""
    tokens = accumulate(corpus[block_id].tokens or 0 for block_id in plan.blocks)
    return sum(total <= (plan.expected_cached_tokens or 0) for total in tokens)


def _marked(text: str, cached: bool) -> str:
    return f"[green]● {text}[/]" if cached else f"○ {text}"
