"""What the quality benchmark found: scores of each arm, paired differences, tables and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import ctxreuse
from ctxreuse.context.files import write_text
from ctxreuse.measure.results.tables import Interval, bootstrap_interval
from ctxreuse.measure.table import Shown, Table
from public_data.quality.question_sets import QuestionId
from public_data.quality.scoring import (
    answer_contained,
    exact_match,
    normalize_answer,
    token_f1,
)

INTERRUPTED = "interrupted"
ENGINE_GONE = "the engine no longer answers"

_FORMAT = "ctxreuse-quality-1"


@dataclass(frozen=True, slots=True)
class Scored:
    """One answer of an arm."""

    answer: str
    f1: float
    exact: float
    contained: float
    is_other_prompt: bool = False
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    seconds: float = 0.0
    is_cut_off: bool | None = None

    @classmethod
    def of(cls, answer: str, references: Sequence[str], **fields: Any) -> Scored:
        """Score an answer."""
        return cls(
            answer,
            token_f1(answer, references),
            exact_match(answer, references),
            answer_contained(answer, references),
            **fields,
        )


@dataclass(slots=True)
class ArmAnswers:
    """The answers of one arm, and why others are missing."""

    name: str
    annotation: str = ""
    scored: dict[QuestionId, Scored] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)

    def differences(self, base: ArmAnswers, score: str) -> list[float]:
        """Return how much better each answer is than another arm's, over their common questions."""
        return [
            getattr(one, score) - getattr(base.scored[question], score)
            for question, one in self.scored.items()
            if question in base.scored
        ]


@dataclass(frozen=True, slots=True)
class SetResult:
    """What came out for one question set."""

    name: str
    system: str
    answer_tokens: int
    arms: tuple[ArmAnswers, ...]

    @property
    def base(self) -> ArmAnswers:
        """The arm that the others are compared with."""
        return self.arms[0]


@dataclass(frozen=True, slots=True)
class QualityResults:
    """What a quality benchmark found."""

    model: str
    sets: tuple[SetResult, ...]
    stopped: str
    is_complete: bool
    settings: Mapping[str, Any]
    asked: int = 0
    seconds: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """The command's: 130 after Ctrl-C, 1 if questions were not answered, else 0."""
        if self.stopped == INTERRUPTED:
            return 130
        has_failed = any(arm.failures for one in self.sets for arm in one.arms)
        return int(has_failed or self.stopped.startswith(ENGINE_GONE))

    def as_json(self) -> dict[str, Any]:
        """Return all of it, each answer included, for a file."""
        return {
            "format": _FORMAT,
            "version": ctxreuse.__version__,
            "model": self.model,
            "stopped": self.stopped,
            "is_complete": self.is_complete,
            "settings": dict(self.settings),
            "asked": self.asked,
            "seconds": round(self.seconds, 1),
            "notes": list(self.notes),
            "sets": [_set_json(one) for one in self.sets],
        }

    def write(self, path: Path) -> None:
        """Write all of it as JSON."""
        write_text(path, json.dumps(self.as_json(), indent=1) + "\n")


def _set_json(result: SetResult) -> dict[str, Any]:
    return {
        "name": result.name,
        "system": result.system,
        "answer_tokens": result.answer_tokens,
        "arms": [
            {
                "name": arm.name,
                "annotation": arm.annotation,
                "questions": len(arm.scored),
                "scores": {
                    score: asdict(interval)
                    for score in _SCORES
                    if (interval := mean_score(arm, score)) is not None
                },
                "changes": {
                    score: asdict(interval)
                    for score in _SCORES
                    if (interval := change(arm, result.base, score)) is not None
                },
                "failures": dict(arm.failures),
                "answers": [
                    {"question": question, **asdict(one)} for question, one in arm.scored.items()
                ],
            }
            for arm in result.arms
        ],
    }


_SCORES = ("f1", "exact", "contained")


def mean_score(arm: ArmAnswers, score: str) -> Interval | None:
    """Return an arm's mean score; None if nothing was answered."""
    values = [getattr(one, score) for one in arm.scored.values()]
    return bootstrap_interval(values) if values else None


def change(arm: ArmAnswers, base: ArmAnswers, score: str = "f1") -> Interval | None:
    """Return the paired difference of two arms' scores; None without common questions."""
    differences = arm.differences(base, score)
    return bootstrap_interval(differences) if differences else None


# what the command shows


