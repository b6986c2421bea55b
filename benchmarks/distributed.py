"""Batches in partitions on Ray Data: hits next to planning all at once, memory, cost.

Requests are drawn from public retrieval traces, with replacement: a question, and of its retrieved
blocks the best ones, each of which is missing with a chance of one in five, as if retrieved from
another index; neighbours in the ranking are swapped with three chances in ten. Printed are

- the share of block tokens that prefix caches serve: one without a limit, one of 200,000 tokens,
  and those of 100 engines, as large, that get batches of 64 in turn; as drawn, planned all at once
  by `ReusePlanner.plan_batch`, and by `plan_dataset`;
- processor time and peak memory of the workers, and how often a prefix group stands in two batches.

Reads the folder that CTXREUSE_DATA names. Run with `make bench-distributed`.
"""

from __future__ import annotations

import os
import random
import resource
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np
import ray
from rich.console import Console

from ctxreuse import ContextBlock, ContextRequest, ReusePlanner
from ctxreuse.cache import BlockLevelCache
from ctxreuse.cache.simulator import CacheUsage
from ctxreuse.distributed import plan_dataset
from shared import data_folder, new_parser, new_table, read_named_trace

TRACES = (("xquad_k15", 5), ("mtrag_k10", 5), ("locomo_k100", 20))
"""Retrieval traces, and how many blocks a request has."""

MISSING, SWAPPED = 0.2, 0.3
SMALL_CACHE_TOKENS = 200_000
BATCH_SIZE = 64
ENGINES = 100


class Question(NamedTuple):
    """A question, and what is retrieved for it."""

    text: str
    ranked: Sequence[ContextBlock]  # more blocks than a request has, best first
    number: int  # how many blocks a request has


class Sent(NamedTuple):
    """A planned request."""

    keys: list[bytes]  # its blocks, in the order in which they are sent
    tokens: list[int]  # their lengths


def questions() -> list[Question]:
    """Return the questions of the traces."""
    data = data_folder(*{name.split("_")[0] for name, _ in TRACES})
    found = []
    for name, number in TRACES:
        trace, _ = read_named_trace(data, name)
        found += [Question(one.query, one.blocks, number) for one in trace]
    return found


def drawn(asked: Sequence[Question], row: int) -> ContextRequest:
    """Return the request of a row; the same whenever it is drawn."""
    chance = random.Random(row)
    question = asked[chance.randrange(len(asked))]
    found = [one for one in question.ranked if chance.random() >= MISSING][: question.number]
    for rank in range(len(found) - 1):
        if chance.random() < SWAPPED:
            found[rank], found[rank + 1] = found[rank + 1], found[rank]
    return ContextRequest(found, question.text)


def row_of(row: int, request: ContextRequest) -> dict[str, Any]:
    """Return a request as a row, texts included."""
    blocks = [{"id": str(one.id), "text": one.text, "tokens": one.tokens} for one in request.blocks]
    return {"row": row, "query": request.query, "blocks": blocks}


