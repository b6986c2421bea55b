"""How long planning takes: online, as a batch, and where nothing can be gained; and its memory.

Run with `make bench`; `python benchmarks/speed.py --small` leaves out the rows that take minutes,
and `--only memory` all tables but one.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import random
import resource
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import numpy as np
from rich.console import Console

from ctxreuse import ContextBlock, ContextRequest, ReusePlanner
from ctxreuse.cache import BlockLevelCache, CacheUsage
from ctxreuse.context.blocks import BlockKey
from ctxreuse.memory.prefix_index import PrefixIndex
from ctxreuse.memory.tenants import Bounds
from ctxreuse.planner import Strategy
from ctxreuse.planning.plan import Plan
from generate import requests_of, topic_contexts
from shared import new_table
from soak import resident_bytes

MEASURED = 2_000
K = 15
TENANTS = 10
TURN_BLOCKS = 10
MB = 1e6


def main() -> None:
    """Print all tables."""
    console = Console(width=130)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="leave out the 100,000-context rows")
    tables: dict[str, Callable[[bool], None]] = {
        "online": lambda small: online(console, [2_000] if small else [2_000, 100_000]),
        "batches": lambda small: batches(console, [12_000] if small else [12_000, 100_000]),
        "special": lambda small: special_batches(console),
        "no-overlap": lambda small: no_overlap(console),
        "index": lambda small: large_index(console, Bounds().index_nodes),
        "memory": lambda small: memory(console, 50_000 if small else 500_000),
    }
    parser.add_argument("--only", choices=tables, help="print one table")
    arguments = parser.parse_args()
    for name in [arguments.only] if arguments.only else tables:
        tables[name](arguments.small)


def online(console: Console, sizes: list[int]) -> None:
    """Print how long one arriving request takes with a number of contexts in the index."""
    columns = ("contexts", "strategy", "median ms", "99th percentile ms", "hit ratio")
    table = new_table(
        f"online, k={K}: one plan() with a number of contexts in the index", (), columns
    )
    strategies: list[Strategy] = ["reuse", "paper", "none"]
    for size in sizes:
        requests = requests_of(*topic_contexts(size + MEASURED, K))
        for strategy in strategies if size <= 10_000 else strategies[::2]:
            planner = ReusePlanner()
            for request in requests[:size]:
                planner.plan(request, strategy)
            plans, times = [], []
            gc.collect()
            gc.freeze()  # what the set-up left alive is not collected again and again
            for request in requests[size:]:
                started = time.perf_counter()
                plans.append(planner.plan(request, strategy))
                times.append((time.perf_counter() - started) * 1000)
            gc.unfreeze()
            ratio = sum(plan.expected_cached_tokens for plan in plans) / sum(
                block.tokens or 0 for plan in plans for block in plan.blocks
            )
            table.add_row(
                f"{size:,}",
                strategy,
                f"{np.median(times):.3f}",
                f"{np.percentile(times, 99):.3f}",
                f"{ratio:.3f}",
            )
    console.print(table)


def batches(console: Console, sizes: list[int]) -> None:
    """Print how long a batch takes, and what it saves."""
    columns = ("contexts", "seconds", "hit ratio", "as retrieved", "peak memory MB")
    table = new_table(f"batch, k={K}: one plan_batch()", (), columns)
    for size in sizes:
        requests = requests_of(*topic_contexts(size, K))
        seconds, plans = _timed_batch(requests)
        table.add_row(
            f"{size:,}",
            f"{seconds:.2f}",
            f"{_hit_ratio(plans):.3f}",
            f"{_hit_ratio(ReusePlanner().plan_batch(requests, 'none').plans):.3f}",
            f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024:,}",
        )
    console.print(table)


def special_batches(console: Console, size: int = 5_000) -> None:
    """Print how long batches take that have no structure, or nothing else."""
    shapes = {
        "all disjoint": [list(range(i * K, (i + 1) * K)) for i in range(size)],
        "all identical": [list(range(K)) for _ in range(size)],
        "all share one block": [[0, *range(1 + i * K, i * K + K)] for i in range(size)],
    }
    columns = ("contexts", "batch seconds", "online seconds", "hit ratio")
    table = new_table(f"special batches of {size:,}, k={K}", (), columns)
    for name, contexts in shapes.items():
        requests = requests_of(contexts)
        seconds, plans = _timed_batch(requests)
        planner = ReusePlanner()
        started = time.perf_counter()
        for request in requests:
            planner.plan(request)
        online_seconds = time.perf_counter() - started
        table.add_row(name, f"{seconds:.2f}", f"{online_seconds:.2f}", f"{_hit_ratio(plans):.3f}")
    console.print(table)


def no_overlap(console: Console, size: int = 5_000) -> None:
    """Print what planning costs a request when there is nothing to reuse."""
    requests = requests_of([list(range(i * K, (i + 1) * K)) for i in range(size)])
    columns = ("planned as", "ms a request")
    table = new_table(
        f"no overlap at all, {size:,} requests, k={K}: what planning adds", (), columns
    )
    strategies: list[Strategy] = ["reuse", "none"]
    for strategy in strategies:
        planner = ReusePlanner()
        started = time.perf_counter()
        for request in requests:
            planner.plan(request, strategy)
        seconds = time.perf_counter() - started
        table.add_row(f"online, {strategy}", f"{seconds / size * 1000:.4f}")
    seconds, _ = _timed_batch(requests)
    table.add_row("batch, reuse", f"{seconds / size * 1000:.4f}")
    console.print(table)


def large_index(console: Console, nodes: int) -> None:
    """Print what a large index holds, and how long the process pauses because of it."""
    source, index, number = random.Random(1), PrefixIndex(max_nodes=10 * nodes), 0
    inserting = 0.0
    collecting = _shortest_ms(gc.collect)
    before = resident_bytes()
    while index.node_count < nodes:
        batch = [_drawn_weights(source) for _ in range(1_000)]
        inserting += _ms(partial(_insert_all, index, batch, number))
        number += len(batch)
    held = resident_bytes() - before
    looked_for = [_drawn_weights(source) for _ in range(1_000)]
    searching = _ms(lambda: [index.search(None, one) for one in looked_for])
    table = new_table(f"an index of {nodes:,} nodes and {number:,} request ids", ("what",), ("is",))
    table.add_row("an insert, collections among them, µs", f"{inserting / number * 1e3:.1f}")
    table.add_row("a search, µs", f"{searching:.1f}")
    table.add_row("bytes a node, request ids among them", f"{held / nodes:,.0f}")
    table.add_row("a full collection of garbage, ms", f"{_shortest_ms(gc.collect):.1f}")
    table.add_row("of these before there was an index, ms", f"{collecting:.1f}")
    table.add_row("evicting one request, ms", f"{_ms(lambda: index.evict('request-0')):.2f}")
    console.print(table)


def _drawn_weights(source: random.Random) -> dict[BlockKey, int]:
    drawn = sorted({min(int(source.paretovariate(0.5)), 200_000) for _ in range(8)})
    return {BlockKey(f"{one:016}".encode()): 100 + one % 200 for one in drawn}


def _insert_all(index: PrefixIndex, contexts: list[dict[BlockKey, int]], number: int) -> None:
    for now, context in enumerate(contexts, number):
        index.insert(None, [*context], [*context.values()], f"request-{now}", now)


def _ms(call: Callable[[], object]) -> float:
    started = time.process_time()
    call()
    return (time.process_time() - started) * 1000


def _shortest_ms(call: Callable[[], object]) -> float:
    return min(_ms(call) for _ in range(3))


def memory(console: Console, blocks: int) -> None:
    """Print what a planner holds of blocks in conversations, and what stays of it.

    What objects take is measured in one process, and what the process takes in another one: Python
    keeps most of what it frees, and uses it again.
    """
    columns = ("MB of objects", "MB of the process", "in conversations", "in the index")
    title = f"memory: {blocks:,} blocks in conversations of {TENANTS} tenants"
    table = new_table(title, ("then",), columns)
    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(mp_context=spawning, max_tasks_per_child=1) as processes:
        of_process = processes.submit(_held, blocks, is_traced=False).result()
        of_objects = processes.submit(_held, blocks, is_traced=True).result()
    for number, (state, process, shown, indexed) in enumerate(of_process):
        objects = f"{of_objects[number][1]:.0f}" if number < len(of_objects) else ""
        sizes = f"{process:.0f}", f"{shown:,} blocks", f"{indexed:,} blocks"
        table.add_row(state, objects, *sizes)
    console.print(table)


def _held(blocks: int, *, is_traced: bool) -> list[tuple[str, float, int, int]]:
    """Return the MB held in each state, and how many blocks are in conversations and the index.

    Traced, which takes four times as long, nothing is sent a second time.
    """
    planner, rows = ReusePlanner(), []
    if is_traced:
        tracemalloc.start()
    before = resident_bytes()

    def note(state: str) -> None:
        gc.collect()
        held = tracemalloc.get_traced_memory()[0] if is_traced else resident_bytes() - before
        parts = planner.statistics().parts
        sizes = parts["shown_blocks"].entries, parts["index_blocks"].entries
        rows.append((state, held / MB, *sizes))

    conversations = range(blocks // TURN_BLOCKS)
    _fill(planner, conversations)
    note("all were sent")
    planner.evict_tokens(planner.statistics().tokens)
    note("all are evicted")
    for number in conversations:
        planner.end_conversation(number, f"tenant {number % TENANTS}")
    note("and their conversations ended")
    if not is_traced:
        _fill(planner, conversations)
        note("all were sent again")
    return rows


def _fill(planner: ReusePlanner, conversations: range) -> None:
    for number in conversations:
        blocks = [
            ContextBlock(id=f"{number} {turn}", text=f"text {number} {turn}", tokens=100)
            for turn in range(TURN_BLOCKS)
        ]
        tenant = f"tenant {number % TENANTS}"
        planner.plan(ContextRequest(blocks, tenant=tenant, conversation_id=number, history=[]))


def _timed_batch(requests: list[ContextRequest]) -> tuple[float, tuple[Plan, ...]]:
    planner = ReusePlanner()
    started = time.perf_counter()
    plans = planner.plan_batch(requests).plans
    return time.perf_counter() - started, plans


def _hit_ratio(plans: tuple[Plan, ...]) -> float:
    cache, total = BlockLevelCache(), CacheUsage()
    for plan in plans:
        total += cache.serve(
            [block.key for block in plan.blocks], [block.tokens or 0 for block in plan.blocks]
        )
    return total.hit_ratio


if __name__ == "__main__":
    main()
