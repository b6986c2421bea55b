"""Hit ratios on public retrieval traces, next to what the published peer reaches on them.

Block level: prompt tokens of blocks already in the prefix cache / all block tokens. Reads the
folder named by CTXREUSE_DATA: for each data set `corpus.jsonl` and `trace_kN.jsonl`, and
`peer.json` with the peer's figures, if it is there.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from ctxreuse import ReusePlanner
from ctxreuse.cache import BlockLevelCache, CacheUsage
from ctxreuse.measure.replay.plan_file import plan_under
from ctxreuse.measure.replay.policies import MeasuredPolicy, TraceMode
from ctxreuse.measure.replay.simulate import simulate_blocks
from ctxreuse.measure.traces.trace_files import Corpus, TraceRequest
from ctxreuse.planner import Strategy
from public_data.peers.cacheweaver import CACHEWEAVER, CacheWeaverPlanner
from shared import data_folder, new_table, read_named_trace

TRACES = ("xquad_k5", "xquad_k15", "mtrag_k5", "mtrag_k10", "locomo_k20", "locomo_k100")
SMALL_CACHE_TOKENS = 20_000


@dataclass(frozen=True, slots=True)
class Measured:
    """One policy on one trace."""

    unlimited: CacheUsage
    small: CacheUsage
    planning_ms: float


def main() -> None:
    """Print the tables."""
    data = data_folder("xquad", "mtrag", "locomo")
    figures = data / "peer.json"
    peer = json.loads(figures.read_text()) if figures.exists() else {}
    console = Console(width=130)
    for mode in ("offline", "online"):
        _compare(console, data, peer, mode)
    _compare_with_cacheweaver(console, data)


def _compare(
    console: Console, data: Path, peer: dict[str, dict[str, float]], mode: TraceMode
) -> None:
    title = f"{mode}, unlimited cache and one of {SMALL_CACHE_TOKENS:,} tokens"
    columns = (
        "trace",
        "as retrieved",
        "peer",
        "papers' order",
        "ctxreuse",
        "to peer",
        "peer, small",
        "ctxreuse, small",
        "peer ms",
        "ctxreuse ms",
    )
    table = new_table(title, (), columns)
    ratios = []
    for name in TRACES:
        trace, corpus = read_named_trace(data, name)
        none, paper, reuse = (
            _measure(trace, corpus, mode, strategy) for strategy in ("none", "paper", "reuse")
        )
        figures = peer.get(name, {})
        theirs, theirs_small, theirs_ms = (
            figures.get(f"contextpilot_{mode}{what}") for what in ("", "_small", "_ms_per_request")
        )
        if theirs is not None:
            ratios.append(reuse.unlimited.hit_ratio / theirs)
        table.add_row(
            name,
            f"{none.unlimited.hit_ratio:.4f}",
            _shown(theirs, 4),
            f"{paper.unlimited.hit_ratio:.4f}",
            f"{reuse.unlimited.hit_ratio:.4f}",
            _shown(theirs and reuse.unlimited.hit_ratio / theirs, 3),
            _shown(theirs_small, 4),
            f"{reuse.small.hit_ratio:.4f}",
            _shown(theirs_ms, 3),
            f"{reuse.planning_ms:.3f}",
        )
    console.print(table)
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        console.print(f"geometric mean of ctxreuse / peer, {mode}: {mean:.3f}\n")


def _shown(figure: float | None, digits: int) -> str:
    """Return a figure of the peer; where there is none, a dash."""
    return "-" if figure is None else f"{figure:.{digits}f}"


def _compare_with_cacheweaver(console: Console, data: Path) -> None:
    """Print what CacheWeaver's walk reaches, and a variant of it."""
    sizes = (None, SMALL_CACHE_TOKENS)
    title = "CacheWeaver, online; where several blocks go on, the walk takes"
    choices = ("the best ranked", "the most served")
    columns = ("trace", *(name for choice in choices for name in (choice, "small cache")))
    table = new_table(title, (), columns)
    for name in TRACES:
        trace, corpus = read_named_trace(data, name)
        ratios = []
        for is_variant in (False, True):
            for size in sizes:
                planner = CacheWeaverPlanner(capacity_tokens=size, prefers_most_served=is_variant)
                planned = plan_under(CACHEWEAVER, trace, planner)
                usages = simulate_blocks(planned, corpus, BlockLevelCache(size))
                ratios.append(sum(usages, CacheUsage()).hit_ratio)
        table.add_row(name, *(f"{ratio:.4f}" for ratio in ratios))
    console.print(table)


def _measure(
    trace: list[TraceRequest], corpus: Corpus, mode: TraceMode, strategy: Strategy
) -> Measured:
    usages = []
    planning_ms = []
    for capacity in (None, SMALL_CACHE_TOKENS):
        started = time.perf_counter()
        policy = MeasuredPolicy(strategy, strategy, mode)
        planned = plan_under(policy, trace, ReusePlanner(capacity_tokens=capacity))
        planning_ms.append((time.perf_counter() - started) * 1000 / len(trace))
        usages.append(
            sum(simulate_blocks(planned, corpus, BlockLevelCache(capacity)), CacheUsage())
        )
    return Measured(*usages, planning_ms[0])


if __name__ == "__main__":
    main()