def with_usage(batch: dict[str, Any]) -> dict[str, Any]:
    """Return what is measured of a batch, with what its worker has used so far."""
    used = {
        "pid": os.getpid(),
        "cpu_s": time.process_time(),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    kept = ("row", "plan_order", "plan_group", "plan_partition", "plan_position", "plan_strategy")
    length = len(batch["row"])
    return {name: batch[name] for name in kept} | {
        name: np.full(length, value) for name, value in used.items()
    }


def usage_of(
    batches: Iterable[Sequence[Sent]], capacity: int | None, engines: int = 1
) -> CacheUsage:
    """Return what the caches of engines serve, which get batches of requests in turn."""
    caches, usage = [BlockLevelCache(capacity) for _ in range(engines)], CacheUsage()
    for cache, batch in zip(cycle(caches), batches, strict=False):
        for one in batch:
            usage += cache.serve(one.keys, one.tokens)
    return usage


def cut(ordered: Sequence[Sent]) -> list[Sequence[Sent]]:
    """Cut requests into batches."""
    return [ordered[at : at + BATCH_SIZE] for at in range(0, len(ordered), BATCH_SIZE)]


def sent(blocks: Iterable[ContextBlock]) -> Sent:
    """Return blocks as they are sent."""
    kept = list(blocks)
    return Sent([bytes(one.key) for one in kept], [one.tokens or 0 for one in kept])


def main() -> None:
    """Print the tables."""
    parser = new_parser(__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--partition-size", type=int, default=4_096)
    parser.add_argument("--cpus", type=int, default=2, help="Ray's workers")
    parser.add_argument("--alone", action="store_true", help="do not plan all at once")
    options = parser.parse_args()
    console = Console(width=110)
    asked = questions()
    hits = new_table(
        f"{options.requests:,} requests, hit ratio",
        ["order"],
        ["unlimited", f"{SMALL_CACHE_TOKENS:,} tokens", f"{ENGINES} engines", "cpu ms / 1,000"],
    )

    def add(name: str, batches: Sequence[Sequence[Sent]], cpu_s: float | None) -> None:
        caches = ((None, 1), (SMALL_CACHE_TOKENS, 1), (SMALL_CACHE_TOKENS, ENGINES))
        ratios = [usage_of(batches, *one).hit_ratio for one in caches]
        cost = "" if cpu_s is None else f"{cpu_s * 1e6 / options.requests:,.0f}"
        hits.add_row(name, *(f"{one:.4f}" for one in ratios), cost)

    requests = [drawn(asked, row) for row in range(options.requests)]
    retrieved = [sent(one.unique_blocks.values()) for one in requests]
    tokens = sum(sum(one.tokens) for one in retrieved)
    add("as retrieved", cut(retrieved), None)
    if not options.alone:
        began = time.process_time()
        plans = ReusePlanner().plan_batch(requests).plans
        took = time.process_time() - began
        add("planned all at once", cut([sent(plan.blocks) for plan in plans]), took)
        del plans
    blocks_of = [list(one.blocks) for one in requests]
    del requests, retrieved

    ray.init(num_cpus=options.cpus, include_dashboard=False, log_to_driver=False)
    pool = ray.put(asked)

    def made(batch: dict[str, Any]) -> dict[str, Any]:
        questions = ray.get(pool)
        rows = [row_of(int(row), drawn(questions, int(row))) for row in batch["id"]]
        return {name: [row[name] for row in rows] for name in rows[0]}

    ds = ray.data.range(options.requests, override_num_blocks=max(8, options.requests // 4_096))
    began, before = time.perf_counter(), time.process_time()
    planned = plan_dataset(
        ds.map_batches(made, batch_size=1_024),
        partition_size=options.partition_size,
        batch_size=BATCH_SIZE,
    )
    rows = list(planned.map_batches(with_usage, batch_size=BATCH_SIZE).iter_rows())
    driver_s, took = time.process_time() - before, time.perf_counter() - began
    assert sorted(row["row"] for row in rows) == list(range(options.requests))
    assert {row["plan_strategy"] for row in rows} == {"reuse"}
    workers: dict[int, float] = {}
    for row in rows:
        workers[row["pid"]] = max(workers.get(row["pid"], 0.0), row["cpu_s"])
    name = f"in {len({row['plan_partition'] for row in rows})} partitions"
    batches: dict[tuple[int, int], list[Sent]] = {}
    groups: dict[str, set[tuple[int, int]]] = {}
    for row in rows:
        batch = (row["plan_partition"], row["plan_position"] // BATCH_SIZE)
        planned_blocks = [blocks_of[row["row"]][place] for place in row["plan_order"]]
        batches.setdefault(batch, []).append(sent(planned_blocks))
        groups.setdefault(row["plan_group"], set()).add(batch)
    add(name, list(batches.values()), driver_s + sum(workers.values()))
    console.print(hits)

    in_two = sum(len(one) > 1 for one in groups.values())
    sizes = Counter(row["plan_partition"] for row in rows)
    console.print(
        f"largest partition {max(sizes.values()):,}, smallest {min(sizes.values()):,} requests; "
        f"{in_two:,} of {len(groups):,} prefix groups stand in two batches of {BATCH_SIZE}; "
        f"{tokens / options.requests:,.0f} block tokens a request"
    )
    console.print(
        f"{took:.0f} s with {len(workers)} workers; processor time: driver {driver_s:.0f} s, "
        f"workers {sum(workers.values()):.0f} s; peak memory of a worker "
        f"{max(row['peak_mib'] for row in rows):,.0f} MiB, of the driver "
        f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:,.0f} MiB with its lists"
    )


if __name__ == "__main__":
    main()
