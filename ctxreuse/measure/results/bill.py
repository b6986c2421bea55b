"""The bill of a hosted cache: what the same requests cost, sent in several ways."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Self

from ctxreuse.measure.replay.policies import AS_SENT, TODAY
from ctxreuse.measure.replay.run_result import RunBill, RunResult
from ctxreuse.measure.results.prices import Prices
from ctxreuse.measure.results.results_file import Results
from ctxreuse.rules.billed_tokens import BilledTokens
from ctxreuse.rules.cache_rules import CacheRules, profile_spec

_THOUSAND = 1_000
_ALIKE = 0.005


@dataclass(frozen=True, slots=True)
class BillRow:
    """What one way to send the requests costs."""

    policy: str
    deduplicated: bool
    tokens: BilledTokens
    bill: RunBill
    to_uncached: float
    money: float | None

    def name(self, bill: Bill) -> str:
        """Return what tables call it."""
        names = (bill.base, self.policy)  # what is sent today has no marks
        return "retrieved, marked" if names == (TODAY.name, AS_SENT.name) else self.policy


@dataclass(frozen=True, slots=True)
class Bill:
    """The bill of a trace."""

    cache: CacheRules
    base: str
    requests: int
    rows: tuple[BillRow, ...]
    median_tokens: int
    long_enough: int
    prices: Prices | None = None
    output_tokens: int | None = None

    @classmethod
    def of(cls, results: Results) -> Self | None:
        """Return the bill of results; None where an engine has the cache, or nothing was sent."""
        runs = [run for run in results.part() if run.bill is not None]
        base = base_run(runs)
        if base is None:
            return None
        least = results.cache.least_tokens
        rows = tuple(_row(run, base, results) for run in runs)
        return cls(
            results.cache,
            base.policy,
            len(base.prompt_tokens),
            rows,
            round(median(base.prompt_tokens)) if base.prompt_tokens else 0,
            sum(tokens >= least for tokens in base.prompt_tokens),
            results.prices,
            results.output_tokens,
        )

    @property
    def lives(self) -> list[str]:
        """The times to live that something was written for; else the one that is written with."""
        written = {life for row in self.rows for life in row.tokens.written}
        known = [one.name for one in self.cache.times_to_live if one.name in written]
        return known or [self.cache.time_to_live.name]

    @property
    def has_paid_writes(self) -> bool:
        """Whether a written token costs more than an uncached one."""
        return self.cache.write_factor > 1

    @property
    def least_reads(self) -> float:
        """How often a written token has to be read on average, for writing to pay; 0 where free."""
        saving = 1 - self.cache.read_factor
        return max(0.0, self.cache.write_factor - 1) / saving if saving > 0 else float("inf")

    @property
    def is_too_short(self) -> bool:
        """Whether most prompts are shorter than what is kept."""
        return 2 * self.long_enough < self.requests

    def break_even(self) -> Iterator[str]:
        """Yield in words when writing pays, and from which request on it did."""
        least, cache = self.least_reads, self.cache
        if not self.has_paid_writes:
            yield (
                f"Reading costs {cache.read_factor:g} times an uncached token, writing nothing "
                "extra."
            )
            return
        pays = "it never pays"
        if least != float("inf"):
            pays = (
                f"it pays if a written token is read {least:.2f} times on average; a single mark, "
                f"if it is read {_times(int(least + 1e-9) + 1)}"
            )
        yield (
            f"Writing costs {cache.write_factor:g} times an uncached token, reading "
            f"{cache.read_factor:g}: {pays}."
        )
        written = [row for row in self.rows if row.tokens.written]
        from_when = [
            f"{row.name(self)}{', de-duplicated' if row.deduplicated else ''}: "
            + ("never" if row.bill.pays_from is None else f"{row.bill.pays_from:,}")
            for row in written
        ]
        if from_when:
            yield f"Request from which all so far cost less than uncached: {'; '.join(from_when)}."

    def as_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        least = self.least_reads
        return {
            "cache": profile_spec(self.cache),
            "profile": asdict(self.cache),
            "requests": self.requests,
            "median_prompt_tokens": self.median_tokens,
            "prompts_of_the_minimum": self.long_enough,
            "output_tokens": self.output_tokens,
            "least_reads_of_a_written_token": None if least == float("inf") else round(least, 6),
            "prices": None if self.prices is None else self.prices.as_json(),
            "rows": [
                {
                    "policy": row.policy,
                    "deduplicated": row.deduplicated,
                    "prompt_tokens": row.tokens.prompt_tokens,
                    "uncached_tokens": row.tokens.uncached,
                    "read_tokens": row.tokens.read,
                    "written_tokens": dict(row.tokens.written),
                    "never_read_tokens": row.bill.never_read,
                    "bill_to_uncached": round(row.to_uncached, 6),
                    "pays_from_request": row.bill.pays_from,
                    "money_per_1000_requests": None if row.money is None else round(row.money, 6),
                }
                for row in self.rows
            ],
        }


def base_run(runs: Sequence[RunResult]) -> RunResult | None:
    """Return the run that others are compared with: as sent today, or else as retrieved."""
    for policy in (TODAY, AS_SENT):
        for run in runs:
            if run.policy == policy.name and not run.deduplicated:
                return run
    return None


def price_lines(bill: Bill) -> Iterator[str]:
    """Yield what the money of a bill is from."""
    prices = bill.prices
    if prices is None:
        return
    named = {"input": prices.input, "cached_input": prices.cached_input}
    named |= {f"written_input {life}".rstrip(): prices.written_input[life] for life in bill.lives}
    words = [
        f"{name} {price:g}{' (derived)' if name in prices.derived else ''}"
        for name, price in named.items()
    ]
    words.append("output not said" if prices.output is None else f"output {prices.output:g}")
    derived = "; derived: not said there, but from the cache profile's factors"
    yield (
        f"Prices of {prices.date} from {prices.source}, in {prices.currency} for a million tokens: "
        f"{', '.join(words)}{derived if any(name in prices.derived for name in named) else ''}."
    )
    cache, life = bill.cache, bill.cache.time_to_live.name
    if prices.input:
        read, write = (
            one / prices.input for one in (prices.cached_input, prices.written_input[life])
        )
        pays_to_write = bill.has_paid_writes and abs(write - cache.write_factor) > _ALIKE
        if abs(read - cache.read_factor) > _ALIKE or pays_to_write:
            yield (
                f"By these prices reading costs {read:.3g} times the input and writing "
                f"{write:.3g}; plans and input bill go by the profile's {cache.read_factor:g} and "
                f"{cache.write_factor:g}."
            )


def _row(run: RunResult, base: RunResult, results: Results) -> BillRow:
    bill = run.bill
    assert bill is not None, "only runs with a bill"
    uncached, requests, prices = base.total.prompt_tokens, len(run.prompt_tokens), results.prices
    money = None
    if prices is not None:
        paid = prices.money(run.billed, results.output_tokens or 0)
        money = _THOUSAND * paid / requests if requests else 0.0
    return BillRow(
        run.policy,
        run.deduplicated,
        run.billed,
        bill,
        run.billed.bill(results.cache) / uncached if uncached else 1.0,
        money,
    )


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")
