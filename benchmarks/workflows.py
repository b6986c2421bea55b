"""RAG workflows over an emulated model and a real vector index: what each technique brings.

Search is real (faiss), the model emulated with the project's common rates, faster by a factor that
makes a full retrieval take half of a generation: with millions of vectors instead of tens of
millions search would cost nothing beside it. Requests arrive at random (Poisson); all policies get
the same ones and must give the same answers. Reads the folder named by CTXREUSE_DATA.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from rich.console import Console
from rich.table import Table
from workflow_data import Author, Collection, Question, make_questions

from ctxreuse import ContextBlock
from ctxreuse.workflow import workflows
from ctxreuse.workflow.emulated_llm import EmulatedLLM
from ctxreuse.workflow.engine import WorkflowEngine
from ctxreuse.workflow.graph import WorkflowGraph
from ctxreuse.workflow.metrics import EngineMetrics
from ctxreuse.workflow.options import EngineOptions
from ctxreuse.workflow.retrievers import CallableRetriever
from ctxreuse.workflow.vector_retriever import VectorRetriever

GRAPHS: dict[str, Callable[[], WorkflowGraph]] = {
    "one_shot": workflows.one_shot,
    "hyde": workflows.hyde,
    "recomp": workflows.recomp,
    "irg": workflows.irg,
    "multistep": workflows.multistep,
}
GENERATION_S = 0.5
"""What a usual generation takes at the rates as they are."""

RATIO = 0.75
"""What a full retrieval takes of a generation."""

OFF = EngineOptions(reorder=False, speculation="off", speculative_retrieval=False)
POLICIES: dict[str, EngineOptions | None] = {
    "sequential": None,
    "naive async": None,
    "sub-stages": OFF,
    "+ reordering": replace(OFF, reorder=True),
    "+ speculation": replace(OFF, speculation="adaptive", speculative_retrieval=True),
    "+ always": replace(OFF, speculation="always"),
    "+ stable": replace(OFF, speculation="stable"),
    "all": EngineOptions(),
}


@dataclass(frozen=True)
class Measured:
    """One policy at one rate."""

    mean_s: float
    p95_s: float
    total_s: float
    answers: tuple[str, ...]
    metrics: EngineMetrics


class Bench:
    """Runs requests under a policy."""

    def __init__(self, nprobe: int, questions: Sequence[Question], collection: Collection) -> None:
        self.collection = collection
        self.index = collection.read_index()
        self.index.nprobe = nprobe
        self.nprobe = nprobe
        self.questions = questions
        self.speed = 1.0

    def search(self, query: str, k: int) -> list[ContextBlock]:
        """Search as a script does: embed, and ask faiss."""
        vector = np.ascontiguousarray(self.collection.embedder.embed([query]), dtype=np.float32)
        scores, ids = self.index.search(vector, k)
        order = np.lexsort((ids[0], scores[0]))
        return [self.collection.block(int(number)) for number in ids[0][order] if number >= 0]

    def retrieval_s(self) -> float:
        """Return what a search takes alone."""
        took = []
        for question in self.questions[:40]:
            began = time.perf_counter()
            self.search(question.text, 5)
            took.append(time.perf_counter() - began)
        return statistics.median(took)

    async def alone_s(self, jobs: Sequence[tuple[WorkflowGraph, str]]) -> float:
        """Return what a request takes when there is no other."""
        async with self.engine("sequential") as engine:
            results = [await engine.run(graph, text) for graph, text in jobs]
        return statistics.fmean(result.seconds for result in results)

    def engine(self, policy: str) -> WorkflowEngine:
        """Return an engine that works by a policy."""
        llm = EmulatedLLM(
            Author(self.questions), speed=self.speed, capacity_tokens=200_000, chunk_tokens=16
        )
        options = POLICIES[policy]
        if options is None:
            most = 1 if policy == "sequential" else 256
            return WorkflowEngine(
                llm, CallableRetriever(self.search), options=EngineOptions(max_in_flight=most)
            )
        retriever = VectorRetriever(
            self.index, self.collection.block, self.collection.embedder, nprobe=self.nprobe
        )
        return WorkflowEngine(llm, retriever, options=options)

    async def measure(
        self, policy: str, jobs: Sequence[tuple[WorkflowGraph, str]], rate: float | None
    ) -> Measured:
        """Run jobs that arrive at a rate; None is all at once."""
        chooser = random.Random(1)
        waits = [chooser.expovariate(rate) if rate else 0.0 for _ in jobs]
        async with self.engine(policy) as engine:
            for graph, text in jobs[:3]:  # threads, first fits
                await engine.run(graph, text)
            began = time.perf_counter()
            due = began
            tasks = []
            for wait, (graph, text) in zip(waits, jobs, strict=True):
                due += wait
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                tasks.append(asyncio.create_task(engine.run(graph, text)))
            results = await asyncio.gather(*tasks)
            total_s = time.perf_counter() - began
            metrics = engine.metrics()
        seconds = sorted(result.seconds for result in results)
        return Measured(
            statistics.fmean(seconds),
            seconds[int(0.95 * len(seconds))],
            total_s,
            tuple(str(result) for result in results),
            metrics,
        )


RATES = (0.33, 0.67, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0)
"""Of what sequential execution can do at most."""

SLOWEST = 4.0
"""Rates are raised until a request takes so many times what it takes alone."""


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nprobe", type=int, action="append", help="128 unless given")
    parser.add_argument("--workflow", choices=[*GRAPHS, "mix"], action="append")
    parser.add_argument("--policy", choices=POLICIES, action="append")
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--speed", type=float, help="of the model, instead of a chosen one")
    options = parser.parse_args()
    console = Console(width=170)
    collection = Collection()
    questions = make_questions(collection.passages, options.requests)
    for nprobe in options.nprobe or (128,):
        bench = Bench(nprobe, questions, collection)
        retrieval_s = bench.retrieval_s()
        bench.speed = options.speed or RATIO * GENERATION_S / retrieval_s
        console.print(
            f"nprobe {nprobe}: a search takes {1e3 * retrieval_s:.1f} ms; the model runs "
            f"{bench.speed:.1f} times faster than its rates"
        )
        for name in options.workflow or [*GRAPHS, "mix"]:
            show(console, bench, name, options.policy or list(POLICIES))


@dataclass(frozen=True)
class Sweep:
    """A policy at rising rates.

    Attributes:
        by_rate: What was measured, by the multiple of what sequential execution can do.
        offline: All requests at once.
    """

    by_rate: dict[float, Measured]
    offline: Measured

    def sustained(self, latency_s: float) -> float:
        """Return the highest rate with no more than a mean latency, between those measured."""
        best, before = 0.0, 0.0
        for rate, measured in self.by_rate.items():
            if measured.mean_s > latency_s:
                if best:
                    share = (latency_s - before) / (measured.mean_s - before)
                    best += share * (rate - best)
                break
            best, before = rate, measured.mean_s
        return best


def sweep(
    bench: Bench, policy: str, jobs: Sequence[tuple[WorkflowGraph, str]], alone_s: float
) -> Sweep:
    """Measure a policy at rising rates until it is too slow, and with all requests at once."""
    by_rate: dict[float, Measured] = {}
    for rate in RATES:
        if policy == "sequential" and rate >= 1.0:
            break
        by_rate[rate] = asyncio.run(bench.measure(policy, jobs, rate / alone_s))
        if by_rate[rate].mean_s > SLOWEST * alone_s:
            break
    return Sweep(by_rate, asyncio.run(bench.measure(policy, jobs, None)))


def show(console: Console, bench: Bench, name: str, policies: Sequence[str]) -> None:
    """Print one workflow's table."""
    names = list(GRAPHS) if name == "mix" else [name]
    jobs = [
        (GRAPHS[names[number % len(names)]](), question.text)
        for number, question in enumerate(bench.questions)
    ]
    alone_s = asyncio.run(bench.alone_s(jobs[:40]))
    table = Table(
        title=f"{name}, nprobe {bench.nprobe}: {1e3 * alone_s:.0f} ms alone, so sequential "
        f"execution makes {1 / alone_s:.1f}/s at most; mean latencies in ms by rate"
    )
    columns = ["policy", *(f"x{rate:g}" for rate in RATES), "at 2x alone", "offline s"]
    columns += ["launched", "right", "wasted tokens", "scheduling"]
    for column in columns:
        table.add_column(column, justify="left" if column == "policy" else "right")
    sweeps: dict[str, Sweep] = {}
    for policy in policies:
        sweeps[policy] = done = sweep(bench, policy, jobs, alone_s)
        for measured in (*done.by_rate.values(), done.offline):
            if measured.answers != next(iter(sweeps.values())).offline.answers:
                sys.exit(f"{policy} gave other answers than {policies[0]}")
        slow = max(done.by_rate)
        speculation = done.by_rate[min(done.by_rate)].metrics.speculation
        table.add_row(
            policy,
            *(f"{1e3 * done.by_rate[rate].mean_s:.0f}" if rate <= slow else "" for rate in RATES),
            f"{done.sustained(2 * alone_s):.2f}",
            f"{done.offline.total_s:.2f}",
            f"{speculation.launched}/{speculation.retrievals}",
            f"{speculation.committed}",
            f"{speculation.wasted_tokens}/{speculation.generated_tokens}",
            f"{done.offline.metrics.searches.scheduling_s / done.offline.total_s:.4f}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
