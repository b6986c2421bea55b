"""Losing one of 15 engines in the middle of a run: what is lost, what moves, what it costs.

The trace is asked three and a half times, some questions at a time; one engine breaks all its
connections after one and a half. Compared are hit ratios over whole repetitions of the trace: the
one before the loss, the one right after it, and the next. Reads the folder named by CTXREUSE_DATA.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from agents import POLICIES, chain_on, read_questions, usage_of
from chain_of_agents import Answer, Trace
from shared import data_folder
from virtual_client import Ledger
from virtual_clock import run_in_virtual_time

ENGINES = 15
CAPACITY_TOKENS = 20_000
UNDER_WAY = 32
LOST = "e7"


@dataclass(frozen=True, slots=True)
class Run:
    """A run over the repeated trace."""

    answers: list[Answer]  # each question's answer, in the order in which they were asked
    ledger: Ledger  # what the engines answered


def main() -> int:
    """Print what the loss did; return 1 if a request was lost or doubled."""
    data_folder("mtrag")
    questions = read_questions("mtrag_k10")
    period = len(questions)
    asked = (4 * questions)[: 7 * period // 2]
    lost_after = 3 * period // 2
    whole, broken = (run_in_virtual_time(_ask(asked, at)) for at in (len(asked) + 1, lost_after))
    console = Console(width=110)
    console.print(
        f"MT-RAG k=10, {len(asked):,} questions, {UNDER_WAY} at a time, on {ENGINES} engines with "
        f"{CAPACITY_TOKENS:,} tokens; {LOST} is lost after {lost_after:,}"
    )
    exact = _report_answers(console, asked, whole, broken)
    for name, run in (("without a loss", whole), ("with the loss", broken)):
        moved, of = _moved(run.answers, lost_after, period)
        console.print(
            f"{name}: {moved} of {of} documents have another main engine in the repetition after "
            f"than in the one before: {moved / of:.3f} (2/15 is {2 / 15:.3f})"
        )
    for name, first in (("before", period // 2), ("after", lost_after), ("next", 5 * period // 2)):
        ratios = [
            usage_of(
                step
                for answer in run.answers[first : first + period]
                for step in answer.trace.workers
            ).hit_ratio
            for run in (whole, broken)
        ]
        console.print(
            f"hit ratio of the repetition {name}: {ratios[1]:.4f} (without a loss {ratios[0]:.4f})"
        )
    return 0 if exact else 1


async def _ask(asked: Sequence[dict[str, object]], lost_after: int) -> Run:
    ledger = Ledger()
    chain, _, engines = chain_on(POLICIES[-1], ENGINES, CAPACITY_TOKENS, ledger)

    def lose(ended: int, _: int) -> None:
        if ended == lost_after:
            engines[LOST].stop()

    answers = await chain.abatch(list(asked), {"max_concurrency": UNDER_WAY}, progress=lose)
    return Run(answers, ledger)


def _report_answers(
    console: Console, asked: Sequence[Mapping[str, Any]], whole: Run, broken: Run
) -> bool:
    """Print whether every call was answered once; return whether that is so."""
    expected = sum(len(question["documents"]) for question in asked) + len(asked)
    failed = sum(len(answer.trace.failures) for answer in broken.answers)
    same_calls = whole.ledger.worker_prompts == broken.ledger.worker_prompts
    answered = broken.ledger.calls
    console.print(
        f"{len(broken.answers):,} questions answered; {answered:,} of {expected:,} calls answered, "
        f"{failed} reported as failed; workers' calls the same as without a loss, each as often: "
        f"{same_calls}"
    )
    return answered == expected and same_calls and not failed


def _moved(answers: Sequence[Answer], lost_after: int, period: int) -> tuple[int, int]:
    """Return how many documents have moved, and how many there are before and after."""
    before = _main_engines([answer.trace for answer in answers[lost_after - period : lost_after]])
    after = _main_engines([answer.trace for answer in answers[lost_after : lost_after + period]])
    both = before.keys() & after.keys()
    return sum(before[one] != after[one] for one in both), len(both)


def _main_engines(traces: Sequence[Trace]) -> dict[object, str]:
    """Return for each document the engine that has read it most often."""
    read_by: defaultdict[object, Counter[str]] = defaultdict(Counter)
    for trace in traces:
        for step in trace.workers:
            for document in step.documents:
                read_by[document][step.replica] += 1
    return {document: counts.most_common(1)[0][0] for document, counts in read_by.items()}


if __name__ == "__main__":
    sys.exit(main())
