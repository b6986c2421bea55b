"""Chain-of-Agents over emulated engines: who reads what, and what that costs.

Everything but the engines is real: the chain, its prompts, the pool. The engines run in virtual
time, with the project's common rates, continuous batching and the simulated prefix cache. All
questions are asked at once. Each policy runs twice: for the workers' throughput managers are
answered at once and for nothing; the makespan is that of whole chains. Reads the folder named by
CTXREUSE_DATA.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial

from rich.console import Console
from rich.progress import track

from chain_of_agents import ChainOfAgents, ChainPrompts, Step
from chain_of_agents.segments import Packing
from ctxreuse import ReusePlanner
from ctxreuse.cache import CacheUsage
from ctxreuse.planner import Strategy
from ctxreuse.serving import EnginePool
from ctxreuse.serving.pool.placement import Document, rendezvous_order
from shared import data_folder, new_table, read_named_trace
from virtual_client import NOTE_TOKENS, Ledger, VirtualClient
from virtual_clock import run_in_virtual_time

AGENTS = 15
TRACES = {"mtrag_k10": "MT-RAG k=10", "xquad_k15": "XQuAD k=15", "locomo_k100": "LoCoMo k=100"}
ENGINES = (1, 3, 15)
CAPACITIES = (20_000, 100_000)
PROMPTS = ChainPrompts()


class RoundRobin:
    """Each document goes to the next agent."""

    def __init__(self) -> None:
        self._next = 0

    def assign(
        self, documents: Sequence[Document], agents: Sequence[int], engines: Mapping[int, str]
    ) -> list[int]:
        """Return the agent of each document."""
        first, self._next = self._next, self._next + len(documents)
        return [agents[(first + number) % len(agents)] for number in range(len(documents))]

    def forget_agent(self, agent: int) -> None:
        """Keep nothing of agents, so there is nothing to forget."""


class Random(RoundRobin):
    """Each document goes to an agent at random."""

    def __init__(self) -> None:
        super().__init__()
        self._random = random.Random(0)

    def assign(
        self, documents: Sequence[Document], agents: Sequence[int], engines: Mapping[int, str]
    ) -> list[int]:
        """Return the agent of each document."""
        return [self._random.choice(agents) for _ in documents]


class HashByDocument(RoundRobin):
    """Each document goes to the agent that its hash names."""

    def assign(
        self, documents: Sequence[Document], agents: Sequence[int], engines: Mapping[int, str]
    ) -> list[int]:
        """Return the agent of each document."""
        return [int(rendezvous_order(document.key, agents)[0]) for document in documents]


@dataclass(frozen=True, slots=True)
class Policy:
    """A way to assign documents, and to order what waits."""

    name: str  # for the table
    # makes what assigns documents; None is the chain's own
    assignment: Callable[[], RoundRobin] | None
    strategy: Strategy = "none"  # how calls that wait are planned
    concurrency: int = 1_000_000  # calls under way at an engine; the others wait to be planned


POLICIES = (
    Policy("round-robin", RoundRobin),
    Policy("random", Random),
    Policy("hash by document", HashByDocument),
    Policy("ctxreuse, as they come", None),
    Policy("ctxreuse", None, "reuse", 256),
)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--questions", type=int, help="only the first of each trace")
    parser.add_argument("--trace", choices=TRACES, action="append", help="only this one")
    parser.add_argument("--engines", type=int, choices=ENGINES, action="append")
    parser.add_argument("--cache", type=int, choices=CAPACITIES, action="append")
    options = parser.parse_args()
    data_folder("mtrag", "xquad", "locomo")
    console = Console(width=150)
    with ProcessPoolExecutor(os.cpu_count()) as processes:
        for name in options.trace or TRACES:
            _compare(
                console,
                processes,
                name,
                options.questions,
                options.engines or ENGINES,
                options.cache or CAPACITIES,
            )


@cache
def read_questions(name: str) -> list[dict[str, object]]:
    """Return a trace as questions for a chain; each turn stands on its own."""
    trace, _ = read_named_trace(data_folder(), name)
    return [{"question": one.query, "documents": one.blocks} for one in trace]


def usage_of(steps: Iterable[Step]) -> CacheUsage:
    """Return the tokens of all calls of a chain."""
    usages = (CacheUsage(step.prompt_tokens or 0, step.cached_tokens or 0) for step in steps)
    return sum(usages, CacheUsage())


@dataclass(frozen=True, slots=True)
class Job:
    """One run."""

    trace: str
    questions: int | None  # how many of its questions are asked; None asks all
    policy: int  # the policy's place among `POLICIES`
    engines: int  # how many engines there are
    capacity_tokens: int  # what the cache of each holds
    workers_alone: bool  # whether managers are answered for nothing


def measure(job: Job) -> Ledger:
    """Return what a chain cost its engines when it was asked all questions at once."""
    return run_in_virtual_time(_ask_all(job, read_questions(job.trace)[: job.questions]))


async def _ask_all(job: Job, questions: Sequence[dict[str, object]]) -> Ledger:
    ledger = Ledger()
    policy = POLICIES[job.policy]
    packing: Packing = "packed" if job.trace == "locomo_k100" else "single"
    chain, *_ = chain_on(
        policy, job.engines, job.capacity_tokens, ledger, job.workers_alone, packing
    )
    await chain.abatch(list(questions))
    return ledger


def chain_on(
    policy: Policy,
    replicas: int,
    capacity_tokens: int,
    ledger: Ledger,
    workers_alone: bool = False,
    packing: Packing = "single",
) -> tuple[ChainOfAgents, EnginePool, dict[str, VirtualClient]]:
    """Return a chain on emulated engines, its pool, and the engines."""
    engines = {
        name: VirtualClient(name, capacity_tokens, PROMPTS.manager, ledger, workers_alone)
        for name in (f"e{number}" for number in range(replicas))
    }
    pool = EnginePool(
        {name: partial(_same, client) for name, client in engines.items()},
        planner=ReusePlanner(annotate=False),
        strategy=policy.strategy,
        concurrency=policy.concurrency,
    )
    chain = ChainOfAgents(
        llm=pool,
        workers=AGENTS,
        packing=packing,
        mode="parallel",
        prompts=PROMPTS,
        note_tokens=2 * NOTE_TOKENS,  # estimates may be above what the engine counts
        context_window=32_768,
        timeout_s=None,
        assignment=policy.assignment,
    )
    return chain, pool, engines


def _same(client: VirtualClient) -> VirtualClient:
    return client


def _compare(
    console: Console,
    processes: Executor,
    name: str,
    questions: int | None,
    engines: Sequence[int],
    capacities: Sequence[int],
) -> None:
    jobs = [
        Job(name, questions, policy, number, capacity, workers_alone)
        for number in engines
        for capacity in capacities
        for policy in range(len(POLICIES))
        for workers_alone in (True, False)
    ]
    done = track(
        processes.map(measure, jobs), TRACES[name], len(jobs), console=console, transient=True
    )
    ledgers = dict(zip(jobs, done, strict=True))
    asked = next(iter(ledgers.values())).chains
    table = new_table(
        f"{TRACES[name]}: {asked:,} questions, {AGENTS} agents, all at once",
        ("engines x cache", "policy"),
        (
            "workers: prefilled",
            "hit ratio",
            "max/mean tokens",
            "calls/s",
            "to round-robin",
            "whole chains: prefilled",
            "max/mean tokens",
            "makespan, s",
            "to hash",
        ),
    )
    names = [policy.name for policy in POLICIES]
    first, hashed = names.index("round-robin"), names.index("hash by document")
    for job in jobs:
        if not job.workers_alone:
            continue
        chains = replace(job, workers_alone=False)
        workers, whole = ledgers[job], ledgers[chains]
        rate = workers.worker_calls_per_s
        makespan_of_hash_s = ledgers[replace(chains, policy=hashed)].last_s
        table.add_row(
            f"{job.engines} x {job.capacity_tokens:,}" if not job.policy else "",
            POLICIES[job.policy].name,
            f"{workers.total.prefilled_tokens:,}",
            f"{workers.total.hit_ratio:.3f}",
            f"{workers.imbalance:.2f}",
            f"{rate:.1f}",
            f"{rate / ledgers[replace(job, policy=first)].worker_calls_per_s:.2f}",
            f"{whole.total.prefilled_tokens:,}",
            f"{whole.imbalance:.2f}",
            f"{whole.last_s:.1f}",
            f"{whole.last_s / makespan_of_hash_s:.2f}",
            end_section=job.policy == len(POLICIES) - 1,
        )
    console.print(table)


if __name__ == "__main__":
    main()
