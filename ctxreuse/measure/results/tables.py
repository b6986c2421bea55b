"""What terminals and reports show of results: lines of text, and tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import exp, log
from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np

from ctxreuse.measure.replay.simulate import RunResult, SizeResult, TraceSummary
from ctxreuse.measure.results.bill import Bill, Saving, price_lines
from ctxreuse.measure.results.results import CauseTotal, Results, by_cause
from ctxreuse.measure.results.verdict import amount, cache_words, verdict
from ctxreuse.measure.table import Shown, Table
from ctxreuse.memory.explanations import Explanation
from ctxreuse.rules.cache_rules import profile_spec

Runs: TypeAlias = Sequence[RunResult]
Columns: TypeAlias = dict[str, Callable[[RunResult], str]]

_DEDUPLICATED = "without what a chat shows"

POLICY: Columns = {"order of the blocks": lambda run: run.policy}
_RATIO: Columns = {"hit\nratio": lambda run: f"{run.total.hit_ratio:.3f}"}
_COMPUTED: Columns = {"tokens to\ncompute": lambda run: f"{run.total.prefilled_tokens:,}"}


def verdict_output(results: Results, next_step: str | None = None) -> Iterator[str]:
    """Yield the verdict on results, maybe with another next step, and an empty line."""
    said = verdict(results)
    yield from (said.sentence, f"Next: {next_step or said.next_step}", *said.also, "")


def estimate_output(results: Results, next_step: str | None = None) -> Iterator[Shown]:
    """Yield what a terminal shows of an estimate, the demo, or what an engine reported."""
    yield from verdict_output(results, next_step)
    yield in_words(results.trace)
    yield from tables(results)
    bill = Bill.of(results)
    if bill is not None:
        yield from bill_lines(bill)
    yield from results.notes


def results_json(results: Results, runs: Runs | None = None) -> dict[str, Any]:
    """Return results as a JSON object, with some of their runs; without, those of policies."""
    bill = Bill.of(results)
    return {
        "verdict": verdict(results).as_json(),
        **({} if bill is None else {"bill": bill.as_json()}),
        **({"keep_best": True} if results.keep_best else {}),
        "trace": {**asdict(results.trace), "reuse_bound": round(results.trace.reuse_bound, 6)},
        "runs": [
            {
                "policy": run.policy,
                "deduplicated": run.deduplicated,
                "capacity_tokens": run.capacity_tokens,
                "prompt_tokens": run.total.prompt_tokens,
                "cached_tokens": run.total.cached_tokens,
                "hit_ratio": round(run.total.hit_ratio, 6),
                "word_tokens": run.word_tokens,
                "planning_ms": run.planning_ms,
                **first_token_seconds(run),
            }
            for run in (results.part() if runs is None else runs)
        ],
    }


def first_token_seconds(run: RunResult) -> dict[str, float]:
    """Return half and nearly all of a run's times to the first token; {} if none were measured."""
    return {
        f"first_token_p{share}_s": round(run.first_token_percentile_s(share), 6)
        for share in (50, 95)
        if run.first_token_s
    }


def explanation_output(explanations: Sequence[Explanation], worst: int) -> Iterator[Table]:
    """Yield the causes, and the requests that lost most, as tables."""
    columns: dict[str, Callable[[CauseTotal], str]] = {
        "cause": attrgetter("cause"),
        "requests": lambda one: f"{one.requests:,}",
        "tokens computed again": lambda one: f"{one.lost_tokens:,}",
    }
    rows = by_cause(explanations)
    yield Table.of("Why requests hit or miss", {"": rows}, columns, is_text=True)
    losers = sorted(explanations, key=lambda one: -one.lost_tokens)[:worst]
    if losers := [one for one in losers if one.lost_tokens]:
        yield Table.of(
            "Requests that lost most (`--request ID` says more)",
            {"": losers},
            {
                "request": lambda one: str(one.request_id),
                "cause": lambda one: str(one.cause),
                "closest": lambda one: str(one.closest),
                "shared": lambda one: f"{one.shared_tokens:,} tokens",
                "parts at": lambda one: "its end" if one.block is None else str(one.block),
                "computed again": lambda one: f"{one.lost_tokens:,}",
            },
            is_text=True,
        )


