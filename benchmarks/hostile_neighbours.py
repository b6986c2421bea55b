"""What a process withstands from its neighbours: floods of cache events, dying engines, forks.

`python benchmarks/hostile_neighbours.py events` floods a `KVEventSync` and prints how long it takes
to stop and how much memory it took; `engines` kills and revives HTTP servers under a pool and
prints how many indexes lack what their engine has answered since; `forks` forks a process whose
threads plan and prints how many children hang. `all` prints the three.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

from rich.console import Console

from ctxreuse import ContextBlock, ContextRequest, ReusePlanner
from ctxreuse.cache import KVEventSync
from ctxreuse.errors import EngineError
from ctxreuse.serving import EmulatedEngine, EnginePool
from shared import new_parser, new_table

sys.path.append(str(Path(__file__).parent.parent / "tests" / "support"))

import forked
from http_servers import HttpServer, engine_script, listening
from kv_event_helpers import Publisher, encoded

Row = tuple[str, str]
_MB = 1024  # in the units of ru_maxrss


def peak_mb() -> float:
    """Return the most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / _MB


def flood(orders: Connection) -> None:
    """Publish as fast as the connection takes it, every hundredth message lost, until told."""
    clears = encoded([{"type": "AllBlocksCleared"}] * 50)
    with Publisher() as publisher:
        orders.send((publisher.endpoint, publisher.replay_endpoint))
        publisher.wait_for_subscriber()
        while not orders.poll():
            for number in range(1_000):
                publisher.publish(clears, lost=number % 100 == 99)
        orders.send(publisher.last + 1)


def events(arguments: argparse.Namespace) -> Iterator[Row]:
    """Yield what a flood of events of some seconds costs."""
    context = get_context("spawn")
    here, there = context.Pipe()
    flooding = context.Process(target=flood, args=(there,))
    flooding.start()
    try:
        sync = KVEventSync(ReusePlanner(), *here.recv())
        before = peak_mb()
        sync.start()
        most_queued, until = 0, time.monotonic() + arguments.seconds
        while time.monotonic() < until:
            most_queued = max(most_queued, sync.stats.queued)
            time.sleep(0.01)
        began = time.monotonic()
        sync.stop()
        took = time.monotonic() - began
        stats = sync.stats
        here.send("enough")
        yield "seconds of flood", f"{arguments.seconds:g}"
        yield "messages sent", f"{here.recv():,}"
        yield "messages applied", f"{stats.batches:,}"
        yield "gaps, replays given up", f"{stats.gaps:,}, {stats.abandoned:,}"
        yield "most messages queued", f"{most_queued:,}"
        yield "seconds to stop", f"{took:.2f}"
        yield "memory at its peak, MB", f"{peak_mb():.0f}"
        yield "memory at its peak before the flood, MB", f"{before:.0f}"
    finally:
        flooding.kill()
        flooding.join()


def engines(arguments: argparse.Namespace) -> Iterator[Row]:
    """Yield how many indexes of pools lack what was answered while servers died and came back."""
    lacking = [asyncio.run(_indexes_that_lack_answers(seed)) for seed in range(arguments.rounds)]
    yield "indexes", f"{3 * arguments.rounds}"
    yield "requests answered", f"{sum(answered for answered, _, _ in lacking):,}"
    yield "deaths", f"{sum(deaths for _, deaths, _ in lacking):,}"
    yield "indexes that lack what was answered since", f"{sum(lack for _, _, lack in lacking)}"


async def _indexes_that_lack_answers(seed: int) -> tuple[int, int, int]:
    """Return answered requests, deaths, and indexes that lack an answer; of three engines."""
    chance = random.Random(seed)
    emulated = [EmulatedEngine(answer="Yes.") for _ in range(3)]
    answered, deaths = 0, 0
    async with listening(*map(engine_script, emulated)) as servers:
        options = {"window_s": 0, "backoff_s": 0.002, "open_s": 0.02, "attempts": 20}
        async with EnginePool([one.url for one in servers], "emulated", **options) as pool:
            since: defaultdict[str, list[tuple[int, ContextRequest]]] = defaultdict(list)

            def failures() -> dict[str, int]:
                return {one.name: one.failed for one in pool.statistics()}

            async def ask() -> None:
                nonlocal answered
                while answered < 50:
                    block = ContextBlock(text=f"document {chance.random()} " * 30)
                    request = ContextRequest([block], "Why?")
                    try:
                        result = await pool.complete(request)
                    except EngineError:
                        continue
                    answered += 1
                    since[result.replica].append((failures()[result.replica], request))

            async def kill(server: HttpServer, engine: EmulatedEngine) -> None:
                nonlocal deaths
                await asyncio.sleep(chance.random() * 0.02)
                await server.die()
                engine.reset_prefix_cache()
                deaths += 1
                await asyncio.sleep(chance.random() * 0.02)
                await server.come_back()
                for name, is_ready in (await pool.check()).items():
                    if not is_ready:
                        since[name].clear()

            async def turmoil() -> None:
                while True:
                    victim = chance.randrange(3)
                    await kill(servers[victim], emulated[victim])

            killing = asyncio.create_task(turmoil())
            await asyncio.gather(*(ask() for _ in range(8)))
            killing.cancel()
            await asyncio.wait([killing])
            lack = 0
            for name, failed in failures().items():
                planner = pool._replica(name).planner
                must = [request for before, request in since[name] if before == failed]
                lack += any(not planner.cached_tokens(request) for request in must)
            return answered, deaths, lack


def forks(arguments: argparse.Namespace) -> Iterator[Row]:
    """Yield how many children hang that are forked while threads plan."""
    planner = ReusePlanner()
    blocks = [ContextBlock(id=number, text=f"Fact {number}. " * 12) for number in range(60)]
    randoms = [random.Random(number) for number in range(4)]

    def plan(random_: random.Random) -> None:
        requests = [ContextRequest(random_.sample(blocks, 8), "Which?") for _ in range(6)]
        planner.plan_batch(requests[1:])
        planner.plan(requests[0])

    def load(number: int) -> None:
        plan(randoms[number])

    def child(number: int) -> None:
        plan(random.Random(number))

    outcome = "0"
    try:
        forked.in_children(arguments.children, child, load)
    except AssertionError as error:
        outcome = str(error)
    yield "children forked while four threads plan", f"{arguments.children}"
    yield "children that hang", outcome


CASES = {"events": events, "engines": engines, "forks": forks}


def main() -> None:
    """Print one table for each case."""
    parser = new_parser(__doc__)
    parser.add_argument("case", choices=[*CASES, "all"])
    parser.add_argument("--seconds", type=float, default=10.0, help="of the flood; 10")
    parser.add_argument("--rounds", type=int, default=8, help="of dying engines, three each; 8")
    parser.add_argument("--children", type=int, default=80, help="that are forked; 80")
    arguments = parser.parse_args()
    for name in CASES if arguments.case == "all" else [arguments.case]:
        table = new_table(name, ("what",), ("measured",))
        for row in CASES[name](arguments):
            table.add_row(*row)
        Console(width=100).print(table)


if __name__ == "__main__":
    main()
