"""A planner under everything at once for a long time: times, pauses, memory, invariants.

Threads and the tasks of event loops plan for 1,000 tenants whose popular documents drift; some are
conversations, some batches, and engines report evictions meanwhile. The planner's bounds are a part
of the usual ones, so that all are reached within the first half. Printed are the processor time of
a plan, the longest pause (a call, or a collection of garbage), how memory grows in the second half,
and whether what was checked held. Then the same requests are planned in two processes with other
hash seeds: their digests have to be equal. Run with `make soak`, which takes 15 minutes and judges
times, too; `make soak SECONDS=60` takes one and shows them.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import hashlib
import os
import random
import resource
import subprocess
import sys
import threading
import time
from array import array
from collections import deque
from dataclasses import asdict
from pathlib import Path

from ctxreuse import ContextBlock, ContextRequest, ReusePlanner
from ctxreuse.memory.tenants import Bounds, Tenants
from ctxreuse.planning import savings_meter

TENANTS = 1_000
DOCUMENTS = 200_000
OF_A_TENANT = 5_000
THREADS = 4
LOOPS = 2
TASKS = 100
BLOCKS = 8
BATCH = 50
CHECKED = 50
DIGESTED = 5_000
P99_MS = 2.0
PAUSE_MS = 50.0
GROWTH = 1.10
FULL_S = 900.0
FILLED = 0.2
MOST_RETRIEVED = savings_meter.MOST_BLOCKS


class Traffic:
    """What one worker asks for; another seed is another worker."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.number = 0
        self._name = seed

    def request(self, history: str = "") -> ContextRequest:
        """Return a request of any tenant; a later turn if there is a history."""
        self.number += 1
        tenant = min(int(self.random.paretovariate(0.6)), TENANTS) - 1
        first = tenant * 197 + self.number // 500  # what is popular drifts
        ranks = {min(int(self.random.paretovariate(0.8)), OF_A_TENANT) for _ in range(2 * BLOCKS)}
        numbers = [(first + 31 * rank) % DOCUMENTS for rank in ranks][:BLOCKS]
        self.random.shuffle(numbers)
        blocks = [
            ContextBlock(id=one, text=f"document {one}", tokens=100 + one % 200) for one in numbers
        ]
        turn = {}
        if history:
            turn = {
                "history": [{"role": "user", "content": history}],
                "conversation_id": f"{self._name} {self.number % 100}",
            }
        return ContextRequest(blocks, "Which?", tenant=f"tenant {tenant}", **turn)