def quality_output(results: QualityResults) -> Iterator[Shown]:
    """Yield lines and tables of the results."""
    for result in results.sets:
        yield ""
        yield f"{result.name}: {len(result.base.scored):,} questions, {results.model}"
        yield f'system text: "{result.system}"'
        if not result.base.scored:
            yield "nothing was answered"
            yield from _failures(result)
            continue
        yield _score_table(result)
        yield _prompt_table(result)
        yield from _odd_answers(result)
        yield from _failures(result)
    yield ""
    yield (
        "Changes are paired: the same questions, as retrieved and so, with 95% bootstrap intervals "
        "over questions. An interval around 0 means that no difference was seen, not that there is "
        "none: one as large as its ends may be there."
    )
    yield (
        "Arms find each other's prompts in the engine's cache, so hit ratios and seconds here say "
        "what asking took, not what an order saves; that is measured without --part quality."
    )
    yield from results.notes
    yield f"Stopped: {results.stopped}."


def _score_table(result: SetResult) -> Table:
    head = ("", "questions", "F1", "exact", "contained", "F1, change", "exact, change")
    rows = []
    for arm in result.arms:
        means = [mean_score(arm, score) for score in _SCORES]
        changes = ["", ""]
        if arm is not result.base:
            changes = [_change_cell(change(arm, result.base, score)) for score in _SCORES[:2]]
        cells = ("-" if mean is None else f"{mean.mean:.3f}" for mean in means)
        rows.append((arm.name, f"{len(arm.scored):,}", *cells, *changes))
    return Table("How good the answers are", head, tuple(rows))


def _prompt_table(result: SetResult) -> Table:
    head = (
        "",
        "other\nprompts",
        "other\nanswers",
        "prompt\ntokens",
        "more",
        "hit\nratio",
        "s each",
    )
    rows = []
    for arm in result.arms:
        common = [question for question in arm.scored if question in result.base.scored]
        differ = [
            normalize_answer(arm.scored[one].answer)
            != normalize_answer(result.base.scored[one].answer)
            for one in common
        ]
        rows.append(
            (
                arm.name,
                f"{sum(arm.scored[one].is_other_prompt for one in common):,}",
                "" if arm is result.base else f"{sum(differ):,}",
                *_token_cells(arm, result.base, common),
                f"{fmean(one.seconds for one in arm.scored.values()):.2f}" if arm.scored else "-",
            )
        )
    return Table("What the model read, and what it cost when it was asked", head, tuple(rows))


def _token_cells(
    arm: ArmAnswers, base: ArmAnswers, common: Sequence[QuestionId]
) -> tuple[str, str, str]:
    """Return mean prompt tokens, how many more these are than as retrieved, and the hit ratio."""
    pairs = [
        (ours, plain)
        for one in common
        if (ours := arm.scored[one].prompt_tokens) is not None
        and (plain := base.scored[one].prompt_tokens) is not None
    ]
    told = [
        (one.prompt_tokens, one.cached_tokens)
        for one in arm.scored.values()
        if one.prompt_tokens and one.cached_tokens is not None
    ]
    ratio = (
        f"{sum(cached for _, cached in told) / sum(all_ for all_, _ in told):.3f}" if told else "-"
    )
    if not pairs:
        return "-", "-", ratio
    more = fmean(ours - plain for ours, plain in pairs)
    return (
        f"{fmean(ours for ours, _ in pairs):,.0f}",
        "" if arm is base else f"{more:+.1f}",
        ratio,
    )


def _change_cell(interval: Interval | None) -> str:
    if interval is None:
        return ""
    return f"{interval.mean:+.3f}\n[{interval.low:+.3f}, {interval.high:+.3f}]"


def _odd_answers(result: SetResult) -> Iterator[str]:
    """Say how many answers measure the limit of their tokens, and not the order of the blocks."""
    answers = [one for arm in result.arms for one in arm.scored.values()]
    cut_off = sum(one.is_cut_off is True for one in answers)
    empty = sum(not one.answer.strip() for one in answers)
    if cut_off:
        yield (
            f"{result.name}: {cut_off:,} of {len(answers):,} answers were cut off at "
            f"{result.answer_tokens:,} tokens; give them room (--answer-tokens)"
        )
    if empty:
        yield (
            f"{result.name}: {empty:,} of {len(answers):,} answers are empty, as those are of a "
            "model that is still thinking at its last token; give it room (--answer-tokens), or "
            "have it not think"
        )


def _failures(result: SetResult) -> Iterator[str]:
    for arm in result.arms:
        for reason, number in arm.failures.items():
            yield f"{result.name}, {arm.name}: {number:,} not answered: {reason}"
