"""Several worker processes that use one engine over HTTP: hits with and without a shared log.

The requests of public traces come one after the other, at a fixed rate, to the workers in turn, as
a load balancer sends them. Each worker is a process with a planner and a client of its own; the
engine is emulated, in a process of its own. Printed are the share of block tokens that an unlimited
prefix cache holds in the order in which the workers have sent them, the share of whole prompts that
the engine reports, and how long planning took in the workers: on the clock, where each process
waits for its turn on the cores, and as processor time.

How long planning takes with a log and without is compared in pairs: the same requests go through a
deployment that shares and through two that do not, in turn, `--pairs` times, so that what slows the
machine down slows all of them. One worker has in its index what each of 8 sharing ones has; each of
8 on their own has an eighth of it. Reads the folder that CTXREUSE_DATA names. Run with
`make bench-workers`.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import httpx
from rich.console import Console
from rich.progress import track

from ctxreuse import ContextRequest, ReusePlanner
from ctxreuse.cache import BlockLevelCache
from ctxreuse.cache.simulator import CacheUsage
from ctxreuse.planner import Strategy
from ctxreuse.serving import EmulatedEngine, EngineClient
from ctxreuse.sharing import SQLiteLog
from shared import data_folder, new_parser, new_table, read_requests

TRACES = ("xquad_k5", "mtrag_k5", "locomo_k20")
START_S = 1.0
SPAWN = get_context("spawn")


class SetUp(NamedTuple):
    """A deployment."""

    name: str  # what the table calls it
    workers: int  # how many processes
    shares: bool = False  # whether they share a log
    strategy: Strategy = "reuse"  # how they order


SET_UPS = (
    SetUp("as retrieved", 8, strategy="none"),
    SetUp("one worker", 1),
    SetUp("8 workers, each on its own", 8),
    SetUp("8 workers, shared log", 8, shares=True),
    SetUp("16 workers, each on its own", 16),
    SetUp("16 workers, shared log", 16, shares=True),
)
SHARING = SetUp("8 workers, shared log", 8, shares=True)
UNSHARED = (SetUp("one worker", 1), SetUp("8 workers, each on its own", 8))


class Sent(NamedTuple):
    """A request that a worker has sent."""

    at: float  # when, on the machine's clock
    keys: list[bytes]  # its blocks, in the order in which they were sent
    tokens: list[int]  # their lengths
    planning_s: float  # how long planning took, on the clock
    planning_cpu_s: float  # how much processor time it took
    prompt_tokens: int  # what the engine says of the prompt
    cached_tokens: int  # the same, found in its cache


def serve(answers: Connection) -> None:
    """Serve an emulated engine until the process is ended."""
    client = httpx.Client(transport=EmulatedEngine().transport(httpx), base_url="http://engine")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(client.get(self.path))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            self._answer(client.post(self.path, content=body))

        def _answer(self, reply: httpx.Response) -> None:
            self.send_response(reply.status_code)
            self.send_header("content-type", reply.headers.get("content-type", "text/plain"))
            self.send_header("content-length", str(len(reply.content)))
            self.end_headers()
            self.wfile.write(reply.content)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    answers.send(server.server_address[1])
    server.serve_forever()


@contextmanager
def engine() -> Iterator[str]:
    """Run an engine in a process of its own; yield its base URL."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}/v1"
    finally:
        process.terminate()
        process.join()


def work(
    driver: Connection,
    url: str,
    log: str | None,
    strategy: Strategy,
    arrivals: Sequence[tuple[float, ContextRequest]],
) -> None:
    """Say when ready, get the time to start, and send requests as they arrive; say what was sent.

    Arrivals are seconds behind the start, and the request.
    """
    shared = None if log is None else SQLiteLog(log)
    planner = ReusePlanner(shared_log=shared)
    planner.plan(ContextRequest(["a text", "b text"], tenant="warm-up"))
    planner.catch_up()
    started_at = 0.0

    async def send(client: EngineClient, at: float, request: ContextRequest) -> Sent:
        await asyncio.sleep(max(0.0, started_at + at - time.time()))
        started, started_cpu = time.perf_counter(), time.thread_time()
        plan = planner.plan(request, strategy)
        cpu_s, clock_s = time.thread_time() - started_cpu, time.perf_counter() - started
        sent_at = time.time()
        done = await client.complete(plan, max_tokens=1)
        keys = [bytes(block.key) for block in plan.blocks]
        tokens = [block.tokens or 0 for block in plan.blocks]
        cached_tokens = done.cached_tokens or 0
        return Sent(sent_at, keys, tokens, clock_s, cpu_s, done.prompt_tokens, cached_tokens)

    async def all_requests() -> list[Sent]:
        nonlocal started_at
        async with EngineClient(url, planner=planner) as client:
            await client.complete([{"role": "user", "content": "warm-up"}], max_tokens=1)
            driver.send("ready")
            started_at = driver.recv()
            return await asyncio.gather(*(send(client, *one) for one in arrivals))

    driver.send(asyncio.run(all_requests()))


