"""What it costs that a planner believes sent what was not: calls fail, and nobody takes them back.

Requests of public traces are planned one after the other; a share of the calls fails, and half of
the rows sends those again ten requests later. Printed are, over some seeds, the hits with failed
calls left in the index as a share of the hits with failed calls taken back, and how many tokens the
planner expects in the cache for each that is there. Reads the folder that CTXREUSE_DATA names. Run
with `python benchmarks/failed_calls.py`.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console
from rich.progress import track

from ctxreuse import ContextRequest, ReusePlanner
from ctxreuse.cache import BlockLevelCache
from ctxreuse.cache.simulator import CacheUsage
from shared import data_folder, new_table, read_requests

TRACES = ("xquad_k5", "mtrag_k5", "locomo_k20")
CAPACITIES = (None, 200_000, 50_000)
RATES = (0.01, 0.05, 0.20)
COMES_AGAIN_AFTER = 10
SEEDS = range(4)


class Faults(NamedTuple):
    """How calls fail."""

    rate: float  # the share of calls that fail
    come_again: bool  # whether those come again
    seed: int  # which ones fail


class Outcome(NamedTuple):
    """What came out."""

    hits: float  # the share of block tokens that were cached
    expected: float  # tokens that the planner expected in the cache for each that was


def replay(
    requests: Sequence[ContextRequest], faults: Faults, capacity: int | None, *, takes_back: bool
) -> Outcome:
    """Send requests, some of which fail before the engine reads them."""
    chance, planner = random.Random(faults.seed), ReusePlanner(capacity_tokens=capacity)
    cache, usage, expected = BlockLevelCache(capacity), CacheUsage(), 0
    to_come: deque[tuple[int, ContextRequest]] = deque()
    for number, request in enumerate(requests):
        again = []
        while to_come and to_come[0][0] <= number:
            again.append(to_come.popleft()[1])
        for one in (request, *again):
            plan = planner.plan(one)
            if one is request and chance.random() < faults.rate:
                if takes_back:
                    planner.evict([plan.request_id], one.tenant)
                if faults.come_again:
                    to_come.append((number + COMES_AGAIN_AFTER, one))
                continue
            expected += plan.expected_cached_tokens
            keys = [bytes(block.key) for block in plan.blocks]
            usage += cache.serve(keys, [block.tokens or 0 for block in plan.blocks])
    return Outcome(usage.hit_ratio, expected / usage.cached_tokens)


def main() -> None:
    """Print the table."""
    data = data_folder(*{name.split("_")[0] for name in TRACES})
    columns = ["cache", "fail", "come again", "hits, left to taken back", "expected, taken back"]
    table = new_table("calls that fail behind a plan", ["trace"], [*columns, "expected, left"])
    rows = [
        (name, capacity, rate, come_again)
        for name in TRACES
        for capacity in CAPACITIES
        for rate in RATES
        for come_again in (False, True)
    ]
    requests = {name: read_requests(data, name) for name in TRACES}
    for name, capacity, rate, come_again in track(rows, transient=True):
        pairs = [
            [
                replay(requests[name], Faults(rate, come_again, seed), capacity, takes_back=back)
                for back in (True, False)
            ]
            for seed in SEEDS
        ]
        means = [
            sum(of_pair) / len(pairs)
            for of_pair in zip(
                *((left.hits / back.hits, back.expected, left.expected) for back, left in pairs),
                strict=True,
            )
        ]
        size = "unlimited" if capacity is None else f"{capacity:,}"
        figures = [f"{means[0]:.4f}", *(f"{one:.3f}" for one in means[1:])]
        table.add_row(name, size, f"{rate:.0%}", "yes" if come_again else "no", *figures)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
