"""What `ctxreuse lint` found, as a table, as lines and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from ctxreuse.measure.doctor.findings import counted, printable
from ctxreuse.measure.results.prices import Prices
from ctxreuse.measure.table import Shown, Table

_MILLION = 1_000_000


class LintFinding(NamedTuple):
    """What one check has found in a trace."""

    check: str
    request_id: str | int
    number: int
    label: str
    requests: int
    found: str
    tokens: int
    cost_tokens: int
    share: float
    remedy: str


@dataclass(frozen=True, slots=True)
class LintReport:
    """What was found in a trace, the most expensive first."""

    findings: Sequence[LintFinding]
    requests: int
    prompt_tokens: int
    cache: str
    unknown: Sequence[str] = ()
    prices: Prices | None = None

    @property
    def verdict(self) -> str:
        """All this in a sentence, and what to do first."""
        of = f"{counted(self.requests)} with {self.prompt_tokens:,} prompt tokens ({self.cache})"
        if not self.findings:
            return f"Nothing found in {of}."
        words, first = counted(len(self.findings), "finding"), self.findings[0]
        return f"{words} in {of}. First: {first.check}, {first.share:.1%} of the input's price."

    def _money(self, finding: LintFinding) -> float | None:
        """Return what a finding costs, at the price of computed tokens."""
        if self.prices is None:
            return None
        return finding.cost_tokens * self.prices.input / _MILLION

    def as_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        prices = {} if self.prices is None else {"prices": asdict(self.prices)}
        return {
            "verdict": self.verdict,
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "cache": self.cache,
            "findings": [
                {**one._asdict(), "share": round(one.share, 6), "money": self._money(one)}
                for one in self.findings
            ],
            "unknown": list(self.unknown),
            **prices,
        }

    def output(self) -> Iterator[Shown]:
        """Yield what a terminal shows."""
        yield self.verdict
        if self.findings:
            money = [] if self.prices is None else [self.prices.currency]
            yield Table(
                "What it costs",
                ("check", "requests", "tokens", "share", *money),
                tuple(map(self._row, self.findings)),
            )
        if self.prices is not None:
            yield f"prices of {self.prices.date}: {self.prices.source}"
        for one in self.findings:
            label = f" “{printable(one.label)}”" if one.label else ""
            yield f"{one.check}, request {one.number:,}{label}: {printable(one.found)}"
            yield f"  -> {one.remedy}"
        for words in self.unknown:
            yield f"not known: {words}"

    def _row(self, one: LintFinding) -> tuple[str, ...]:
        money = self._money(one)
        cells = [] if money is None else [f"{money:.4g}"]
        return (one.check, f"{one.requests:,}", f"{one.tokens:,}", f"{one.share:.1%}", *cells)
