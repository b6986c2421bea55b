"""`ctxreuse demo`: the same questions in every order, through the prefix-cache simulator."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from ctxreuse.blocks import ContextBlock
from ctxreuse.cache import CacheUsage, PrefixCacheSimulator
from ctxreuse.demo import report
from ctxreuse.demo.corpus import python_reference_blocks
from ctxreuse.demo.questions import QUESTIONS
from ctxreuse.demo.retrieval import retrieve
from ctxreuse.demo.words import WordTokenizer
from ctxreuse.evaluation.planfile import PlannedRequest
from ctxreuse.evaluation.replay import Mode, plan_trace
from ctxreuse.evaluation.simulate import simulate_tokens
from ctxreuse.evaluation.traces import Corpus, TraceRequest
from ctxreuse.planner import ReusePlanner, Strategy

BLOCKS_PER_QUESTION = 10
SMALL_CACHE_TOKENS = 20_000
SYSTEM = "You answer questions about the Python language from the documents given."


@dataclass(frozen=True, slots=True)
class Policy:
    """One way to order the requests' blocks."""

    name: str
    strategy: Strategy
    mode: Mode


POLICIES = (
    Policy("as retrieved", "none", "online"),
    Policy("papers' order, online", "paper", "online"),
    Policy("papers' order, batch", "paper", "offline"),
    Policy("ctxreuse, online", "reuse", "online"),
    Policy("ctxreuse, batch", "reuse", "offline"),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one policy reached.

    Attributes:
        policy: How the blocks were ordered.
        deduplicated: Whether blocks that a conversation shows already were left out.
        planned: The plans in execution order, for an unlimited cache.
        unlimited: Usage of each request with an unlimited cache.
        small: Usage of each request with a cache of `SMALL_CACHE_TOKENS`, which the planner knows.
        planning_ms: Planning time a request, in milliseconds.
    """

    policy: Policy
    deduplicated: bool
    planned: list[PlannedRequest]
    unlimited: list[CacheUsage]
    small: list[CacheUsage]
    planning_ms: float


def run_demo(output: Path, console: Console) -> None:
    """Run the demo: print its tables and write `hit_ratio.png` and `results.json`.

    Args:
        output: Folder for what it writes; made if it is not there.
        console: Where it prints.

    Raises:
        MissingExtraError: If the extra `demo` is not installed.
    """
    output.mkdir(parents=True, exist_ok=True)
    tokenizer = WordTokenizer()
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as progress:
        retrieving = progress.add_task("retrieving", total=len(QUESTIONS))
        corpus, trace = _retrieve_all()
        progress.advance(retrieving, len(QUESTIONS))
        replaying = progress.add_task(
            "planning and replaying", total=2 * len(POLICIES) * 4 * len(trace)
        )
        outcomes = [
            _replay(
                policy, deduplicate, corpus, trace, tokenizer, lambda: progress.advance(replaying)
            )
            for deduplicate in (False, True)
            for policy in POLICIES
        ]
    report.print_setting(console, corpus, trace)
    report.print_table(console, outcomes, SMALL_CACHE_TOKENS)
    report.print_example(console, corpus, outcomes)
    plot = output / "hit_ratio.png"
    report.plot_hit_ratio(plot, outcomes, SMALL_CACHE_TOKENS)
    results = output / "results.json"
    results.write_text(json.dumps(_results(outcomes), indent=1) + "\n", encoding="utf-8")
    console.print(f"\nplot: {plot}\nresults: {results}")


def _retrieve_all() -> tuple[Corpus, list[TraceRequest]]:
    tokenizer = WordTokenizer()
    blocks = [
        ContextBlock(id=block.id, text=block.text, tokens=len(tokenizer.encode(block.text).ids))
        for block in python_reference_blocks()
    ]
    found = retrieve(
        [block.text for block in blocks],
        [question.text for question in QUESTIONS],
        BLOCKS_PER_QUESTION,
    )
    trace = [
        TraceRequest(
            request_id=f"question-{number}",
            query=question.text,
            blocks=tuple(blocks[position] for position in positions),
            conversation_id=question.conversation,
            turn=question.turn,
            system=SYSTEM,
        )
        for number, (question, positions) in enumerate(zip(QUESTIONS, found, strict=True), start=1)
    ]
    return {block.id: block for block in blocks}, trace


def _replay(
    policy: Policy,
    deduplicate: bool,
    corpus: Corpus,
    trace: list[TraceRequest],
    tokenizer: WordTokenizer,
    advance: Callable[[], object],
) -> Outcome:
    def planned(capacity: int | None) -> list[PlannedRequest]:
        planner = ReusePlanner(capacity_tokens=capacity, deduplicate=deduplicate)
        return plan_trace(
            trace, planner, policy.mode, policy.strategy, conversations=True, advance=advance
        )

    def served(plans: list[PlannedRequest], capacity: int | None) -> list[CacheUsage]:
        usages = []
        for usage in simulate_tokens(plans, corpus, PrefixCacheSimulator(capacity), tokenizer):
            usages.append(usage)
            advance()
        return usages

    started = time.perf_counter()
    for_unlimited = planned(None)
    planning_ms = (time.perf_counter() - started) * 1000 / len(trace)
    for_small = planned(SMALL_CACHE_TOKENS)
    return Outcome(
        policy=policy,
        deduplicated=deduplicate,
        planned=for_unlimited,
        unlimited=served(for_unlimited, None),
        small=served(for_small, SMALL_CACHE_TOKENS),
        planning_ms=planning_ms,
    )


def _results(outcomes: list[Outcome]) -> list[dict[str, object]]:
    return [
        {
            "policy": asdict(outcome.policy),
            "deduplicated": outcome.deduplicated,
            "planning_ms_per_request": round(outcome.planning_ms, 4),
            **{
                name: {
                    "prompt_tokens": total.prompt_tokens,
                    "cached_tokens": total.cached_tokens,
                    "hit_ratio": round(total.hit_ratio, 4),
                }
                for name, total in (
                    ("unlimited_cache", sum(outcome.unlimited, CacheUsage())),
                    ("small_cache", sum(outcome.small, CacheUsage())),
                )
            },
        }
        for outcome in outcomes
    ]