def size_output(results: Sequence[SizeResult]) -> Iterator[Shown]:
    """Yield what caches of several sizes serve of the same requests."""
    tokens = results[0].total.prompt_tokens
    yield f"{len(results[0].usages):,} requests with {tokens:,} prompt tokens"
    yield Table.of(
        "Hit ratio by cache size",
        {"": results},
        {
            "tokens that the cache holds": lambda one: (
                "unlimited" if one.capacity_tokens is None else f"{one.capacity_tokens:,}"
            ),
            "all requests": lambda one: f"{one.total.hit_ratio:.3f}",
            "the second half": lambda one: f"{one.second_half.hit_ratio:.3f}",
        },
    )


def tables(results: Results) -> Iterator[Table]:
    """Yield the tables that results have something for."""
    policies, bill = results.part(), Bill.of(results)
    if results.level == "engine":
        own = [run for run in policies if run.capacity_tokens is None]
        yield engine_table("What the engine reported", own)
        policies = [run for run in policies if run not in own]
    if bill is not None:
        yield bill_table(bill)
    elif policies:
        of = " of the documents alone" if results.level == "blocks" else ""
        groups: dict[str, Runs] = {}
        for size in cache_sizes(policies):
            name = cache_words(size)
            of_size = [run for run in policies if run.capacity_tokens == size]
            groups |= by_kind(of_size, name, f"{name}, {_DEDUPLICATED}")
        title, columns = f"What is left to compute{of}", POLICY | reached(policies)
        yield Table.of(title, groups, columns)


def bill_table(bill: Bill) -> Table:
    """Return a bill as a table: tokens a request by price class, and the sum."""
    prices, requests = bill.prices, max(1, bill.requests)

    def tokens(number: int) -> str:
        return f"{number / requests:,.0f}"

    columns: dict[str, Callable[[Saving], str]] = {
        "": bill.name,
        "un-\ncached": lambda row: tokens(row.after.uncached),
        "read": lambda row: tokens(row.after.read),
    }
    if bill.cache.write_factor > 1:
        for life in bill.lives:
            name = f"written\n{life}" if len(bill.cache.times_to_live) > 1 else "written"
            columns[name] = partial(lambda life, row: tokens(row.after.written.get(life, 0)), life)
        columns["never\nread"] = lambda row: tokens(row.run.never_read)
    if bill.output_tokens is not None:
        columns["out-\nput"] = lambda _: tokens(bill.output_tokens or 0)
    columns["input\nbill"] = lambda row: f"{row.factor(row.after):.3f}"
    if prices is not None:
        columns[f"{prices.currency} a\n1,000"] = lambda row: amount(bill.money(row, prices))
    plain, shorter = ([row for row in bill.rows if row.run.deduplicated == one] for one in (0, 1))
    title = f"The bill with {profile_spec(bill.cache)}: tokens a request by what is paid for them"
    return Table.of(title, {"": plain, _DEDUPLICATED: shorter}, columns)


def bill_lines(bill: Bill) -> Iterator[str]:
    """Yield what the numbers of a bill are from, and when writing pays."""
    cache = bill.cache
    yield "Input bill: as a multiple of the prompts as retrieved with nothing cached."
    yield bill.break_even
    yield from price_lines(bill)
    yield (
        f"Rules of {cache.name} ({cache.date or 'no date'}, {cache.source or 'no source'}): "
        f"prefixes of {cache.least_tokens:,} tokens and more are kept."
    )


def by_kind(runs: Runs, plain: str = "", deduplicated: str = _DEDUPLICATED) -> dict[str, Runs]:
    """Return runs without and runs with de-duplication, by heading."""
    return {
        plain: [run for run in runs if not run.deduplicated],
        deduplicated: [run for run in runs if run.deduplicated],
    }


def reached(runs: Runs) -> Columns:
    """Return columns of what runs reached; the first of each cache size is as retrieved."""
    base = {run.capacity_tokens: run for run in reversed(runs)}
    times: Columns = {"to as\nretrieved": lambda run: _times(run, base.get(run.capacity_tokens))}
    return _COMPUTED | times | _RATIO


