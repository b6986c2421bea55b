"""The part of `ctxreuse bench` that asks an engine whether its answers stay as good."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ctxreuse.cli.terminal import progress, say, show
from ctxreuse.errors import InvalidRequestError

if TYPE_CHECKING:
    from ctxreuse.measure.bench import BenchConfig

ANSWER_TOKENS = 32
"""The longest answer of an engine, where nothing else is said."""

_PANEL = "Part quality"

QuestionSets = Annotated[
    list[str] | None,
    typer.Option(
        help="xquad-k5, xquad-k15, locomo-k20, mtrag-k5 of the folder of public data, or "
        "python-reference; several may be given. Without it, all of the folder.",
        rich_help_panel=_PANEL,
    ),
]
MainQuestions = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Questions a set that the main arms are asked: as retrieved, reordered, "
        "annotated, best first (annotated or not), de-duplicated. Without it 612, 200, 200 and "
        "100 of the four sets, and all of others.",
        rich_help_panel=_PANEL,
    ),
]
OtherQuestions = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Questions a set that the other arms are asked. Without it, 100.",
        rich_help_panel=_PANEL,
    ),
]
ArmNames = Annotated[
    list[str] | None,
    typer.Option(
        help="An arm to compare with the answers as retrieved; several may be given: "
        "reordered; annotated; best first (reordered behind the best block, keep_best); best "
        "first, annotated; de-duplicated; as retrieved, again (how far answers differ by "
        "themselves); reversed; shuffled (how much order matters at all to this model); "
        "annotated: NAME. "
        "Without it, all.",
        rich_help_panel=_PANEL,
    ),
]
AnnotationTemplates = Annotated[
    list[str] | None,
    typer.Option(
        "--template",
        "--templates",
        help="A further annotation to try, with {labels}, {numbers}, {top} or {best} in it; "
        "several may be given. It stands before the question, or where it says: 'after the "
        "question: Best first: {numbers}', 'before the documents: ...'.",
        rich_help_panel=_PANEL,
    ),
]
SystemText = Annotated[
    str | None,
    typer.Option(
        help="A system text instead of the set's own, which asks for the shortest phrase.",
        rich_help_panel=_PANEL,
    ),
]
Precision = Annotated[
    float | None,
    typer.Option(
        help="End an arm once its change of F1 is known to plus or minus this, such as 0.02.",
        rich_help_panel=_PANEL,
    ),
]
Hours = Annotated[
    float | None,
    typer.Option(help="Stop after so many hours; run it again to go on.", rich_help_panel=_PANEL),
]
AnswersPath = Annotated[
    Path | None,
    typer.Option(
        help="The file that keeps answers by prompt, for the next run to go on from. Without "
        "it, answers.jsonl in the output's folder.",
        rich_help_panel=_PANEL,
    ),
]
Concurrency = Annotated[
    int | None,
    typer.Option(min=1, help="Prompts at a time; 4 if not given.", rich_help_panel=_PANEL),
]


class BenchPart(StrEnum):
    """A part of a benchmark as the command knows them: those that are simulated, and quality."""

    policies = "policies"
    k = "k"
    sessions = "sessions"
    ablations = "ablations"
    quality = "quality"


def check_parts(parts: Sequence[BenchPart], own: Mapping[str, Any], others: Sequence[str]) -> None:
    """Check that part quality stands alone, and that options belong to what is measured.

    Args:
        parts: What is measured; where empty, everything but quality.
        own: Options of part quality that were given.
        others: Options of the other parts that were given.

    Raises:
        InvalidRequestError: Something does not belong together.
    """
    if BenchPart.quality in parts:
        if set(parts) != {BenchPart.quality}:
            raise InvalidRequestError(
                "--part quality stands alone; run the other parts by themselves"
            )
        if others:
            written = "; what it measures is written to quality.json" if "--json" in others else ""
            raise InvalidRequestError(f"{', '.join(others)}: not with --part quality{written}")
    elif own:
        names = ", ".join(_OPTIONS.get(name, f"--{name.replace('_', '-')}") for name in own)
        raise InvalidRequestError(f"{names}: only with --part quality")


_OPTIONS = {"question_sets": "--question-set", "arms": "--arm", "templates": "--template"}
"""Options that are not called as what they become."""


def bench_quality(
    bench_config: BenchConfig, data: Path | None, own: Mapping[str, Any], output: Path
) -> None:
    """Measure whether answers stay as good, and show and write what came out."""
    from ctxreuse.measure.quality import QualityConfig, quality_output, run, sets_to_ask

    if bench_config.base_url is None:
        raise InvalidRequestError(
            "part quality asks an engine; start one (make vllm) and name it: --base-url "
            "http://127.0.0.1:8000/v1"
        )
    options = dict(own)
    if data is None and not bench_config.dataset and os.environ.get("CTXREUSE_DATA"):
        data = Path(os.environ["CTXREUSE_DATA"])
    config = QualityConfig(
        sets=sets_to_ask(bench_config, data, options.pop("question_sets", ()), progress),
        base_url=bench_config.base_url,
        model=bench_config.model,
        api_key=bench_config.api_key,
        seed=bench_config.seed,
        answers=options.pop("answers", output / "answers.jsonl"),
        **options,
    )
    say(f"ctxreuse: asking {', '.join(one.name for one in config.sets)}")
    results = run(config, say)
    show(quality_output(results))
    results.write(output / "quality.json")
    say(f"ctxreuse: wrote {output / 'quality.json'}")
    if results.exit_code:
        raise typer.Exit(results.exit_code)
