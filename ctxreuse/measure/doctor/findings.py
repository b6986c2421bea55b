"""What was found, whether it is well, and what to do: a line for each check."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

from ctxreuse.planning.savings import counted

Figure: TypeAlias = int | float | str | None
NO_ENGINE = "see engine: it does not answer"
_INDENT = " " * 11
_LONGEST = 2_000


class Verdict(StrEnum):
    """What a check comes to; `UNKNOWN` is what cannot be told from outside."""

    OK = "ok"
    PROBLEM = "problem"
    UNKNOWN = "not known"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check has found."""

    check: str
    verdict: Verdict
    found: str
    remedy: str = ""
    figures: Mapping[str, Figure] = field(default_factory=dict)


def finding_lines(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield what a terminal shows of all checks: those that lack the same in one line."""
    for one in findings:
        if one.remedy != NO_ENGINE:
            yield f"{one.verdict:<9}  {one.check}: {printable(one.found)}"
            if one.remedy:
                yield f"{_INDENT}{printable(one.remedy)}"
    if need := _need(findings):
        yield f"{Verdict.UNKNOWN:<9}  {need}"


def _need(findings: Sequence[Finding]) -> str:
    number = sum(one.remedy == NO_ENGINE for one in findings)
    return f"{number} checks need an engine that answers" if number else ""


def is_healthy(findings: Sequence[Finding]) -> bool:
    """Return whether no check has found a problem."""
    return all(one.verdict is not Verdict.PROBLEM for one in findings)


def verdict(findings: Sequence[Finding]) -> str:
    """Return what all checks come to, in one sentence, and what to do first."""
    problems = [one for one in findings if one.verdict is Verdict.PROBLEM]
    unknown = [one for one in findings if one.verdict is Verdict.UNKNOWN]
    names = ", ".join(one.check for one in unknown if one.remedy != NO_ENGINE)
    open_ = f"; not known from outside: {names}" if names else ""
    open_ += f"; {need}" if (need := _need(findings)) else ""
    checks = counted(len(findings), "check")
    if problems or len(unknown) == len(findings):
        words = f"No verdict, since {checks} found nothing to judge"
        if problems:
            words = f"{counted(len(problems), 'problem')} in {checks}{open_}"
        first = (problems or unknown)[0]
        return f"{words}. Next, {first.check}: {printable(first.remedy or first.found)}"
    steps = (f"Next, {one.check}: {printable(one.remedy)}" for one in unknown if one.remedy)
    return f"No problem found in {checks}{open_}. {next(steps, 'Next: nothing to mend here.')}"


def findings_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return findings as a JSON object."""
    return {
        "verdict": verdict(findings),
        "healthy": is_healthy(findings),
        "checks": [{**asdict(one), "remedy": one.remedy or None} for one in findings],
    }


def printable(text: str) -> str:
    """Return a text that can be printed: names and words come from servers and traces."""
    return "".join(sign if sign.isprintable() else "?" for sign in text[:_LONGEST])
