"""Chain-of-Agents on real engines: 20 questions in both modes, with cached tokens and answers.

Run with `make bench-agents`, which starts two small servers without a GPU; --base-url names others.
Each mode is asked the same questions, under a `cache_salt` of its own; documents are XQuAD's.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter
from typing import Any
from uuid import uuid4

from rich.console import Console
from rich.table import Table

from agents import usage_of
from chain_of_agents import Answer, ChainOfAgents
from chain_of_agents.requests import Mode
from ctxreuse.errors import shown_url
from public_data.quality.scoring import token_f1
from server import argument_parser, describe_server, warm_up
from shared import data_folder, read_named_trace, right_answers

QUESTIONS = 20
DOCUMENTS = 5
NOTE_TOKENS = 48
ANSWER_TOKENS = 48
MODES: tuple[Mode, ...] = ("sequential", "parallel")


def main() -> int:
    """Ask, and print what came of it."""
    options = _parser().parse_args()
    data = data_folder("xquad", folder=options.data)
    urls = options.base_urls or [options.base_url]
    console = Console(width=140)
    for url in urls:
        server = describe_server(url, options.model)
        asyncio.run(warm_up(server))
        console.print(
            f"{shown_url(server.base_url)}: {server.model}, cache of {server.cache_tokens:,} tokens"
        )
    trace = read_named_trace(data, f"xquad_k{DOCUMENTS}")[0][: options.questions]
    right = right_answers(data, "xquad", "question")
    questions = [{"question": one.query, "documents": one.blocks} for one in trace]
    answers = {mode: _ask(console, urls, options.model, mode, questions) for mode in MODES}
    table = Table(title="answers")
    for column in ("question", "right", *MODES):
        table.add_column(column)
    for number, one in enumerate(trace):
        given = (
            f"{answers[mode][number].trace.cached_tokens:,} of "
            f"{answers[mode][number].trace.prompt_tokens:,} cached: "
            f"{' '.join(answers[mode][number].split())}"
            for mode in MODES
        )
        table.add_row(one.query, "; ".join(right.get(one.query, [])), *given, end_section=True)
    console.print(table)
    for mode in MODES:
        scores = [
            token_f1(answer, right[question.query])
            for question, answer in zip(trace, answers[mode], strict=True)
            if question.query in right
        ]
        console.print(f"{mode}: F1 {sum(scores) / len(scores):.3f} over {len(scores)} questions")
    return 0


def _ask(
    console: Console,
    urls: list[str],
    model: str | None,
    mode: Mode,
    questions: list[dict[str, Any]],
) -> list[Answer]:
    """Ask all questions in one mode, print what it cost, and return the answers."""
    chain = ChainOfAgents(
        urls,
        mode=mode,
        note_tokens=NOTE_TOKENS,
        answer_tokens=ANSWER_TOKENS,
        concurrency=4,  # two cores are no more than that
        timeout_s=None,
        model=model,
        params={"temperature": 0, "extra_body": {"cache_salt": uuid4().hex}},
    )
    began = time.perf_counter()
    answers = chain.batch(questions)
    seconds = time.perf_counter() - began
    steps = [step for answer in answers for step in answer.trace.steps]
    for role in ("worker", "manager"):
        calls = [step for step in steps if step.role == role]
        usage = usage_of(calls)
        console.print(
            f"{mode}, {role}s: {len(calls)} calls, "
            f"{usage.cached_tokens:,} of {usage.prompt_tokens:,} prompt tokens cached "
            f"({usage.hit_ratio:.3f})"
        )
    outcomes = Counter(step.outcome for step in steps)
    engines = Counter(step.replica for step in steps)
    console.print(f"{mode}: {seconds:.0f} s; {dict(outcomes)}; calls by engine {dict(engines)}")
    return answers


def _parser() -> argparse.ArgumentParser:
    parser = argument_parser(__doc__)
    parser.add_argument("--questions", type=int, default=QUESTIONS, help="how many are asked")
    parser.add_argument("base_urls", nargs="*", help="several servers, instead of --base-url")
    return parser


if __name__ == "__main__":
    sys.exit(main())