def _times(run: RunResult, base: RunResult | None) -> str:
    """Return how many times the tokens of another run had to be computed."""
    if base is None:
        return ""
    before = base.total.prefilled_tokens
    return f"{run.total.prefilled_tokens / before if before else 1.0:.2f}"


def engine_table(
    title: str, runs: Runs, name: Callable[[RunResult], str] = lambda run: run.policy
) -> Table:
    """Return what a server reported, of requests that it answered as retrieved, too."""
    asked = {one for run in runs[:1] for one in run.request_ids}
    groups = {
        heading: [(run, run.only(asked), runs[0].only({*run.request_ids})) for run in group]
        for heading, group in by_kind(runs).items()
    }

    def measured(cell: Callable[[RunResult, RunResult], str]) -> Callable[[_Pair], str]:
        return lambda pair: cell(*pair[1:]) if pair[1].first_token_s else ""

    def milliseconds(share: float) -> Callable[[_Pair], str]:
        return measured(lambda run, _: f"{1e3 * run.first_token_percentile_s(share):,.0f}")

    columns: dict[str, Callable[[_Pair], str]] = {
        next(iter(POLICY)): lambda pair: name(pair[0]),
        "requests": lambda pair: str(len(pair[1].request_ids)),
        "tokens to\ncompute": measured(lambda run, _: f"{run.total.prefilled_tokens:,}"),
        "to as\nretrieved": measured(_times),
        "hit\nratio": measured(lambda run, _: f"{run.total.hit_ratio:.3f}"),
        "first token\np50 ms": milliseconds(50),
        "\np95": milliseconds(95),
        "to as retrieved,\nrequest by request": measured(first_token_ratio),
    }
    return Table.of(title, groups, columns)


# a run, and what it and another one have of the requests that both answered
_Pair: TypeAlias = tuple[RunResult, RunResult, RunResult]


def first_token_ratio(run: RunResult, base: RunResult) -> str:
    """Return how many times as long first tokens took: the geometric mean over the requests."""
    before = dict(zip(base.request_ids, base.first_token_s, strict=True))
    seconds = zip(run.request_ids, run.first_token_s, strict=True)
    pairs = [(after, before[one]) for one, after in seconds if before.get(one) and after]
    if not pairs:
        return ""
    if run == base:
        return "1.000"
    logs = bootstrap_interval([log(after / earlier) for after, earlier in pairs])
    return interval_words(Interval(exp(logs.mean), exp(logs.low), exp(logs.high)))


def interval_words(interval: Interval, sign: str = "") -> str:
    """Return a mean with its interval."""
    return f"{interval.mean:{sign}.3f} [{interval.low:{sign}.3f}, {interval.high:{sign}.3f}]"


def cache_sizes(runs: Runs) -> list[int | None]:
    """Return the cache sizes of some runs, in the order in which they come."""
    return list(dict.fromkeys(run.capacity_tokens for run in runs))


def in_words(summary: TraceSummary) -> str:
    """Return what was replayed, in words."""
    turns = histories = ""
    if summary.conversations:
        turns = f" ({summary.turns:,} of them turns of {summary.conversations:,} conversations)"
        histories = "; the histories of conversations come on top"
    return (
        f"{summary.requests:,} requests{turns} with {summary.blocks:,} different blocks and "
        f"{summary.block_tokens:,} block tokens in all. {summary.reuse_bound:.0%} of them had been "
        f"sent before: no order can have more of them served{histories}."
    )


_SCORES_AT_ONCE = 1_000_000


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its confidence interval."""

    mean: float
    low: float
    high: float


def bootstrap_interval(scores: Sequence[float], *, resamples: int = 10_000) -> Interval:
    """Return the mean of some scores, at least one, with its 95% percentile interval."""
    values, random = np.asarray(scores, dtype=np.float64), np.random.default_rng(0)
    means = np.empty(resamples)
    step = max(1, _SCORES_AT_ONCE // values.size)  # as many samples as fit into memory
    for start in range(0, resamples, step):
        part = means[start : start + step]
        part[:] = values[random.integers(0, values.size, (part.size, values.size))].mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return Interval(float(values.mean()), float(low), float(high))
