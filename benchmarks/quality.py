"""Whether reordering, annotations and de-duplication change a model's answers, and how.

Run with `make bench-quality`; most of an hour on two cores. Answers are greedy. Scores are SQuAD's,
with 95% bootstrap intervals; differences are paired: the same questions under both policies. A
better model than the small one of `make vllm` tells more: --base-url names its server.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from answering import Answers, Policy, Questions, ask
from rich.console import Console
from rich.table import Table
from server import ServerInfo, argument_parser, describe_server, progress_bar
from shared import data_folder, read_named_trace, right_answers

from ctxreuse.evaluation.results.answers import Interval, bootstrap_interval, exact_match, token_f1
from ctxreuse.evaluation.traces.trace_files import TraceRequest

AS_RETRIEVED = Policy("as retrieved", "none")
REORDERED = Policy("reordered", annotate=False)
ANNOTATED = Policy("reordered, annotated")
DEDUPLICATED = Policy("reordered, annotated, de-duplicated", deduplicate=True)

XQUAD_ANSWER_TOKENS = 32
MTRAG_ANSWER_TOKENS = 64
ROOM_FOR_A_TURN = 200  # tokens of question, labels, annotation, answer and chat template


@dataclass(frozen=True, slots=True)
class Scores:
    """How good the answers of a policy are; None where there was nothing to score.

    Attributes:
        policy: The policy.
        f1: F1 of the questions with a known right answer.
        exact: Share of these that are answered exactly.
        f1_change: Their F1 less that of the answers as retrieved.
        exact_change: The same for exact answers.
        agreement: F1 of all answers, with the answer as retrieved as the right one.
    """

    policy: Policy
    f1: Interval | None
    exact: Interval | None
    f1_change: Interval | None
    exact_change: Interval | None
    agreement: Interval | None


def main() -> int:
    """Ask, score and print; return 1 if a request failed."""
    parser = argument_parser(__doc__)
    parser.add_argument("--questions", type=int, default=150, help="of XQuAD (default: 150)")
    parser.add_argument("--conversations", type=int, default=60, help="of MT-RAG (default: 60)")
    parser.add_argument(
        "--concurrency", type=int, default=4, help="conversations at a time (default: 4)"
    )
    options = parser.parse_args()
    data = data_folder("xquad", "mtrag", folder=options.data)
    server = describe_server(options.base_url, options.model)
    console = Console(width=130)
    results, has_failed = [], False
    for questions in (
        _xquad(data, options.questions),
        _mtrag(data, options.conversations, server.context_tokens),
    ):
        if not questions.conversations:
            continue
        answers = asyncio.run(_ask(server, questions, options.concurrency))
        scores = _scores(questions, answers)
        has_failed = has_failed or any(of.failures for of in answers)
        results.append(_as_json(questions, answers, scores))
        if not options.json:
            _print_scores(console, server, questions, answers, scores)
    if options.json:
        print(json.dumps({"server": asdict(server), "data_sets": results}, indent=2))
    return int(has_failed)


def _xquad(data: Path, number: int) -> Questions:
    trace = read_named_trace(data, "xquad_k5")[0][:number]
    return Questions(
        name="XQuAD k=5",
        conversations=tuple((traced,) for traced in trace),
        references=right_answers(data, "xquad", "id"),
        answer_tokens=XQUAD_ANSWER_TOKENS,
        policies=(AS_RETRIEVED, REORDERED, ANNOTATED),
    )


def _mtrag(data: Path, number: int, context_tokens: int) -> Questions:
    """Take the first conversations of two turns or more that fit the model as retrieved."""
    conversations: dict[str | int | None, list[TraceRequest]] = {}
    for traced in read_named_trace(data, "mtrag_k5")[0]:
        conversations.setdefault(traced.conversation_id, []).append(traced)
    fitting = [
        tuple(turns)
        for turns in conversations.values()
        if len(turns) >= 2 and sum(map(_most_tokens, turns)) <= context_tokens
    ]
    return Questions(
        name="MT-RAG k=5",
        conversations=tuple(fitting[:number]),
        references=right_answers(data, "mtrag", "id"),
        answer_tokens=MTRAG_ANSWER_TOKENS,
        policies=(AS_RETRIEVED, REORDERED, ANNOTATED, DEDUPLICATED),
    )


def _most_tokens(traced: TraceRequest) -> int:
    return sum(block.tokens or 0 for block in traced.blocks) + ROOM_FOR_A_TURN


async def _ask(server: ServerInfo, questions: Questions, concurrency: int) -> list[Answers]:
    """Return the answers under each policy."""
    with progress_bar() as progress:
        total = questions.turns * len(questions.policies)
        task = progress.add_task(questions.name, total=total)
        return await ask(server, questions, concurrency, partial(progress.advance, task))


def _scores(questions: Questions, answers: Sequence[Answers]) -> list[Scores]:
    """Score what every policy answered."""
    common = [
        question for question in answers[0].texts if all(question in of.texts for of in answers)
    ]
    known = [question for question in common if question in questions.references]
    f1 = [
        [token_f1(of.texts[question], questions.references[question]) for question in known]
        for of in answers
    ]
    exact = [
        [exact_match(of.texts[question], questions.references[question]) for question in known]
        for of in answers
    ]
    return [
        Scores(
            policy=of.policy,
            f1=_interval(f1[number]),
            exact=_interval(exact[number]),
            f1_change=_interval(_differences(f1[number], f1[0])),
            exact_change=_interval(_differences(exact[number], exact[0])),
            agreement=_interval(
                [token_f1(of.texts[question], [answers[0].texts[question]]) for question in common]
            ),
        )
        for number, of in enumerate(answers)
    ]


def _differences(scores: Sequence[float], plain: Sequence[float]) -> list[float]:
    return [score - before for score, before in zip(scores, plain, strict=True)]


def _interval(scores: Sequence[float]) -> Interval | None:
    return bootstrap_interval(scores) if scores else None


def _print_scores(
    console: Console,
    server: ServerInfo,
    questions: Questions,
    answers: Sequence[Answers],
    scores: Sequence[Scores],
) -> None:
    table = Table(title=f"{questions.name}, {questions.turns} questions, {server.model}")
    table.show_lines = True
    table.add_column("policy")
    for column in (
        "answered",
        "other\nprompt",
        "F1",
        "exact match",
        "F1, change",
        "exact, change",
        "F1 with answer\nas retrieved",
    ):
        table.add_column(column, justify="right")
    for of, score in zip(answers, scores, strict=True):
        is_base = of is answers[0]
        table.add_row(
            of.policy.name,
            str(len(of.texts)),
            str(len(of.changed)),
            _cell(score.f1),
            _cell(score.exact),
            "" if is_base else _cell(score.f1_change, "+"),
            "" if is_base else _cell(score.exact_change, "+"),
            "" if is_base else _cell(score.agreement),
        )
    console.print(table)
    asked = {traced.request_id for turns in questions.conversations for traced in turns}
    console.print(
        f"F1 and exact match: on the {len(asked & questions.references.keys())} questions with a "
        "reference answer. F1 with the answer as retrieved: on all questions; it says how much "
        "answers change, not which is better. other prompt: questions whose blocks were moved or "
        "left out"
    )
    if any(len(turns) > 1 for turns in questions.conversations):
        console.print(
            f"{len(questions.conversations)} conversations of two turns or more, the first that "
            f"fit {server.context_tokens:,} tokens as retrieved; the model's own answers are "
            "replayed as history"
        )
    for of in answers:
        for reason, number in of.failures.items():
            console.print(f"[red]{of.policy.name}: {number} not answered:[/] {reason}")
    console.print()


def _cell(interval: Interval | None, sign: str = "") -> str:
    if interval is None:
        return "-"
    return f"{interval.mean:{sign}.3f}\n[{interval.low:{sign}.3f}, {interval.high:{sign}.3f}]"


def _as_json(
    questions: Questions, answers: Sequence[Answers], scores: Sequence[Scores]
) -> dict[str, Any]:
    return {
        "name": questions.name,
        "conversations": len(questions.conversations),
        "questions": questions.turns,
        "policies": [
            {
                **asdict(score),
                "answers": of.texts,
                "changed": sorted(of.changed, key=str),
                "failures": dict(of.failures),
            }
            for of, score in zip(answers, scores, strict=True)
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
