"""RAG workflows over an emulated model and a real vector index: what each technique brings.

Search is real (faiss). The model is emulated with the project's common rates, sped up until a full
retrieval takes 0.75 of a generation: the index has millions of vectors, not tens of millions, so
its searches would cost next to nothing otherwise. Requests arrive at random (Poisson). The machine
is not always equally fast, so all policies get the same requests in turns, several times, and the
tables show medians. All policies must give the same answers. Reads the folder named by
CTXREUSE_DATA.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from ctxreuse import ContextBlock
from ctxreuse.workflow import library
from ctxreuse.workflow.engine import WorkflowEngine
from ctxreuse.workflow.graph.builder import WorkflowGraph
from ctxreuse.workflow.models.emulated_llm import EmulatedLLM
from ctxreuse.workflow.retrievers import CallableRetriever
from ctxreuse.workflow.runtime.services import WorkflowOptions
from ctxreuse.workflow.vector_search.hot_tier import HotTier
from ctxreuse.workflow.vector_search.ivf import IVFIndex
from ctxreuse.workflow.vector_search.vector_retriever import VectorRetriever
from shared import new_table
from workflow_data import VECTORS, Author, Collection, Question, make_questions

GRAPHS: dict[str, Callable[[], WorkflowGraph]] = {
    "one_shot": library.one_shot,
    "hyde": library.hyde,
    "recomp": library.recomp,
    "irg": library.irg,
    "multistep": library.multistep,
}
GENERATION_S = 0.5
"""Seconds of a usual generation at the unchanged rates."""

RATIO = 0.75
"""A full retrieval's time, as a part of a generation's."""

OFF = WorkflowOptions(reorder=False, speculation="off", speculative_retrieval=False)
POLICIES: dict[str, WorkflowOptions | None] = {
    "sequential": None,
    "naive async": None,
    "sub-stages": OFF,
    "+ reordering": replace(OFF, reorder=True),
    "+ speculation": replace(OFF, speculation="adaptive", speculative_retrieval=True),
    "+ hot tier": OFF,
    "as RaLMSpec": replace(OFF, speculation="always"),
    "all": WorkflowOptions(),
}
"""Sub-stages alone, and each other technique added to them alone. One always speculates from what
the last search found (RaLMSpec)."""

TIER_SHARE = 0.2
"""The part of the index that the hot tier holds. Here the rest is in memory, too;
`workflow_tier.py` measures an index that is not."""

Job = tuple[WorkflowGraph, str]


@dataclass(frozen=True)
class Measured:
    """One policy at one rate, once."""

    mean_s: float
    total_s: float
    answers: tuple[str, ...]


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
        """Return the seconds of a search when no other runs."""
        took = []
        for question in self.questions[:40]:
            began = time.perf_counter()
            self.search(question.text, 5)
            took.append(time.perf_counter() - began)
        return statistics.median(took)

    async def alone_s(self, jobs: Sequence[Job]) -> float:
        """Return the seconds of a request when no other runs."""
        async with self.engine("sequential") as engine:
            results = [await engine.run(graph, text) for graph, text in jobs]
        return statistics.fmean(result.seconds for result in results)

    def engine(self, policy: str, in_flight: int = 256) -> WorkflowEngine:
        """Return an engine that works by a policy."""
        llm = EmulatedLLM(
            Author(self.questions), speed=self.speed, capacity_tokens=200_000, chunk_tokens=16
        )
        options = POLICIES[policy]
        if options is None:
            most = 1 if policy == "sequential" else in_flight
            return WorkflowEngine(
                llm, CallableRetriever(self.search), options=WorkflowOptions(max_in_flight=most)
            )
        index = IVFIndex(self.index)
        hot = None
        if policy == "+ hot tier":
            hot = HotTier(index, int(TIER_SHARE * index.size * index.code_size))
        retriever = VectorRetriever(
            index, self.collection.block, self.collection.embedder, nprobe=self.nprobe, hot=hot
        )
        return WorkflowEngine(llm, retriever, options=replace(options, max_in_flight=in_flight))

    async def measure(
        self,
        policy: str,
        jobs: Sequence[Job],
        rate: float | None,
        seed: int,
        in_flight: int = 256,
    ) -> Measured:
        """Run jobs that arrive at a rate; None is all at once."""
        chooser = random.Random(seed)
        waits = [chooser.expovariate(rate) if rate else 0.0 for _ in jobs]
        async with self.engine(policy, in_flight) as engine:
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
        return Measured(
            statistics.fmean(result.seconds for result in results),
            total_s,
            tuple(str(result) for result in results),
        )


RATES = (0.33, 0.67, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0)
"""Requests a second, in multiples of what sequential execution sustains."""

SUSTAINED = 4.0
"""A policy sustains a rate if a request takes at most this many times as long as it does alone."""

BASE = "naive async"
LOADS = (1, 4, 16)
COMPARED = ("sequential", BASE, "all")
PLOT = "workflow_loads.png"


@dataclass(frozen=True)
class Sweep:
    """A policy at rising rates."""

    # the measurements, by the multiple of what sequential execution sustains
    by_rate: dict[float, list[Measured]]
    offline: list[Measured]  # all requests at once

    def mean_s(self, rate: float) -> float:
        """Return the mean latency at a rate."""
        return statistics.median(measured.mean_s for measured in self.by_rate[rate])

    def to(self, other: Sweep, rate: float) -> float:
        """Return how many times as long a request takes as with another policy, at a rate."""
        pairs = zip(self.by_rate[rate], other.by_rate[rate], strict=True)
        return statistics.median(mine.mean_s / its.mean_s for mine, its in pairs)

    def sustained(self, latency_s: float) -> float:
        """Return the highest rate with no more than a mean latency, between those measured."""
        best, before = 0.0, 0.0
        for rate in self.by_rate:
            mean_s = self.mean_s(rate)
            if mean_s > latency_s:
                if best:
                    best += (latency_s - before) / (mean_s - before) * (rate - best)
                break
            best, before = rate, mean_s
        return best


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nprobe", type=int, action="append", help="128 unless given")
    parser.add_argument(
        "--workflow",
        type=mix_of,
        action="append",
        help=f"{', '.join(GRAPHS)}, or some in equal parts: hyde+irg, mix (all)",
    )
    parser.add_argument("--policy", choices=POLICIES, action="append")
    parser.add_argument("--requests", type=int, default=100, help="a quarter below a rate of 1")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rate", type=float, action="append", help="of sequential's; several")
    parser.add_argument("--loads", action="store_true", help=f"{LOADS} at a time, not rates")
    parser.add_argument("--vectors", type=int, default=VECTORS, help="of the index")
    parser.add_argument("--speed", type=float, help="of the model, instead of a chosen one")
    options = parser.parse_args()
    console = Console(width=190)
    collection = Collection(options.vectors)
    questions = make_questions(collection.passages, options.requests)
    for nprobe in options.nprobe or (128,):
        bench = Bench(nprobe, questions, collection)
        retrieval_s = bench.retrieval_s()
        bench.speed = options.speed or RATIO * GENERATION_S / retrieval_s
        console.print(
            f"nprobe {nprobe}: a search takes {1e3 * retrieval_s:.1f} ms; the model runs "
            f"{bench.speed:.1f} times faster than its rates"
        )
        chosen = options.workflow or [*map(mix_of, GRAPHS), mix_of("mix")]
        if options.loads:
            jobs_of = {
                "+".join(one) if len(one) < 5 else "mix": jobs_for(one, questions) for one in chosen
            }
            compare_loads(bench, jobs_of, options.repeats, console)
            continue
        rates = sorted(options.rate or RATES)
        policies = options.policy or list(POLICIES)
        for names in chosen:
            jobs = jobs_for(names, questions)
            alone_s = asyncio.run(bench.alone_s(jobs[:40]))
            sweeps = sweep(bench, policies, jobs, alone_s, rates, options.repeats)
            title = f"{'+'.join(names)}, nprobe {nprobe}"
            console.print(latencies(title, sweeps, alone_s))


def jobs_for(names: Sequence[str], questions: Sequence[Question]) -> list[Job]:
    """Return a job for each question, of the workflows in turn."""
    return [
        (GRAPHS[names[number % len(names)]](), question.text)
        for number, question in enumerate(questions)
    ]


def mix_of(text: str) -> tuple[str, ...]:
    """Return the workflows that a text names."""
    names = tuple(GRAPHS) if text == "mix" else tuple(text.split("+"))
    for name in names:
        if name not in GRAPHS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(GRAPHS)}, mix")
    return names


def sweep(
    bench: Bench,
    policies: Sequence[str],
    jobs: Sequence[Job],
    alone_s: float,
    rates: Sequence[float],
    repeats: int,
) -> dict[str, Sweep]:
    """Measure policies in turns, each at rising rates until it is too slow, and all at once.

    The sweep ends when the base is too slow, as there is nothing to compare with then.
    """
    runs: dict[str, dict[float, list[Measured]]] = {name: defaultdict(list) for name in policies}
    offline: dict[str, list[Measured]] = defaultdict(list)
    goes_on = set(policies)
    answers: dict[bool, tuple[str, ...]] = {}

    def measure(policy: str, rate: float | None, seed: int) -> Measured:
        is_short = rate is not None and rate < 1.0
        some = jobs[: len(jobs) // 4] if is_short else jobs
        per_s = None if rate is None else rate / alone_s
        measured = asyncio.run(bench.measure(policy, some, per_s, seed))
        if measured.answers != answers.setdefault(is_short, measured.answers):
            sys.exit(f"{policy} gave other answers than {policies[0]}")
        return measured

    for rate in rates:
        if rate >= 1.0:
            goes_on.discard("sequential")
        going = [policy for policy in policies if policy in goes_on]
        for seed in range(repeats):
            for policy in random.Random(seed).sample(going, len(going)):
                runs[policy][rate].append(measure(policy, rate, seed))
        for policy in going:
            means = [measured.mean_s for measured in runs[policy][rate]]
            if statistics.median(means) > SUSTAINED * alone_s:
                goes_on.discard(policy)
        if BASE in policies and BASE not in goes_on:
            break
    for seed in range(repeats):
        for policy in policies:
            if policy != "sequential" or not seed:  # it is slow, and its time hardly varies
                offline[policy].append(measure(policy, None, seed))
    return {
        policy: Sweep(
            runs[policy],
            offline[policy],
        )
        for policy in policies
    }


def latencies(title: str, sweeps: dict[str, Sweep], alone_s: float) -> Table:
    """Return a table of mean latencies, how they compare with the base, and sustained rates."""
    rates = sorted({rate for sweep in sweeps.values() for rate in sweep.by_rate})
    table = new_table(
        f"{title}: {1e3 * alone_s:.0f} ms alone, so sequential execution makes "
        f"{1 / alone_s:.1f}/s at most; mean ms at multiples of that, and how many times {BASE}'s",
        ("policy",),
        (*(f"x{rate:g}" for rate in rates), "at 2x alone", "offline s"),
    )
    base = sweeps.get(BASE)
    for policy, done in sweeps.items():
        cells = []
        for rate in rates:
            cell = f"{1e3 * done.mean_s(rate):.0f}" if rate in done.by_rate else ""
            if cell and base and policy != BASE and rate in base.by_rate:
                cell += f" {done.to(base, rate):.2f}"
            cells.append(cell)
        total_s = statistics.median(measured.total_s for measured in done.offline)
        table.add_row(policy, *cells, f"x{done.sustained(2 * alone_s):.2f}", f"{total_s:.2f}")
    return table


def compare_loads(bench: Bench, jobs: dict[str, list[Job]], repeats: int, console: Console) -> None:
    """Compare policies with so many requests at a time, in turns; print a table and draw it."""
    means: dict[tuple[str, int, str], list[float]] = defaultdict(list)
    for name, of_name in jobs.items():
        answers: set[tuple[str, ...]] = set()
        for load in LOADS:
            some = of_name[: 4 + 2 * load]
            for seed in range(repeats):
                for policy in random.Random(seed).sample(COMPARED, len(COMPARED)):
                    measured = asyncio.run(bench.measure(policy, some, None, seed, load))
                    means[name, load, policy].append(measured.total_s / len(some))
                    answers.add(measured.answers[:6])
        if len(answers) > 1:
            sys.exit(f"{name}: the policies gave different answers")
    title = (
        "ms a request, so many requests at a time; in brackets what plain sequential takes of it"
    )
    table = new_table(title, ("workflow", "policy"), map(str, LOADS))
    figure = Figure(figsize=(3 * len(jobs), 3), layout="constrained")
    for name, axes in zip(jobs, figure.subplots(1, len(jobs), squeeze=False)[0], strict=True):
        for policy in COMPARED:
            took = [1e3 * statistics.median(means[name, load, policy]) for load in LOADS]
            plain = [1e3 * statistics.median(means[name, load, COMPARED[0]]) for load in LOADS]
            cells = [f"{one:.0f} ({of / one:.2f}x)" for one, of in zip(took, plain, strict=True)]
            table.add_row(name, policy, *cells, end_section=policy == COMPARED[-1])
            axes.plot(LOADS, took, marker="o", label=policy)
        axes.set(title=name, xlabel="requests at a time", xscale="log", ylim=(0, None))
    axes.legend()
    figure.savefig(PLOT)
    console.print(table, f"drawn in {PLOT}")


if __name__ == "__main__":
    main()
