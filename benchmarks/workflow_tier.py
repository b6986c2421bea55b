"""The hot tier: what share of the search it takes, while everything else stays on disk, cold.

The index file (2 GB) is memory-mapped in a process that may use less memory than that (a cgroup),
so that cold clusters have to be read again and again; where no cgroup can be made, the page cache
is dropped before each process instead. The first half of the requests teaches the tier what is hot,
the second half is measured. Reads the folder named by CTXREUSE_DATA.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from ctxreuse.workflow import EmulatedLLM, VectorRetriever, WorkflowEngine, WorkflowOptions
from ctxreuse.workflow.vector_search.hot_tier import HotTier
from ctxreuse.workflow.vector_search.ivf import IVFIndex
from shared import new_table
from workflow_data import Author, Collection, make_questions

GROUPS = (
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.max"),
)
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
OWN_BYTES = 900_000_000
"""What the process needs beside the index: code, embedder, passages."""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, help="of the index, in this process")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--nprobe", type=int, default=128)
    options = parser.parse_args()
    if options.share is not None:
        print(*measured(options.share, options.requests, options.nprobe))
        return
    size = Collection().index_path.stat().st_size
    title = f"hot tier, nprobe {options.nprobe}, {options.requests} requests"
    columns = ("share of the index", "held by", "codes served hot", "ms a search", "major faults")
    table = new_table(title, (), columns)
    for share in (0.0, 0.05, 0.1, 0.2, 0.3):
        with limited(int(OWN_BYTES + 1.2 * share * size)) as (join, how):
            drop_page_cache()  # what is in it already would not count as the child's
            command = [sys.executable, __file__, "--share", str(share)]
            command += ["--requests", str(options.requests), "--nprobe", str(options.nprobe)]
            out = subprocess.run(
                command, preexec_fn=join, check=True, capture_output=True, text=True
            )
            hot, milliseconds, faults = out.stdout.split()
            table.add_row(f"{share:.0%}", how, f"{float(hot):.1%}", milliseconds, faults)
    Console(width=120).print(table)


def measured(share: float, requests: int, nprobe: int) -> tuple[str, str, str]:
    """Return codes served hot, milliseconds a search, and page faults, of the second half."""
    collection = Collection()
    index = IVFIndex.read(collection.index_path, memory_map=True)
    capacity = int(share * index.size * (index.code_size + 8))
    # built once, between the halves: what is measured is the tier, not its exchange
    tier = HotTier(index, capacity, every=1_000_000) if share else None
    retriever = VectorRetriever(
        index, collection.block, collection.embedder, nprobe=nprobe, hot=tier
    )
    questions = [one.text for one in make_questions(collection.passages, requests)]
    half = len(questions) // 2

    async def search(engine: WorkflowEngine, texts: Sequence[str]) -> list[float]:
        took = []
        for first in range(0, len(texts), 4):  # four at a time
            began = time.perf_counter()
            await asyncio.gather(*(engine.retrieve(text) for text in texts[first : first + 4]))
            took.append((time.perf_counter() - began) / 4)
        return took

    async def run() -> tuple[str, str, str]:
        llm = EmulatedLLM(Author([]))
        async with WorkflowEngine(llm, retriever, options=WorkflowOptions()) as engine:
            await search(engine, questions[:half])
            if tier is not None:
                tier.swap(tier.build())
                before = (tier.counters.hot_codes, tier.counters.codes)
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
            took = await search(engine, questions[half:])
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt - faults
            hot = 0.0
            if tier is not None:
                counters = tier.counters
                hot = (counters.hot_codes - before[0]) / (counters.codes - before[1])
            return f"{hot:.4f}", f"{1e3 * statistics.fmean(took):.1f}", str(faults)

    return asyncio.run(run())


def drop_page_cache() -> bool:
    """Drop what the system holds of files, if it lets us; return whether it did."""
    try:
        DROP_CACHES.write_text("1")
    except OSError:
        return False
    return True


@contextmanager
def limited(size: int) -> Iterator[tuple[Callable[[], object] | None, str]]:
    """Yield what makes a child process use no more memory than that, and how."""
    group = group_of(size)
    if group is None:
        yield None, "a dropped page cache" if drop_page_cache() else "nothing: the cache is warm"
        return
    try:
        procs = group / "cgroup.procs"
        yield lambda: procs.write_text(str(os.getpid())), f"a cgroup of {size / 1e9:.1f} GB"
    finally:
        group.rmdir()


def group_of(size: int) -> Path | None:
    """Return a new cgroup that may use so much memory, if the system lets us make one."""
    for root, limit in GROUPS:
        group = root / f"ctxreuse-{os.getpid()}"
        try:
            group.mkdir()
            (group / limit).write_text(str(size))
        except OSError:
            if group.exists():
                group.rmdir()
            continue
        return group
    return None


if __name__ == "__main__":
    main()
