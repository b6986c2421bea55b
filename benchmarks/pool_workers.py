"""Pools of several processes over the same engines: hits with and without a shared log.

The requests of public traces go to the pools in turn, as a load balancer sends them; each pool
chooses among four emulated engines, which all pools use. All of it runs in one process: pools share
nothing but the log, and learn of each other's requests some requests late. Printed is the share of
prompt tokens that the engines found in their caches. Reads the folder that CTXREUSE_DATA names.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import tempfile
import time
from functools import partial
from pathlib import Path

import httpx
from rich.console import Console

from ctxreuse import ContextRequest, ReusePlanner
from ctxreuse.serving import EmulatedEngine, EngineClient, EnginePool
from ctxreuse.sharing import SQLiteLog
from shared import data_folder, new_table, read_requests
from workers import SetUp

TRACES = ("xquad_k5", "mtrag_k5", "locomo_k20")
ENGINES = 4
SET_UPS = (
    SetUp("4 pools, as retrieved", 4, strategy="none"),
    SetUp("one pool", 1),
    SetUp("4 pools, each on its own", 4),
    SetUp("4 pools, shared log", 4, shares=True),
)


async def hit_ratio(
    set_up: SetUp, requests: list[ContextRequest], late: int, folder: Path
) -> float:
    """Return the share of prompt tokens that engines had cached.

    Pools that share a log in the folder learn of each other's requests after `late` of them.
    """
    engines = [EmulatedEngine() for _ in range(ENGINES)]

    def connect(engine: EmulatedEngine) -> EngineClient:
        client = httpx.AsyncClient(transport=engine.transport(httpx))
        return EngineClient("http://engine/v1", "emulated", http_client=client)

    log = SQLiteLog(folder / "sent.sqlite") if set_up.shares else None
    planner = ReusePlanner(shared_log=log)
    names = {str(number): partial(connect, engine) for number, engine in enumerate(engines)}
    pools = [
        EnginePool(names, planner=planner, strategy=set_up.strategy, window_s=0)
        for _ in range(set_up.workers)
    ]
    prompt = cached = 0
    for number, request in enumerate(requests):
        served = await pools[number % len(pools)].complete(request, max_tokens=1)
        prompt += served.completion.prompt_tokens or 0
        cached += served.completion.cached_tokens or 0
        if set_up.shares and number % late == 0:
            for _ in range(2):  # one may tell while another one reads
                await asyncio.gather(*(pool.catch_up() for pool in pools))
    for pool in pools:
        assert not any(replica.sharing.faults for replica in pool.statistics())
        await pool.aclose()
    return cached / prompt


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, help="as many of each trace; all by default")
    parser.add_argument("--late", type=int, default=8, help="requests until others learn of one")
    options = parser.parse_args()
    data = data_folder("xquad", "mtrag", "locomo")
    table = new_table(f"hit ratios, {ENGINES} engines", ["deployment"], TRACES)
    traces = [read_requests(data, name, options.requests) for name in TRACES]
    for set_up in SET_UPS:
        ratios = []
        for requests in traces:
            with tempfile.TemporaryDirectory() as folder:
                shared = hit_ratio(set_up, requests, options.late, Path(folder))
                ratios.append(asyncio.run(shared))
                gc.collect()  # ends the threads that read the log
                time.sleep(0.1)
        table.add_row(set_up.name, *(f"{ratio:.3f}" for ratio in ratios))
    Console().print(table)


if __name__ == "__main__":
    main()