class Soak:
    """The planner, and what is measured of it, for so long or so many requests at most."""

    def __init__(self, seconds: float, requests: int) -> None:
        self.planner = bounded_planner(min(1.0, seconds / FULL_S) * FILLED)
        self.plan_s = array("d")
        self.longest: dict[str, float] = {}
        self.collections_s: list[float] = []
        self.faults: deque[str] = deque(maxlen=10)
        self.checked = self.planned = 0
        self.memory: list[tuple[float, int]] = []
        self._most = requests
        self._seconds = seconds
        self._end = 0.0
        self._collected = 0.0

    def run(self) -> None:
        """Let all workers go on until the time is over or all requests are planned."""
        self._meet_all_tenants()
        gc.collect()
        gc.callbacks.append(self._time_collection)
        self._end = time.monotonic() + self._seconds
        threads = [threading.Thread(target=self._work, args=(one,)) for one in range(THREADS)]
        threads += [
            threading.Thread(target=lambda one=one: asyncio.run(self._loop(one)))
            for one in range(LOOPS)
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            self.memory.append((time.monotonic(), resident_bytes()))
            time.sleep(0.5)
        gc.callbacks.remove(self._time_collection)

    def _meet_all_tenants(self) -> None:
        """Plan a request of every tenant, so that memory grows by what they send alone."""
        for number in range(TENANTS):
            block = ContextBlock(id=number, text=f"document {number}", tokens=100)
            self.planner.plan(ContextRequest([block], "Which?", tenant=f"tenant {number}"))

    def _is_over(self) -> bool:
        return time.monotonic() > self._end or self.planned >= self._most

    def _work(self, number: int) -> None:
        worker = Worker(self, Traffic(number))
        while not self._is_over():
            worker.step()

    async def _loop(self, number: int) -> None:
        async def task(one: int) -> None:
            worker = Worker(self, Traffic(1_000 + number * TASKS + one))
            while not self._is_over():
                worker.step()
                await asyncio.sleep(0)

        await asyncio.gather(*[task(one) for one in range(TASKS)])

    def _time_collection(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._collected = time.thread_time()
        else:
            self.collections_s.append(time.thread_time() - self._collected)


class Worker:
    """Whoever plans in a thread or a task."""

    def __init__(self, soak: Soak, traffic: Traffic) -> None:
        self._soak = soak
        self._traffic = traffic
        self._sent: deque[tuple[str, str]] = deque(maxlen=50)
        self._shown = ""

    def step(self) -> None:
        """Do one thing, mostly a plan; note what it raises."""
        try:
            self._step()
        except Exception as error:
            self._soak.faults.append(repr(error))

    def _step(self) -> None:
        draw = self._traffic.random.random()
        if draw < 0.90:
            self._plan(self._traffic.request())
        elif draw < 0.96:
            self._plan(self._traffic.request(self._shown))
        elif draw < 0.97 and self._sent:
            request_id, tenant = self._sent[0]
            self._timed("evict", lambda planner: planner.evict([request_id], tenant))
        elif draw < 0.98 and self._sent:
            request_id, tenant = self._sent[-1]
            self._timed("trim", lambda planner: planner.trim(request_id, 2, tenant))
        elif draw < 0.985:
            tokens = 10 ** self._traffic.random.randrange(3, 6)
            self._timed("evict_tokens", lambda planner: planner.evict_tokens(tokens))
        elif draw < 0.987:
            self._timed("statistics", lambda planner: planner.statistics())
        elif draw < 0.988:
            requests = [self._traffic.request() for _ in range(BATCH)]
            self._timed("plan_batch, 50 requests", lambda planner: planner.plan_batch(requests))
            self._soak.planned += BATCH

    def _plan(self, request: ContextRequest) -> None:
        soak = self._soak
        started = time.thread_time()
        plan = soak.planner.plan(request)
        took = time.thread_time() - started
        soak.plan_s.append(took)
        soak.longest["plan"] = max(soak.longest.get("plan", 0), took)
        soak.planned += 1
        self._sent.append((plan.request_id, request.tenant))
        if soak.planned % CHECKED == 0:
            self._shown = plan.content
            soak.checked += 1
            self._check(request)

    def _check(self, request: ContextRequest) -> None:
        """Note what does not hold of a plan, or of the bounds."""
        soak = self._soak
        plan = soak.planner.plan(request)
        sent = [block.id for block in plan.blocks] + list(plan.references)
        if sorted(sent) != sorted(block.id for block in request.unique_blocks.values()):
            soak.faults.append(f"blocks {sorted(sent)} of {request}")
        sizes = {**soak.planner.statistics().parts, **soak.planner.savings.parts}
        for name, part in sizes.items():
            if part.entries > part.bound * 1.01 + 5_000:
                soak.faults.append(f"{name}: {part.entries:,} of {part.bound:,}")

    def _timed(self, name: str, call) -> None:  # type: ignore[no-untyped-def]
        started = time.thread_time()
        call(self._soak.planner)
        took = time.thread_time() - started
        self._soak.longest[name] = max(self._soak.longest.get(name, 0), took)


def bounded_planner(part: float) -> ReusePlanner:
    """Return a planner whose bounds are a part of the usual ones, so that all are soon reached."""
    savings_meter.MOST_BLOCKS = max(1, int(MOST_RETRIEVED * part))  # type: ignore[misc]
    planner = ReusePlanner()
    usual = asdict(Bounds())
    bounds = {name: max(1, int(bound * part)) for name, bound in usual.items()}
    bounds["tenants"] = usual["tenants"]
    planner._planning._tenants = Tenants(None, Bounds(**bounds))  # type: ignore[union-attr]
    return planner


def resident_bytes() -> int:
    """Return what the process holds of the machine's memory; 0 where Linux does not tell."""
    told = Path("/proc/self/statm")
    return int(told.read_text().split()[1]) * resource.getpagesize() if told.exists() else 0


def digest() -> str:
    """Return the digest of what is planned for some requests, in this process."""
    traffic, planner = Traffic(7), ReusePlanner(capacity_tokens=2_000_000)
    seen = hashlib.sha256()
    for number in range(DIGESTED):
        plan = planner.plan(traffic.request("Before." if number % 10 == 0 else ""))
        seen.update(f"{plan.content} {plan.expected_cached_tokens}".encode())
        if number % 100 == 0:
            planner.evict_tokens(10_000)
            planner.evict([f"request-{number // 2}"])
    return seen.hexdigest()


def digests() -> list[str]:
    """Return the digests of two processes with other hash seeds."""
    told = []
    for seed in ("1", "2"):
        command = [sys.executable, __file__, "--digest"]
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        told.append(done.stdout.strip())
    return told


def main() -> int:
    """Run the soak; return 1 if something did not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=900, help="how long at most")
    parser.add_argument("--requests", type=int, default=1_000_000, help="how many plans at most")
    parser.add_argument("--digest", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.digest:
        print(digest())
        return 0
    soak = Soak(arguments.seconds, arguments.requests)
    started = time.monotonic()
    soak.run()
    return report(soak, time.monotonic() - started, arguments.seconds >= FULL_S)


def report(soak: Soak, seconds: float, judges_times: bool) -> int:
    """Print what was measured; return 1 if something did not hold.

    Times have bounds only if they are judged: a gate's machine may be slow or busy.
    """
    # here: a collection of garbage would look at all that these bring with them, too
    from rich.console import Console

    from shared import new_table

    console = Console(width=110)
    times = sorted(soak.plan_s)
    p99 = times[int(len(times) * 0.99)] * 1_000
    collection = max(soak.collections_s, default=0) * 1_000
    pause = max(
        collection, *[soak.longest[name] * 1_000 for name in soak.longest if "," not in name]
    )
    half = soak.memory[len(soak.memory) // 2 :]
    growth = half[-1][1] / half[0][1]
    size = soak.planner.statistics()
    one, other = digests()
    rows = [
        ("plans", f"{soak.planned:,} in {seconds:,.0f} s", True),
        ("p50 of a plan, ms", f"{times[len(times) // 2] * 1_000:.2f}", True),
        ("p99 of a plan, ms", f"{p99:.2f}", p99 < P99_MS if judges_times else None),
        ("longest pause, ms", f"{pause:.1f}", pause < PAUSE_MS if judges_times else None),
        ("  longest collection of garbage, ms", f"{collection:.1f}", True),
        *[
            (f"  longest {name}, ms", f"{one * 1_000:.1f}", True)
            for name, one in soak.longest.items()
        ],
        ("index", f"{size.nodes:,} nodes, {size.requests:,} ids, {size.tokens:,} tokens", True),
        ("memory of the process, MB", f"{half[-1][1] / 2**20:,.0f}", True),
        ("memory, end to half-time", f"{growth:.3f}", growth < GROWTH),
        ("checked", f"{soak.checked:,} plans, {len(soak.faults)} faults", not soak.faults),
        ("digests of two processes", f"{one[:12]} {other[:12]}", one == other),
    ]
    table = new_table("soak", ("what", "measured"), ("holds",))
    for what, measured, holds in rows:
        table.add_row(what, measured, {True: "yes", False: "NO", None: "not judged"}[holds])
    console.print(table)
    for name, part in {**size.parts, **soak.planner.savings.parts}.items():
        console.print(f"  {name}: {part.entries:,} of {part.bound:,}")
    for fault in soak.faults:
        console.print(fault)
    return 1 if any(holds is False for _, _, holds in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