def run(requests: Sequence[ContextRequest], set_up: SetUp, rate: float) -> list[Sent]:
    """Return what the workers have sent, in its order."""
    with engine() as url, tempfile.TemporaryDirectory() as folder:
        log = str(Path(folder) / "sent.sqlite") if set_up.shares else None
        arrivals = [(number / rate, one) for number, one in enumerate(requests)]
        processes, pipes = [], []
        for number in range(set_up.workers):
            ours, theirs = SPAWN.Pipe()
            own = arrivals[number :: set_up.workers]
            arguments = (theirs, url, log, set_up.strategy, own)
            process = SPAWN.Process(target=work, args=arguments, daemon=True)
            process.start()
            processes.append(process)
            pipes.append(ours)
        for pipe in pipes:
            assert pipe.recv() == "ready"
        for pipe in pipes:
            pipe.send(time.time() + START_S)
        sent = [one for pipe in pipes for one in pipe.recv()]
        for process in processes:
            process.join()
    return sorted(sent, key=lambda one: one.at)


class PlanningTimes(NamedTuple):
    """How long planning took in one run, in milliseconds."""

    p50: float  # the middle one, on the clock
    p99: float  # the 99th of 100, on the clock
    cpu_p50: float  # the middle one's processor time
    cpu_p99: float  # the same of the 99th of 100

    @classmethod
    def of(cls, sent: Sequence[Sent]) -> PlanningTimes:
        """Return the times of what was sent."""
        clock = sorted(one.planning_s * 1_000 for one in sent)
        cpu = sorted(one.planning_cpu_s * 1_000 for one in sent)
        middle, late = len(sent) // 2, len(sent) * 99 // 100
        return cls(clock[middle], clock[late], cpu[middle], cpu[late])


def print_hits(
    console: Console, name: str, requests: Sequence[ContextRequest], rate: float
) -> None:
    """Print what each deployment reaches with a trace."""
    table = new_table(
        f"{name}: {len(requests):,} requests, {rate:g} a second",
        ["workers"],
        ["block hits", "of one worker", "engine's hits", "plan p50 ms", "p99", "cpu p50", "p99"],
    )
    rows: list[tuple[str, float, float, PlanningTimes]] = []
    one_worker = 0.0
    for set_up in track(SET_UPS, name, transient=True):
        sent = run(requests, set_up, rate)
        assert len(sent) == len(requests), "each request is sent once"
        cache, usage = BlockLevelCache(), CacheUsage()
        for one in sent:
            usage += cache.serve(one.keys, one.tokens)
        if set_up.name == "one worker":
            one_worker = usage.hit_ratio
        prompt_tokens = sum(one.prompt_tokens for one in sent)
        reported = sum(one.cached_tokens for one in sent) / prompt_tokens
        rows.append((set_up.name, usage.hit_ratio, reported, PlanningTimes.of(sent)))
    for title, hits, reported, times in rows:
        figures = (f"{hits:.4f}", f"{hits / one_worker:.3f}", f"{reported:.4f}")
        table.add_row(title, *figures, *(f"{one:.3f}" for one in times))
    console.print(table)


def print_pairs(
    console: Console, requests: Sequence[ContextRequest], rate: float, pairs: int
) -> None:
    """Print what sharing adds to planning, as the median of the pairs' ratios."""
    times: dict[str, list[PlanningTimes]] = {}
    for number in range(pairs):
        set_ups = (SHARING, *UNSHARED)
        turn = number % len(set_ups)
        for set_up in set_ups[turn:] + set_ups[:turn]:
            times.setdefault(set_up.name, []).append(PlanningTimes.of(run(requests, set_up, rate)))
    table = new_table(
        f"planning with a shared log to planning without, {pairs} pairs",
        [f"{SHARING.name} to"],
        ["p50", "p99", "p50, processor", "p99, processor", "p99 of each pair, processor"],
    )
    for set_up in UNSHARED:
        ratios = [
            [with_log / without for with_log, without in zip(one, other, strict=True)]
            for one, other in zip(times[SHARING.name], times[set_up.name], strict=True)
        ]
        medians = [f"{median(one):.3f}" for one in zip(*ratios, strict=True)]
        table.add_row(set_up.name, *medians, " ".join(f"{one[3]:.2f}" for one in ratios))
    console.print(table)


def main() -> None:
    """Print the tables of each trace."""
    parser = new_parser(__doc__)
    parser.add_argument("traces", nargs="*", default=TRACES, help=f"default: {' '.join(TRACES)}")
    parser.add_argument("--rate", type=float, default=50.0, help="requests a second, all together")
    parser.add_argument("--requests", type=int, help="so many of each trace, instead of all")
    parser.add_argument("--pairs", type=int, default=5, help="of runs that compare times; 0: none")
    parser.add_argument("--only-pairs", action="store_true", help="compare times alone")
    options = parser.parse_args()
    data = data_folder(*{name.split("_")[0] for name in options.traces})
    console = Console(width=130)
    for name in options.traces:
        requests = read_requests(data, name, options.requests)
        if not options.only_pairs:
            print_hits(console, name, requests, options.rate)
        if options.pairs:
            print_pairs(console, requests, options.rate, options.pairs)


if __name__ == "__main__":
    main()
