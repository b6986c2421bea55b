"""Measures the two tables that `split_memory` needs (HedraRAG, Equation 2), and prints the split.

    python benchmarks/memory_tables.py retrieval tables.json --index my.faiss --queries my.npy \
        --hot-gb 0 2 4 8 --arriving 2 8 32
    python benchmarks/memory_tables.py generation tables.json --base-url http://127.0.0.1:8000/v1 \
        --prompts prompts.txt --kv-gb 20 --arriving 2 8 32      once for each size of its cache
    python benchmarks/memory_tables.py split tables.json --gb 24 --runs 4

Requests arrive evenly, as many a second as is said, for `--seconds`; what is completed meanwhile
counts. The index is stock faiss, the queries are vectors of your questions, prompts one a line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from itertools import count, cycle
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ctxreuse import ContextBlock
from ctxreuse.serving import EngineClient
from ctxreuse.workflow import (
    EmulatedLLM,
    IVFIndex,
    ThroughputTable,
    VectorRetriever,
    WorkflowEngine,
    fastest_tier,
    split_memory,
)
from shared import new_parser

_GB = 10**9
_NEEDS = {
    "retrieval": ("index", "queries"),
    "generation": ("base_url", "prompts", "kv_gb"),
    "split": ("gb",),
}


def main(given: Sequence[str] | None = None) -> None:
    """Measure a table, or print the split."""
    parser = new_parser(__doc__)
    parser.add_argument("what", choices=["retrieval", "generation", "split"])
    parser.add_argument("tables", type=Path, help="the file in which the tables stand")
    parser.add_argument("--arriving", type=float, nargs="+", default=[2.0, 8.0, 32.0])
    parser.add_argument("--seconds", type=float, default=20.0, help="for each figure")
    parser.add_argument("--index", type=Path)
    parser.add_argument("--queries", type=Path, help="(n, dimension) numbers, an .npy file")
    parser.add_argument("--hot-gb", type=float, nargs="+", default=[0.0])
    parser.add_argument("--nprobe", type=int, default=32)
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument("--base-url")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--answer-tokens", type=int, default=100)
    parser.add_argument("--kv-gb", type=float, help="what the engine was started with")
    parser.add_argument("--gb", type=float, help="for cache and hot clusters together")
    parser.add_argument("--runs", type=float, default=1.0, help="that arrive in a second")
    options = parser.parse_args(given)
    for name in _NEEDS[options.what]:
        if getattr(options, name) is None:
            parser.error(f"{options.what} needs --{name.replace('_', '-')}")
    tables: dict[str, Any] = {}
    if options.tables.exists():
        tables = json.loads(options.tables.read_text())
    known = tables.get(options.what, {"memory_bytes": (), "completed": ()})
    if known.get("arriving", options.arriving) != options.arriving:
        parser.error(
            f"the {options.what} table in {options.tables} is for --arriving "
            f"{' '.join(map(str, known['arriving']))}; give the same, or name another file"
        )
    if options.what == "split":
        missing = [name for name in ("generation", "retrieval") if name not in tables]
        if missing:
            parser.error(f"{options.tables} has no table of {missing[0]}: measure it first")
        generation, retrieval = (
            ThroughputTable(**tables[name]) for name in ("generation", "retrieval")
        )
        total = int(options.gb * _GB)
        print(split_memory(total, generation, retrieval, arriving_runs=options.runs))
        return
    measured = _retrieval(options) if options.what == "retrieval" else _generation(options)
    rows = dict(zip(known["memory_bytes"], known["completed"], strict=True)) | measured
    sizes = sorted(rows)
    tables[options.what] = {
        "memory_bytes": sizes,
        "arriving": options.arriving,
        "completed": [rows[size] for size in sizes],
    }
    options.tables.write_text(json.dumps(dict(sorted(tables.items())), indent=1) + "\n")
    for size in measured:
        print(options.what, size, dict(zip(options.arriving, measured[size], strict=True)))


class _Given:
    """Embeds the numbers of vectors, as texts."""

    def __init__(self, vectors: npt.NDArray[np.float32]) -> None:
        self._vectors = vectors
        self.dimension = int(vectors.shape[1])

    def embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Return the vector of each text's number."""
        return self._vectors[[int(text) for text in texts]]


def _retrieval(options: argparse.Namespace) -> dict[float, list[float]]:
    queries = np.load(options.queries).astype(np.float32)
    rows: dict[float, list[float]] = {}
    for hot in options.hot_gb:
        index = IVFIndex.read(options.index)
        tier = fastest_tier(index, int(hot * _GB)) if hot else None
        print(f"{hot:g} GB in a {type(tier).__name__}" if tier else "no clusters are held")
        retriever = VectorRetriever(
            index,
            lambda number: ContextBlock(id=number, text=f"{number}"),
            _Given(queries),
            nprobe=options.nprobe,
            hot=tier,
        )
        rows[int(hot * _GB)] = asyncio.run(_searched(retriever, len(queries), options))
    return rows


async def _searched(
    retriever: VectorRetriever, queries: int, options: argparse.Namespace
) -> list[float]:
    async with WorkflowEngine(EmulatedLLM(lambda messages: ""), retriever) as engine:
        asked = cycle(range(queries))
        for _ in range(100 if retriever.hot is not None else 0):  # what is hot is learned first
            await engine.retrieve(f"{next(asked)}", options.k)
        return [
            await completed_per_s(
                lambda: engine.retrieve(f"{next(asked)}", options.k), rate, options.seconds
            )
            for rate in options.arriving
        ]


def _generation(options: argparse.Namespace) -> dict[float, list[float]]:
    prompts = cycle(options.prompts.read_text().splitlines())

    async def measure() -> list[float]:
        async with EngineClient(options.base_url) as client:
            return [
                await completed_per_s(
                    lambda: client.complete(
                        [{"role": "user", "content": next(prompts)}],
                        max_tokens=options.answer_tokens,
                    ),
                    rate,
                    options.seconds,
                )
                for rate in options.arriving
            ]

    return {int(options.kv_gb * _GB): asyncio.run(measure())}


async def completed_per_s(
    start: Callable[[], Awaitable[object]], arriving_per_s: float, seconds: float
) -> float:
    """Return how many of some calls a second are completed while so many arrive."""
    clock = asyncio.get_running_loop().time
    began, done, running = clock(), 0, set[asyncio.Future[object]]()
    failed: list[BaseException] = []

    def note(call: asyncio.Future[object]) -> None:
        nonlocal done
        running.discard(call)
        error = None if call.cancelled() else call.exception()
        done += not call.cancelled() and error is None
        failed.extend([error] if error is not None else ())

    for number in count():
        at = began + number / arriving_per_s
        if at >= began + seconds:
            break
        await asyncio.sleep(max(0.0, at - clock()))
        call = asyncio.ensure_future(start())
        running.add(call)
        call.add_done_callback(note)
    await asyncio.sleep(max(0.0, began + seconds - clock()))
    took, completed = clock() - began, done
    for call in [*running]:
        call.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    if failed:  # a table of what fails fast would mislead
        raise failed[0]
    return completed / took


if __name__ == "__main__":
    main()
