"""Chain-of-Agents over emulated engines: who reads what, and what that costs.

Everything but the engines is real: the chain, its prompts, the pool. The engines run in virtual
time, with the project's common rates, continuous batching and the simulated prefix cache. All
questions are asked at once. Reads the folder named by CTXREUSE_DATA.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table
from virtual_client import Ledger, VirtualClient

from chain_of_agents import ChainOfAgents, ChainPrompts
from ctxreuse import ReusePlanner
from ctxreuse.assignment import Document, rendezvous_order
from ctxreuse.evaluation.traces import TraceRequest, read_corpus, read_trace
from ctxreuse.evaluation.virtual_time import run_in_virtual_time
from ctxreuse.planner import Strategy
from ctxreuse.serving import EnginePool
from ctxreuse.serving.rates import NOTE_TOKENS

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
        """Nothing is known of agents."""


class Random(RoundRobin):
    """Each document goes to any agent."""

    def __init__(self) -> None:
        super().__init__()
        self._random = random.Random(0)

    def assign(
        self, documents: Sequence[Document], agents: Sequence[int], engines: Mapping[int, str]
    ) -> list[int]:
        """Return the agent of each document."""
        return [self._random.choice(agents) for _ in documents]


class HashByDocument(RoundRobin):
    """Each document goes to the agent that its hash says."""

    def assign(
        self, documents: Sequence[Document], agents: Sequence[int], engines: Mapping[int, str]
    ) -> list[int]:
        """Return the agent of each document."""
        return [int(rendezvous_order(document.key, agents)[0]) for document in documents]


@dataclass(frozen=True, slots=True)
class Policy:
    """A way to assign documents, and to order what waits.

    Attributes:
        name: For the table.
        assignment: Makes what assigns documents; None is the chain's own.
        strategy: How calls that wait are planned.
        concurrency: Calls under way at an engine; the others wait to be planned.
    """

    name: str
    assignment: Callable[[], RoundRobin] | None
    strategy: Strategy = "none"
    concurrency: int = 1_000_000


POLICIES = (
    Policy("round-robin", RoundRobin),
    Policy("random", Random),
    Policy("hash by document", HashByDocument),
    Policy("ctxreuse, as they come", None),
    Policy("ctxreuse", None, "reuse", 256),
)


def main() -> int:
    """Print the tables; return 1 if there is no data."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--questions", type=int, help="only so many of each trace")
    parser.add_argument("--trace", choices=TRACES, action="append", help="only this one")
    parser.add_argument("--engines", type=int, choices=ENGINES, action="append")
    parser.add_argument("--cache", type=int, choices=CAPACITIES, action="append")
    options = parser.parse_args()
    folder = os.environ.get("CTXREUSE_DATA")
    if not folder:
        print("agents: set CTXREUSE_DATA to a folder with traces; nothing measured")
        return 1
    console = Console(width=150)
    for name in options.trace or TRACES:
        data, depth = name.split("_")
        corpus = read_corpus(str(Path(folder) / data / "corpus.jsonl"))
        trace = read_trace(str(Path(folder) / data / f"trace_{depth}.jsonl"), corpus)
        questions = questions_of(trace[: options.questions])
        _compare(
            console,
            TRACES[name],
            questions,
            options.engines or ENGINES,
            options.cache or CAPACITIES,
        )
    return 0


def questions_of(trace: Sequence[TraceRequest]) -> list[dict[str, object]]:
    """Return a trace as what a chain is asked; each turn stands on its own."""
    return [{"question": one.query, "documents": one.blocks} for one in trace]


def measure(
    policy: Policy, questions: Sequence[dict[str, object]], replicas: int, capacity_tokens: int
) -> Ledger:
    """Return what a chain cost its engines when it was asked all questions at once."""
    return run_in_virtual_time(_ask_all(policy, questions, replicas, capacity_tokens))


async def _ask_all(
    policy: Policy, questions: Sequence[dict[str, object]], replicas: int, capacity_tokens: int
) -> Ledger:
    ledger = Ledger()
    chain = chain_on(policy, replicas, capacity_tokens, ledger)[0]
    await chain.abatch(list(questions))
    return ledger


def chain_on(
    policy: Policy, replicas: int, capacity_tokens: int, ledger: Ledger
) -> tuple[ChainOfAgents, EnginePool, dict[str, VirtualClient]]:
    """Return a chain on emulated engines, its pool, and the engines."""
    engines = {
        name: VirtualClient(name, capacity_tokens, PROMPTS.manager, ledger)
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
    title: str,
    questions: Sequence[dict[str, object]],
    engines: Sequence[int],
    capacities: Sequence[int],
) -> None:
    table = Table(title=f"{title}: {len(questions):,} questions, {AGENTS} agents, all at once")
    for column in ("engines x cache", "policy"):
        table.add_column(column)
    for column in (
        "prefilled",
        "hit ratio",
        "worker calls/s",
        "to round-robin",
        "makespan s",
        "to hash",
        "max/mean tokens",
        "computed in s",
    ):
        table.add_column(column, justify="right")
    for replicas in engines:
        for capacity in capacities:
            ledgers: dict[str, Ledger] = {}
            for policy in track(
                POLICIES, f"{title}, {replicas} x {capacity:,}", console=console, transient=True
            ):
                began = time.perf_counter()
                ledger = ledgers[policy.name] = measure(policy, questions, replicas, capacity)
                computed_s = time.perf_counter() - began
                rate = ledger.worker_calls / ledger.last_worker_s
                first = ledgers["round-robin"]
                hashed = ledgers.get("hash by document")
                table.add_row(
                    f"{replicas} x {capacity:,}" if policy is POLICIES[0] else "",
                    policy.name,
                    f"{ledger.total.prefilled_tokens:,}",
                    f"{ledger.total.hit_ratio:.3f}",
                    f"{rate:.1f}",
                    f"{rate / (first.worker_calls / first.last_worker_s):.2f}",
                    f"{ledger.last_s:.1f}",
                    "" if hashed is None else f"{ledger.last_s / hashed.last_s:.2f}",
                    f"{ledger.imbalance:.2f}",
                    f"{computed_s:.1f}",
                )
            table.add_section()
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
