"""What runs save against others, and the bill of a hosted cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any, NamedTuple, Self

from ctxreuse.measure.replay.policies import AS_SENT, TODAY
from ctxreuse.measure.replay.simulate import RunResult
from ctxreuse.measure.results.prices import Prices
from ctxreuse.measure.results.results import Results
from ctxreuse.rules.billed_tokens import BilledTokens
from ctxreuse.rules.cache_rules import CacheRules, profile_spec

LEAST_SHARE = 0.01  # of the computed tokens; a smaller saving is not worth a change of a program

_ALIKE = 0.005
_TIMES = {1: "once", 2: "twice"}


class Saving(NamedTuple):
    """What a run saves against prompts as they are sent without it, for one cache."""

    run: RunResult
    before: BilledTokens
    after: BilledTokens
    cache: CacheRules

    @property
    def requests(self) -> int:
        """The requests that are compared."""
        return len(self.run.prompt_tokens)

    @property
    def tokens(self) -> float:
        """How much smaller the bill is, in uncached tokens; of an engine, tokens computed less."""
        return self.before.bill(self.cache) - self.after.bill(self.cache)

    @property
    def share(self) -> float:
        """The same as a share of the bill before."""
        before = self.before.bill(self.cache)
        return self.tokens / before if before else 0.0

    @property
    def is_worth_it(self) -> bool:
        """Whether it is large enough to do something for: more than caching nothing would save."""
        return self.factor(self.after) <= 1 - LEAST_SHARE and self.share >= LEAST_SHARE

    def factor(self, tokens: BilledTokens) -> float:
        """Return the bill of some tokens as a multiple of the prompts before, none cached."""
        uncached = self.before.prompt_tokens
        return tokens.bill(self.cache) / uncached if uncached else 1.0

    def a_thousand(self, amount: float) -> float:
        """Return an amount of all requests for a thousand of them."""
        return 1_000 * amount / self.requests if self.requests else 0.0

    def money(self, prices: Prices) -> float:
        """Return what the prompts of a thousand requests cost less."""
        return self.a_thousand(prices.money(self.before) - prices.money(self.after))


def savings_of(runs: Sequence[RunResult], cache: CacheRules) -> Iterator[Saving]:
    """Yield what each run saves, against that as retrieved with a cache of the same size."""
    for run in runs:
        base = base_run([one for one in runs if one.capacity_tokens == run.capacity_tokens])
        if base is not None and base.request_ids:  # an engine does not answer all
            common = set(base.request_ids) & set(run.request_ids)
            base, run = base.only(common), run.only(common)
        if base is not None:
            yield Saving(run, base.billed, run.billed, cache)


class Bill(NamedTuple):
    """The bill of a trace."""

    cache: CacheRules
    base: RunResult
    rows: Sequence[Saving]
    prices: Prices | None = None
    output_tokens: int | None = None

    @classmethod
    def of(cls, results: Results) -> Self | None:
        """Return the bill of results; None where an engine has the cache, or nothing was sent."""
        runs = [run for run in results.part() if run.written is not None]
        base = base_run(runs)
        if base is None:
            return None
        rows = list(savings_of(runs, results.cache))
        return cls(results.cache, base, rows, results.prices, results.output_tokens)

    def name(self, row: Saving) -> str:
        """Return what tables call a way to send the requests."""
        names = (self.base.policy, row.run.policy)  # what is sent today has no marks
        return "breakpoints only" if names == (TODAY.name, AS_SENT.name) else row.run.policy

    def money(self, row: Saving, prices: Prices) -> float:
        """Return what a thousand requests cost, with their answers."""
        return row.a_thousand(prices.money(row.after, self.output_tokens or 0))

    @property
    def requests(self) -> int:
        """How many requests were sent."""
        return len(self.base.prompt_tokens)

    @property
    def median_tokens(self) -> int:
        """The length of a prompt that half of them have."""
        return round(median(self.base.prompt_tokens)) if self.requests else 0

    @property
    def long_enough(self) -> int:
        """How many prompts are long enough to be kept."""
        return sum(tokens >= self.cache.least_tokens for tokens in self.base.prompt_tokens)

    @property
    def lives(self) -> list[str]:
        """The times to live that something was written for; else the one that is written with."""
        written = {life for row in self.rows for life in row.after.written}
        known = [one.name for one in self.cache.times_to_live if one.name in written]
        return known or [self.cache.time_to_live.name]

    @property
    def least_reads(self) -> float | None:
        """How often a written token has to be read on average; None where writing never pays."""
        saving = self.cache.saving
        return max(0.0, self.cache.write_factor - 1) / saving if saving > 0 else None

    @property
    def is_too_short(self) -> bool:
        """Whether most prompts are shorter than what is kept."""
        return 2 * self.long_enough < self.requests

    @property
    def break_even(self) -> str:
        """When writing pays, in words."""
        least, cache, token = self.least_reads, self.cache, "times an uncached token"
        if cache.write_factor <= 1:
            return f"Reading costs {cache.read_factor:g} {token}, writing nothing extra."
        pays = "it never pays"
        if least is not None:
            reads = int(least + 1e-9) + 1
            pays = (
                f"it pays if a written token is read {least:.2f} times on average; a single "
                f"breakpoint, if it is read {_TIMES.get(reads, f'{reads} times')}"
            )
        return (
            f"Writing costs {cache.write_factor:g} {token}, reading {cache.read_factor:g}: {pays}."
        )

    def as_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {
            "cache": profile_spec(self.cache),
            "profile": asdict(self.cache),
            "requests": self.requests,
            "median_prompt_tokens": self.median_tokens,
            "prompts_of_the_minimum": self.long_enough,
            "output_tokens": self.output_tokens,
            "least_reads_of_a_written_token": self.least_reads and round(self.least_reads, 6),
            "prices": self.prices and self.prices.as_json(),
            "rows": [
                {
                    "policy": row.run.policy,
                    "deduplicated": row.run.deduplicated,
                    "prompt_tokens": row.after.prompt_tokens,
                    "uncached_tokens": row.after.uncached,
                    "read_tokens": row.after.read,
                    "written_tokens": dict(row.after.written),
                    "never_read_tokens": row.run.never_read,
                    "bill_to_uncached": round(row.factor(row.after), 6),
                    "money_per_1000_requests": self.prices
                    and round(self.money(row, self.prices), 6),
                }
                for row in self.rows
            ],
        }


def base_run(runs: Sequence[RunResult]) -> RunResult | None:
    """Return the run that others are compared with: as sent today, or else as retrieved."""
    plain = {run.policy: run for run in reversed(runs) if not run.deduplicated}
    return plain.get(TODAY.name) or plain.get(AS_SENT.name)


def price_lines(bill: Bill) -> Iterator[str]:
    """Yield what the money of a bill is from."""
    prices, cache = bill.prices, bill.cache
    if prices is None:
        return
    named = {"input": prices.input, "cached_input": prices.cached_input}
    named |= {f"written_input {life}".rstrip(): prices.written_input[life] for life in bill.lives}
    words = [
        f"{name} {price:g}{' (from the profile)' if name in prices.derived else ''}"
        for name, price in named.items()
    ]
    words.append("output not said" if prices.output is None else f"output {prices.output:g}")
    yield (
        f"Prices of {prices.date} from {prices.source}, in {prices.currency} for a million tokens: "
        f"{', '.join(words)}."
    )
    if prices.input:
        read = prices.cached_input / prices.input
        write = prices.written_input[cache.time_to_live.name] / prices.input
        pays_to_write = abs(write - cache.write_factor) > _ALIKE and cache.write_factor > 1
        if abs(read - cache.read_factor) > _ALIKE or pays_to_write:
            yield (
                f"By these prices reading costs {read:.3g} times the input and writing "
                f"{write:.3g}; plans and input bill go by the profile's {cache.read_factor:g} and "
                f"{cache.write_factor:g}."
            )
