"""`ctxreuse demo`: the same questions in every order, through the prefix-cache simulator."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from ctxreuse.context.blocks import ContextBlock
from ctxreuse.evaluation.demo import demo_output
from ctxreuse.evaluation.demo.corpus import python_reference_blocks
from ctxreuse.evaluation.demo.questions import QUESTIONS
from ctxreuse.evaluation.demo.retrieval import retrieve
from ctxreuse.evaluation.replay.outcomes import Outcome, Replay
from ctxreuse.evaluation.replay.policies import POLICIES
from ctxreuse.evaluation.traces.trace_files import Corpus, TraceRequest
from ctxreuse.serving.emulation.word_tokenizer import WordTokenizer

BLOCKS_PER_QUESTION = 10
SMALL_CACHE_TOKENS = 20_000
SYSTEM = "You answer questions about the Python language from the documents given."


@dataclass(frozen=True, slots=True)
class Compared:
    """What one policy reached with an unlimited cache, and with one of `SMALL_CACHE_TOKENS`."""

    unlimited: Outcome
    small: Outcome


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
        replay = Replay(trace, corpus, tokenizer, lambda: progress.advance(replaying))
        outcomes = [
            Compared(
                *(
                    replay.run(policy, deduplicate=deduplicate, capacity_tokens=capacity)
                    for capacity in (None, SMALL_CACHE_TOKENS)
                )
            )
            for deduplicate in (False, True)
            for policy in POLICIES
        ]
    demo_output.print_setting(console, corpus, trace)
    demo_output.print_table(console, outcomes, SMALL_CACHE_TOKENS)
    demo_output.print_example(console, corpus, outcomes)
    plot = output / "hit_ratio.png"
    demo_output.plot_hit_ratio(plot, outcomes, SMALL_CACHE_TOKENS)
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


def _results(outcomes: list[Compared]) -> list[dict[str, object]]:
    return [
        {
            "policy": {
                name: getattr(compared.unlimited.policy, name)
                for name in ("name", "strategy", "mode")
            },
            "deduplicated": compared.unlimited.deduplicated,
            "planning_ms_per_request": round(compared.unlimited.planning_ms, 4),
            **{
                name: {
                    "prompt_tokens": outcome.total.prompt_tokens,
                    "cached_tokens": outcome.total.cached_tokens,
                    "hit_ratio": round(outcome.total.hit_ratio, 4),
                }
                for name, outcome in (
                    ("unlimited_cache", compared.unlimited),
                    ("small_cache", compared.small),
                )
            },
        }
        for compared in outcomes
    ]
